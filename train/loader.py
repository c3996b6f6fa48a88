"""Batches from a dataset, by the plan of each epoch, with worker processes that live as long as the run.

It must not know what is in a dataset, nor which rank this is: it is handed the shards to read. Workers are started
at the first epoch that is read, and end with `close` or with their rank, however that ends.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from multiprocessing import connection
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, default_collate

from train.errors import TrainError
from train.preempt import held_back
from train.sampler import Shard

_LEFT_TO_THE_RANK = (signal.SIGTERM, signal.SIGINT)


class Loader:
    """Reads one dataset, epoch after epoch. `workers` processes prepare `prefetch` batches each ahead of time; 0
    reads in this process. `pin` puts batches where a GPU can fetch them while it computes. `seed` decides what a
    dataset draws in workers from torch's, numpy's and Python's random numbers: give each rank its own. What comes
    of that depends on which worker reads what, so a resumed run sees other draws; `Augment` has no such history.

    A dataset that lies on a GPU already (its attribute `device` says so) is read in this process, unpinned.
    """

    def __init__(
        self, dataset: Dataset[Any], *, workers: int = 0, pin: bool = False, prefetch: int = 2, seed: int = 0
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
            worker_init_fn=_live_with_the_rank,
            multiprocessing_context=_context() if self._workers else None,
            persistent_workers=self._workers > 0,
            prefetch_factor=prefetch if self._workers else None,
            generator=torch.Generator().manual_seed(seed),  # reading draws nothing from the global one
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
        # torch has no public way to end persistent workers but to drop the last reference, of which an exception
        # on its way up may hold one.
        iterator, self._loader = self._loader._iterator, None
        if iterator is None:
            return
        iterator._shutdown_workers()
        for worker in iterator._workers:
            if worker.is_alive():  # its read hangs, and it ignores the SIGTERM that torch has sent by now
                worker.kill()

    def _read(self, loader: DataLoader[Any], shards: list[Shard]) -> Iterator[tuple[Tensor, Tensor, Shard]]:
        self._plan[:] = [shard.indices for shard in shards]
        try:
            batches = self._start(loader)
            for (inputs, labels), shard in zip(batches, shards, strict=True):
                yield inputs, labels, shard
        except (RuntimeError, ConnectionError, EOFError) as error:
            if not self._workers or not _tells_of_a_death(error):
                raise
            raise TrainError(
                f"a data-loading process died ({error}); out of memory? give fewer --workers, or 0"
            ) from error

    def _start(self, loader: DataLoader[Any]) -> Iterator[Any]:
        if not self._workers:
            return iter(loader)
        try:
            # torchrun signals the whole process group. The server that forks the workers would die of it, and so
            # would a worker that has not come to `_live_with_the_rank` yet; both would fail the rank, which is to
            # save and end cleanly.
            with held_back(*_LEFT_TO_THE_RANK):
                return iter(loader)
        except (AttributeError, TypeError, pickle.PicklingError) as error:
            raise TrainError(
                f"the dataset cannot be sent to worker processes ({error}); define its class at the top of a module, "
                "or give --workers 0"
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


def _tells_of_a_death(error: Exception) -> bool:
    text = str(error)
    if "in DataLoader worker process" in text:  # how torch begins what the dataset itself has raised
        return False
    # A connection breaks where the tensors of a batch are still to be fetched from the worker that made them.
    return "DataLoader worker (pid" in text or isinstance(error, (ConnectionError, EOFError))


def _live_with_the_rank(_worker: int) -> None:
    """What each worker does first: ignore signals, since the rank says when to end, and end when the rank does."""
    for number in _LEFT_TO_THE_RANK:
        signal.signal(number, signal.SIG_IGN)
    # torch's own watch compares the parent's process id, and the parent is the fork server, which lives as long as
    # its children: after a rank is killed both would stay for ever.
    rank = multiprocessing.parent_process()
    if rank is not None:
        threading.Thread(target=_end_with, args=(rank.sentinel,), daemon=True).start()


def _end_with(sentinel: int) -> None:
    connection.wait([sentinel])
    os._exit(1)  # nobody is left to whom an orderly end would matter
