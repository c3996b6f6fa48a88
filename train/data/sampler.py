"""Which samples each rank takes at each step.

The unit is the global batch: epoch and seed determine one permutation, step s takes the s-th slice of it, and
rank r of W takes every W-th sample of that slice. So each sample is used exactly once per epoch, and the
global batches are the same for every W. It handles indices only, and is independent of datasets, devices and
process groups.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class RankBatch:
    """One rank's samples of one global batch.

    `count` is the number of samples of the batch that this rank has. An idle rank (count 0: the last batch
    had fewer samples than there are ranks) still gets one index, to be used with weight 0, because every rank
    has to take part in the gradient reduction. A stream of samples has no `indices`. What a dataset draws for
    a sample is determined by `key` and the index.
    """

    indices: list[int]
    count: int
    global_count: int
    key: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class GlobalBatchSampler:
    """The order of `samples` samples in global batches of `batch_size`, as seen by rank `rank`: a permutation
    for each epoch, or without `shuffle` their own order, for evaluation."""

    samples: int
    batch_size: int
    seed: int = 0
    rank: int = 0
    world_size: int = 1
    shuffle: bool = True

    @property
    def steps(self) -> int:
        """Steps per epoch; the last one may be a smaller batch."""
        return -(-self.samples // self.batch_size)

    def order(self, epoch: int) -> Sequence[int]:
        """Return the order of all samples in this epoch, the same on every rank."""
        if not self.shuffle:
            return range(self.samples)
        generator = torch.Generator().manual_seed(epoch_key(self.seed, epoch))
        permutation: list[int] = torch.randperm(self.samples, generator=generator).tolist()
        return permutation

    def batches(self, epoch: int, first_step: int = 0) -> Iterator[RankBatch]:
        """Yield this rank's batches of the epoch from `first_step` on: a resumed run skips without loading.

        Every rank gets the same number of batches, also in an evaluation: some modes gather parameters in
        each forward pass.
        """
        order, key = self.order(epoch), epoch_key(self.seed, epoch)
        for step in range(first_step, self.steps):
            batch = order[step * self.batch_size : (step + 1) * self.batch_size]
            own = list(batch[self.rank :: self.world_size])
            yield RankBatch(own or list(batch[:1]), len(own), len(batch), key)


def epoch_key(seed: int, epoch: int) -> int:
    """Return the seed of what is drawn in an epoch."""
    return seed * 1_000_003 + epoch
