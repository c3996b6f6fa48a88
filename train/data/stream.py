"""Batches from an iterable-style dataset: a stream of samples without indices.

Every rank reads the whole stream, in global batches, and keeps its own samples of each, so that the global batches do not
depend on the number of ranks. A stream must be the same on every rank: what it draws is seeded by the epoch, and
`set_epoch`, if it has that, is called before each pass.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

from torch.utils.data import IterableDataset, default_collate

from train.data.random_state import preserved, seed_all
from train.data.sampler import RankBatch, epoch_key


class Stream:
    """Reads an iterable dataset of samples, one pass per epoch."""

    def __init__(
        self, dataset: IterableDataset[Any], *, batch_size: int, seed: int, rank: int, world_size: int
    ) -> None:
        self.dataset = dataset
        self.batch_size = batch_size
        self.seed = seed
        self.rank, self.world_size = rank, world_size
        self._collate = getattr(dataset, "collate", default_collate)

    def batches(self, epoch: int, first_step: int = 0) -> Iterator[tuple[Any, RankBatch]]:
        """Yield (batch, its counts) of this rank from `first_step` on; the batches before are read and skipped."""
        key = epoch_key(self.seed, epoch)
        if hasattr(self.dataset, "set_epoch"):
            self.dataset.set_epoch(epoch)
        with preserved():
            seed_all(key, 0)
            samples = iter(self.dataset)
        for step in itertools.count():
            with preserved():
                seed_all(key, step + 1)
                batch = list(itertools.islice(samples, self.batch_size))
            if not batch:
                return
            if step >= first_step:
                own = batch[self.rank :: self.world_size]
                yield self._collate(own or batch[:1]), RankBatch([], len(own), len(batch), key)
