"""Readers: a dataset as this rank's batches, epoch after epoch, from any step on. One for each kind of
dataset."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sized
from typing import Any, Protocol

from torch.utils.data import Dataset, IterableDataset, default_collate

from train.data.loader import Loader
from train.data.random_state import SeededDataset, preserved, seed_all
from train.data.sampler import GlobalBatchSampler, RankBatch, epoch_key
from train.errors import TrainError, UsageError
from train.flags import DataFlags

Batches = Iterator[tuple[Any, RankBatch]]


class Reader(Protocol):
    """Reads a dataset in global batches."""

    @property
    def steps(self) -> int:
        """Global batches per epoch. Raises `UsageError` where that is unknown."""
        ...

    @property
    def samples(self) -> int | None:
        """The size of the dataset; None for a stream."""
        ...

    def batches(self, epoch: int = 0, first_step: int = 0) -> Batches:
        """Yield (this rank's part of the batch, its counts) from `first_step` on."""
        ...

    def close(self) -> None:
        """End the processes that read."""
        ...


def open_reader(
    dataset: Dataset[Any],
    flags: DataFlags,
    *,
    batch_size: int,
    seed: int,
    rank: int,
    world_size: int,
    shuffle: bool = True,
    pin: bool = False,
) -> Reader:
    """Return the reader of a map-style or an iterable-style dataset. `pin`: batches for a GPU, in pinned
    memory."""
    if isinstance(dataset, IterableDataset):
        if flags.workers:
            raise UsageError(
                "--workers has no effect on a stream of samples, which each rank reads itself: remove it"
            )
        return StreamReader(
            dataset,
            batch_size=batch_size,
            seed=seed,
            rank=rank,
            world_size=world_size,
            steps=flags.steps_per_epoch if shuffle else 0,
        )
    if flags.steps_per_epoch and shuffle:
        raise UsageError(
            f"--steps-per-epoch has no effect on {type(dataset).__name__}, which is no stream of samples: "
            "remove it"
        )
    if not isinstance(dataset, Sized):
        raise UsageError(
            f"{type(dataset).__name__} has no __len__: write a map-style dataset with one, or an "
            "IterableDataset"
        )
    if not len(dataset):
        raise UsageError(f"the dataset ({type(dataset).__name__}) has no samples")
    SeededDataset(dataset, preserve=True).check()
    sampler = GlobalBatchSampler(
        samples=len(dataset),
        batch_size=batch_size,
        seed=seed,
        rank=rank,
        world_size=world_size,
        shuffle=shuffle,
    )
    return MapReader(dataset, sampler, workers=flags.workers, prefetch=flags.prefetch, pin=pin)


class MapReader:
    """Reads a map-style dataset in the sampler's order, with worker processes or without."""

    def __init__(
        self,
        dataset: Dataset[Any],
        sampler: GlobalBatchSampler,
        *,
        workers: int = 0,
        prefetch: int = 2,
        pin: bool = False,
    ) -> None:
        self.sampler = sampler
        self.loader = Loader(dataset, workers=workers, prefetch=prefetch, pin=pin)

    @property
    def steps(self) -> int:
        return self.sampler.steps

    @property
    def samples(self) -> int | None:
        return self.sampler.samples

    def batches(self, epoch: int = 0, first_step: int = 0) -> Batches:
        """As Reader says. A new call ends an unfinished one."""
        return self.loader(list(self.sampler.batches(epoch, first_step)))

    def close(self) -> None:
        self.loader.close()


class StreamReader:
    """Reads an iterable dataset, one pass per epoch.

    Every rank reads the whole stream, in global batches, and keeps its own samples of each, so that the
    global batches do not depend on the number of ranks. A stream must be the same on every rank: what it
    draws is seeded by the epoch, and `set_epoch`, if it has that, is called before each pass. `steps`: how
    many batches an epoch has, where the stream has no length.
    """

    def __init__(
        self,
        dataset: IterableDataset[Any],
        *,
        batch_size: int,
        seed: int,
        rank: int = 0,
        world_size: int = 1,
        steps: int = 0,
    ) -> None:
        self.dataset = dataset
        self.batch_size, self.seed = batch_size, seed
        self.rank, self.world_size = rank, world_size
        self._steps = steps
        self._collate = getattr(dataset, "collate", default_collate)

    @property
    def steps(self) -> int:
        if self._steps:
            return self._steps
        if not isinstance(self.dataset, Sized):
            raise UsageError(f"{type(self.dataset).__name__} has no __len__: give --steps-per-epoch")
        return max(1, -(-len(self.dataset) // self.batch_size))

    @property
    def samples(self) -> int | None:
        return None

    def batches(self, epoch: int = 0, first_step: int = 0) -> Batches:
        """As Reader says; the batches before `first_step` are read and skipped. Raises `TrainError` where the
        stream ends before the step that its length, or --steps-per-epoch, promises."""
        key = epoch_key(self.seed, epoch)
        if hasattr(self.dataset, "set_epoch"):
            self.dataset.set_epoch(epoch)
        with preserved():
            seed_all(key, 0)
            samples = iter(self.dataset)
        known = self._steps or (self.steps if isinstance(self.dataset, Sized) else None)
        for step in itertools.count() if known is None else range(known):
            with preserved():
                seed_all(key, step + 1)
                batch = list(itertools.islice(samples, self.batch_size))
            if not batch and known is None:
                return
            if not batch:
                raise TrainError(
                    f"the stream of samples ended after {step} of {known} batches of epoch {epoch + 1}: "
                    + ("give a smaller --steps-per-epoch" if self._steps else "correct its __len__")
                )
            if step >= first_step:
                own = batch[self.rank :: self.world_size]
                yield self._collate(own or batch[:1]), RankBatch([], len(own), len(batch), key)

    def close(self) -> None:
        """Do nothing: no other process reads."""
