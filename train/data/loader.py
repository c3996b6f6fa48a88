"""Batches from a map-style dataset, in the order that is asked for, with worker processes that live as long
as the run.

Independent of the content of a dataset and of the rank. Workers are started when the first epoch is read, and
exit at `close` or when their rank exits for any reason.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
import sys
import threading
from collections.abc import Generator, Iterator, Sequence
from multiprocessing import connection
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, default_collate
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter

from train.data.random_state import SampleIndices, SeededDataset
from train.data.sampler import RankBatch
from train.errors import TrainError
from train.signals import blocked

_HANDLED_BY_THE_RANK = (signal.SIGTERM, signal.SIGINT)

Batches = Generator[tuple[Any, RankBatch], None, None]


class Loader:
    """Reads one dataset, epoch after epoch.

    `workers` processes prepare `prefetch` batches each ahead of time; 0 reads in this process. `pin` puts
    batches in pinned memory, from where a GPU can copy them while it computes. The random numbers that a
    dataset draws are those of the sample: see random_state.py.

    A dataset that is already on a GPU (its attribute `device` says so) is read in this process, unpinned.
    """

    def __init__(
        self, dataset: Dataset[Any], *, workers: int = 0, pin: bool = False, prefetch: int = 2
    ) -> None:
        on_cpu = getattr(dataset, "device", torch.device("cpu")).type == "cpu"
        self._workers = workers if on_cpu else 0
        self._indices: list[SampleIndices] = []
        self._current: Batches | None = None
        self._loader: DataLoader[Any] | None = DataLoader(
            SeededDataset(dataset, preserve=not self._workers),
            batch_sampler=self._indices,
            num_workers=self._workers,
            pin_memory=pin and on_cpu,
            collate_fn=getattr(dataset, "collate", default_collate),
            worker_init_fn=_init_worker,
            multiprocessing_context=_context() if self._workers else None,
            persistent_workers=self._workers > 0,
            prefetch_factor=prefetch if self._workers else None,
            generator=torch.Generator().manual_seed(0),  # loading draws nothing from the global generator
        )

    def __call__(self, wanted: Sequence[RankBatch]) -> Batches:
        """Yield (batch, what was wanted) for each, in order.

        The caller may stop early; a new call ends an unfinished one. Raises `TrainError` where a worker dies,
        and whatever the dataset itself raises.
        """
        if self._loader is None:
            raise ValueError("this loader is closed")
        self._stop_current()
        self._current = self._read(self._loader, list(wanted))
        return self._current

    def close(self) -> None:
        """End the workers. A second call does nothing."""
        self._stop_current()
        if self._loader is None:
            return
        # torch has no public way to end persistent workers other than dropping the last reference, and an
        # exception on its way up may hold one.
        iterator, self._loader = self._loader._iterator, None
        if not isinstance(iterator, _MultiProcessingDataLoaderIter):
            return
        iterator._shutdown_workers()
        for worker in iterator._workers:
            if worker.is_alive():  # its read hangs, and it ignores the SIGTERM that torch has sent by now
                worker.kill()

    def _read(self, loader: DataLoader[Any], wanted: list[RankBatch]) -> Batches:
        self._indices[:] = [SampleIndices(one.indices, one.key) for one in wanted]
        try:
            yield from zip(self._start(loader), wanted, strict=True)
        except (RuntimeError, ConnectionError, EOFError) as error:
            if not self._workers or not _means_worker_died(error):
                raise
            raise TrainError(
                f"a data-loading process died ({error}); if it ran out of memory, give fewer --workers, or 0"
            ) from error

    def _start(self, loader: DataLoader[Any]) -> Iterator[Any]:
        if not self._workers:
            return iter(loader)
        try:
            # torchrun signals the whole process group. The server that forks the workers would die of it, and
            # so would a worker that has not yet reached `_init_worker`; either would fail the rank, which is
            # to save and exit cleanly.
            with blocked(*_HANDLED_BY_THE_RANK):
                return iter(loader)
        except (AttributeError, TypeError, pickle.PicklingError) as error:
            raise TrainError(
                f"the dataset cannot be sent to worker processes ({error}); define its class at the top of a "
                "module, or give --workers 0"
            ) from error

    def _stop_current(self) -> None:
        current, self._current = self._current, None
        if current is not None:
            current.close()


def _context() -> multiprocessing.context.BaseContext:
    """Return how worker processes are started.

    Not by fork: by now the rank has threads (gloo's, the optimizer's), and a forked child then sometimes
    hangs. A server that has imported torch and nothing else forks them: 0.06 s and 12 MB of its own for a
    worker, where spawn takes 1.5 s and 290 MB (torch 2.15, 2 processors; the server itself takes 1.7 s once).
    macOS frameworks do not survive a fork of any kind.
    """
    if sys.platform != "linux":
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch"])
    return context


def _means_worker_died(error: Exception) -> bool:
    text = str(error)
    if "in DataLoader worker process" in text:  # how torch prefixes what the dataset itself has raised
        return False
    # A connection breaks where the tensors of a batch still have to be fetched from the worker that made
    # them.
    return "DataLoader worker (pid" in text or isinstance(error, (ConnectionError, EOFError))


def _init_worker(_worker: int) -> None:
    """Ignore stop signals, which the rank handles, and exit when the rank does."""
    for number in _HANDLED_BY_THE_RANK:
        signal.signal(number, signal.SIG_IGN)
    # torch's own watchdog compares the parent's process id, and the parent is the fork server, which lives as
    # long as its children: after a rank is killed both would stay forever.
    rank = multiprocessing.parent_process()
    if rank is not None:
        threading.Thread(target=_exit_with, args=(rank.sentinel,), daemon=True).start()


def _exit_with(sentinel: int) -> None:
    connection.wait([sentinel])
    os._exit(1)  # an orderly shutdown is not needed
