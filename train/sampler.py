"""Which samples each rank takes at each step.

The unit is the global batch: epoch and seed determine one permutation, step s takes the s-th slice of it, and rank r
of W takes every W-th sample of that slice. So each sample is used exactly once per epoch, and the global batches are
the same for every W. It handles indices only, and is independent of datasets, devices and process groups.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Shard:
    """One rank's part of one global batch.

    `count` is the number of samples of the batch that this rank has. An idle rank (count 0: the last batch had fewer
    samples than there are ranks) still gets one index, to be used with weight 0, because every rank has to take part
    in the gradient reduction.
    """

    indices: list[int]
    count: int
    global_count: int


@dataclass(frozen=True, slots=True, kw_only=True)
class GlobalBatchSampler:
    """Training order of `samples` samples in global batches of `batch_size`, as seen by rank `rank`."""

    samples: int
    batch_size: int
    seed: int
    rank: int = 0
    world_size: int = 1

    @property
    def steps(self) -> int:
        """Steps per epoch; the last one may be a smaller batch."""
        return -(-self.samples // self.batch_size)

    def permutation(self, epoch: int) -> list[int]:
        """Return the order of all samples in this epoch, the same on every rank."""
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + epoch)
        return torch.randperm(self.samples, generator=generator).tolist()

    def shards(self, epoch: int, first_step: int = 0) -> Iterator[Shard]:
        """Yield this rank's shards of the epoch from `first_step` on: a resumed run skips without loading."""
        order = self.permutation(epoch)
        for step in range(first_step, self.steps):
            batch = order[step * self.batch_size : (step + 1) * self.batch_size]
            own = batch[self.rank :: self.world_size]
            yield Shard(indices=own or batch[:1], count=len(own), global_count=len(batch))


def sequential_shards(*, samples: int, batch_size: int, rank: int, world_size: int) -> Iterator[Shard]:
    """Yield the shards of rank `rank` of all samples in their order, in batches of `batch_size` over all ranks.

    For validation. Every rank gets the same number of shards, because some modes gather parameters in each forward
    pass.
    """
    for first in range(0, samples, batch_size):
        batch = range(first, min(first + batch_size, samples))
        own = list(batch[rank::world_size])
        yield Shard(indices=own or [first], count=len(own), global_count=len(batch))
