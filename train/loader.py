"""Batches from a dataset, by the plan of each epoch, with worker processes that live as long as the run.

It must not know what is in a dataset, nor which rank this is: it is handed the shards to read. Workers are started
at the first epoch that is read, and end with `close` or with their rank, however that ends.
"""

from __future__ import annotations

import multiprocessing
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from multiprocessing import resource_tracker
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, default_collate

from train.errors import TrainError
from train.sampler import Shard

_LEFT_TO_THE_RANK = (signal.SIGTERM, signal.SIGINT)


class Loader:
    """Reads one dataset, epoch after epoch. `workers` processes prepare `prefetch` batches each ahead of time; 0
    reads in this process. `pin` puts batches where a GPU can fetch them while it computes.

    A dataset that lies on a GPU already (its attribute `device` says so) is read in this process, unpinned.
    """

    def __init__(
        self, dataset: Dataset[Any], *, workers: int = 0, pin: bool = False, prefetch: int = 2
    ) -> None:
        here = getattr(dataset, "device", torch.device("cpu")).type == "cpu"
        self._workers = workers if here else 0
        self._plan: list[list[int]] = []
        self._reading: Iterator[tuple[Tensor, Tensor, Shard]] | None = None
        self._loader: DataLoader[Any] | None = DataLoader(
            dataset,
            batch_sampler=self._plan,
            num_workers=self._workers,
            pin_memory=pin and here,
            collate_fn=getattr(dataset, "collate", default_collate),
            worker_init_fn=_ignore_signals,
            multiprocessing_context=_context() if self._workers else None,
            persistent_workers=self._workers > 0,
            prefetch_factor=prefetch if self._workers else None,
            generator=torch.Generator().manual_seed(0),  # reading draws nothing from the global one
        )

    def __call__(self, shards: Sequence[Shard]) -> Iterator[tuple[Tensor, Tensor, Shard]]:
        """One (inputs, labels, shard) per shard, in order. It may be left early; a new call ends an unfinished
        one. Raises `TrainError` where a worker dies, and what the dataset itself raises.
        """
        if self._loader is None:
            raise ValueError("this loader is closed")
        self._stop_reading()
        self._reading = self._read(self._loader, list(shards))
        return self._reading

    def close(self) -> None:
        """End the workers. A second call does nothing."""
        self._stop_reading()
        if self._loader is None:
            return
        # torch offers no other way to end persistent workers than to drop the last reference; those that do not
        # end by then (a read that hangs) would outlive it, since they ignore the SIGTERM that it sends them.
        workers = list(getattr(self._loader._iterator, "_workers", []))
        self._loader = None
        for worker in workers:
            if worker.is_alive():
                worker.kill()

    def _read(self, loader: DataLoader[Any], shards: list[Shard]) -> Iterator[tuple[Tensor, Tensor, Shard]]:
        self._plan[:] = [shard.indices for shard in shards]
        try:
            with _signals_held_back(self._workers > 0):
                batches = iter(loader)
            for (inputs, labels), shard in zip(batches, shards, strict=True):
                yield inputs, labels, shard
        except RuntimeError as error:
            if "DataLoader worker" not in str(error):
                raise
            raise TrainError(
                f"a data-loading process died ({error}); out of memory? give fewer --workers, or 0"
            ) from error

    def _stop_reading(self) -> None:
        reading, self._reading = self._reading, None
        if reading is not None:
            reading.close()


def _context() -> multiprocessing.context.BaseContext:
    """How worker processes are started.

    Not by fork: by now the rank has threads (gloo's, the optimizer's), and a child forked then hangs at times. A
    server that has imported torch and nothing else forks them: 0.06 s and 12 MB of its own for a worker, where
    spawn takes 1.5 s and 290 MB (torch 2.15, 2 processors; the server itself takes 1.7 s once). macOS frameworks
    do not survive a fork of any kind.
    """
    if sys.platform != "linux":
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch"])
    return context


@contextmanager
def _signals_held_back(wanted: bool) -> Iterator[None]:
    """Processes started in here do not see SIGTERM and SIGINT; this one sees them afterwards.

    torchrun signals the whole process group. The server that forks the workers would die of it, and so would a
    worker that has not come to `_ignore_signals` yet; both would fail the rank, which is to save and end cleanly.
    """
    if not wanted:
        yield
        return
    resource_tracker.ensure_running()  # its start would let the signals through again
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _LEFT_TO_THE_RANK)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _ignore_signals(_worker: int) -> None:
    for number in _LEFT_TO_THE_RANK:
        signal.signal(number, signal.SIG_IGN)
