"""Random numbers that a dataset draws: determined by the sample, and not by the process that reads it or its
history.

So a resumed run, one with other workers and one with another number of ranks draw the same.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils.data import Dataset

from train.errors import UsageError


class SampleIndices(list[int]):
    """Indices of the samples of a batch, with the key of their random numbers."""

    def __init__(self, indices: Sequence[int], key: int) -> None:
        super().__init__(indices)
        self.key = key

    def __reduce__(self) -> tuple[Any, ...]:
        return SampleIndices, (list(self), self.key)


class SeededDataset(Dataset[Any]):
    """A map-style dataset whose random numbers are those of (key, index). `preserve`: those of the process do
    not change.

    A dataset that reads many samples at once (`__getitems__`) does so only if it says that it draws nothing,
    by `draws_random_numbers = False`: which samples share a batch depends on the number of ranks.
    """

    def __init__(self, dataset: Any, *, preserve: bool) -> None:
        self.dataset = dataset
        self.preserve = preserve
        self._read_many = getattr(dataset, "__getitems__", None)
        self._draws = getattr(dataset, "draws_random_numbers", True)

    def __getitems__(self, indices: SampleIndices) -> Any:
        if not self._draws:
            return self._read(indices)
        if not self.preserve:
            return self._draw(indices)
        with preserved():
            return self._draw(indices)

    def __getitem__(self, index: int) -> Any:
        return self.dataset[index]

    def check(self) -> None:
        """Raise `UsageError` if the samples have to be read one by one, and what the dataset reads is a whole
        batch."""
        if self._draws and self._read_many is not None:
            with preserved():
                self._read_one(0)

    def _read(self, indices: Sequence[int]) -> Any:
        if self._read_many is not None:
            return self._read_many(list(indices))
        return [self.dataset[index] for index in indices]

    def _draw(self, indices: SampleIndices) -> list[Any]:
        samples = []
        for index in indices:
            seed_all(indices.key, index)
            samples.append(self._read_one(index))
        return samples

    def _read_one(self, index: int) -> Any:
        if self._read_many is None:
            return self.dataset[index]
        read = self._read_many([index])
        if isinstance(read, list) and len(read) == 1:
            return read[0]
        name = type(self.dataset).__name__
        raise UsageError(
            f"{name}.__getitems__ returns a {type(read).__name__}, not a list with one sample per index: "
            "return such a list, or, if the dataset draws no random numbers, give it draws_random_numbers = "
            "False and a `collate` for what it returns"
        )


def seed_all(key: int, index: int) -> None:
    """Seed torch's (CPU), Python's and, if it is imported, numpy's generator."""
    seed = hash((key, index)) & (2**63 - 1)  # of integers: the same in every process
    torch.default_generator.manual_seed(seed)
    random.seed(seed)
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed(seed & (2**32 - 1))


@contextmanager
def preserved() -> Iterator[None]:
    """Restore the state of the generators at the end of the block."""
    numpy = sys.modules.get("numpy")
    states = torch.get_rng_state(), random.getstate(), numpy.random.get_state() if numpy else None
    try:
        yield
    finally:
        torch.set_rng_state(states[0])
        random.setstate(states[1])
        if numpy is not None and states[2] is not None:
            numpy.random.set_state(states[2])
