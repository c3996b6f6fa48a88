"""Which samples each rank takes at each step.

The unit is the global batch: epoch and seed decide one permutation, step s takes the s-th slice of it, and rank r
of W takes every W-th sample of that slice. So each sample is used exactly once per epoch, and the global batches
are the same whatever W is. It must not know datasets, devices or process groups: it deals in indices only.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Shard:
    """One rank's part of one global batch.

    `count` is how many samples of the batch are this rank's. An idle rank (count 0: the last batch had fewer
    samples than there are ranks) is handed one index all the same, to be used at weight 0, because every rank has
    to take part in the gradient reduction.
    """

    indices: list[int]
    count: int
    global_count: int


@dataclass(frozen=True, slots=True, kw_only=True)
class GlobalBatches:
    """The training order of `samples` samples in global batches of `batch_size`, as rank `rank` sees it."""

    samples: int
    batch_size: int
    seed: int
    rank: int = 0
    world: int = 1

    @property
    def steps(self) -> int:
        """Steps per epoch; the last one may be a smaller batch."""
        return -(-self.samples // self.batch_size)

    def order(self, epoch: int) -> list[int]:
        """The permutation of all samples for this epoch: the same on every rank."""
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + epoch)
        return torch.randperm(self.samples, generator=generator).tolist()

    def epoch(self, epoch: int, first: int = 0) -> Iterator[Shard]:
        """This rank's shards of the epoch from step `first` on: a resumed run skips without loading."""
        order = self.order(epoch)
        for step in range(first, self.steps):
            batch = order[step * self.batch_size : (step + 1) * self.batch_size]
            mine = batch[self.rank :: self.world]
            yield Shard(indices=mine or batch[:1], count=len(mine), global_count=len(batch))


def in_order(*, samples: int, batch_size: int, rank: int, world: int) -> Iterator[Shard]:
    """Rank `rank`'s shards of all samples in their order, in batches of `batch_size` over all ranks, for validation.
    Every rank gets the same number of shards, because some modes gather parameters in each forward pass."""
    for first in range(0, samples, batch_size):
        batch = range(first, min(first + batch_size, samples))
        mine = list(batch[rank::world])
        yield Shard(indices=mine or [first], count=len(mine), global_count=len(batch))
