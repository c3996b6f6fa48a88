"""Random numbers that a dataset draws: determined by the sample, and not by the process that reads it or its history.

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


class SampleIndices(list[int]):
    """Indices of the samples of a batch, with the key of their random numbers."""

    def __init__(self, indices: Sequence[int], key: int) -> None:
        super().__init__(indices)
        self.key = key

    def __reduce__(self) -> tuple[Any, ...]:
        return SampleIndices, (list(self), self.key)


class SeededDataset(Dataset[Any]):
    """A map-style dataset whose random numbers are those of (key, index). `preserve`: those of the process do not change."""

    def __init__(self, dataset: Any, *, preserve: bool) -> None:
        self.dataset = dataset
        self.preserve = preserve
        self._read_many = getattr(dataset, "__getitems__", None)
        self._draws = getattr(dataset, "draws_random_numbers", True)

    def __getitems__(self, indices: SampleIndices) -> Any:
        if not self._draws:
            return self._read(indices)
        if not self.preserve:
            return self._read(indices, indices.key)
        with preserved():
            return self._read(indices, indices.key)

    def __getitem__(self, index: int) -> Any:
        return self.dataset[index]

    def _read(self, indices: Sequence[int], key: int | None = None) -> Any:
        if self._read_many is not None:
            if key is not None:
                seed_all(key, indices[0])
            return self._read_many(list(indices))
        samples = []
        for index in indices:
            if key is not None:
                seed_all(key, index)
            samples.append(self.dataset[index])
        return samples


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
