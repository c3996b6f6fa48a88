"""Detects that another rank has died where gloo leaves this one waiting for it, and ends this one.

When a connection breaks, gloo wakes up what waits for an operation of which no byte has been moved yet. It
does not wake up a wait for a tensor that is partially sent or received, or for one that its own thread was
about to send (gloo 70dc360, signalException in transport/tcp/pair.cc; torch 2.15): a wait for one of these
lasts for the whole --timeout. A receive that is never answered is woken up. So each rank posts one from the
next rank and waits for it in a separate thread.

Independent of training: the caller decides what a rank reports before it exits.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist

TAG = 0x70656572  # of the awaited message; --parallel pipeline uses others
GRACE = 3.0  # seconds for the main thread to notice the loss by itself; usually it does at once
FOREVER = timedelta(days=3650)  # gloo would close the connection where a receive exceeds its timeout


class PeerMonitor:
    """Monitors one rank in a ring. That is enough: a rank that exits because of a lost peer is noticed by the
    rank before it. Does nothing until `start`."""

    def __init__(self) -> None:
        self.on_lost: Callable[[RuntimeError], object] = lambda _error: None
        """Ends the process. Called in the monitor's thread while the main thread waits and cannot be woken
        up."""
        self._token = torch.zeros(1, dtype=torch.uint8)
        self._works: list[dist.Work] = []
        self._stopped = threading.Event()
        self._lock = threading.RLock()

    def start(self, *, rank: int, world_size: int) -> None:
        """Start to monitor the next rank. Called by all ranks of the default group, whose backend is gloo."""
        self._previous = (rank - 1) % world_size
        work = dist.irecv(self._token, src=(rank + 1) % world_size, tag=TAG)
        assert work is not None
        self._works.append(work)
        threading.Thread(target=self._run, args=(work,), name="peer-monitor", daemon=True).start()

    def _run(self, work: dist.Work) -> None:
        try:
            work.wait(FOREVER)
        except RuntimeError as error:
            if self._stopped.wait(GRACE):
                return
            with self._lock:
                if not self._stopped.is_set():
                    self.on_lost(error)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Do not end this rank inside the block: it works alone there, and synchronizes with the others
        afterwards."""
        with self._lock:
            yield

    @contextmanager
    def handler(self, on_lost: Callable[[RuntimeError], object]) -> Iterator[None]:
        """Call this `on_lost` inside the block. A rank that leaves the block by an exception exits by itself,
        so monitoring stops."""
        previous, self.on_lost = self.on_lost, on_lost
        try:
            yield
        except BaseException:
            self.stop()
            raise
        finally:
            self.on_lost = previous

    def stop(self) -> None:
        """Stop monitoring: this rank is exiting, and the state of the others no longer matters to it."""
        with self._lock:
            self._stopped.set()

    def announce_exit(self) -> None:
        """Notify the previous rank that this one exits normally. Every rank has finished by now."""
        self.stop()
        if not self._works:
            return
        try:
            work = dist.isend(torch.zeros_like(self._token), dst=self._previous, tag=TAG)
        except RuntimeError:
            return  # it has already exited
        assert work is not None
        self._works.append(work)
