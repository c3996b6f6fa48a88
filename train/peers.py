"""Notices that another rank has died where gloo lets this one wait for it, and ends this one.

When a connection breaks, gloo wakes up what waits for an operation of which no byte has been moved yet. It forgets a
tensor that is half sent or half received, and one that its own thread was about to send (gloo 70dc360, signalException
in transport/tcp/pair.cc; torch 2.15): a wait for one of these lasts for the whole --timeout. A receive that is never
answered is woken up. So each rank posts one from the next rank, and waits for it in a separate thread.

It must not know training: the caller passes in what a rank reports before it exits.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist

TAG = 0x70656572  # of the message that is awaited; --parallel pipeline uses others
GRACE = 3.0  # seconds for the main thread to see by itself what the watch has seen; mostly it does at once
FOREVER = timedelta(days=3650)  # gloo would end the connection where a receive exceeds its timeout


class Watch:
    """Watches one rank in a ring; that is enough, since a rank that exits for this reason is noticed by the one before
    it. Does nothing until `start`."""

    def __init__(self) -> None:
        self.on_lost: Callable[[RuntimeError], object] = lambda _error: None
        """Ends the process. Called in the thread of the watch, while the main thread waits and cannot be woken up."""
        self._token = torch.zeros(1, dtype=torch.uint8)
        self._works: list[dist.Work | None] = []
        self._over = threading.Event()
        self._lock = threading.RLock()

    def start(self, *, rank: int, world: int) -> None:
        """Begin to watch the next rank. All ranks of the default group, which is gloo's, call this."""
        self._previous = (rank - 1) % world
        work = dist.irecv(self._token, src=(rank + 1) % world, tag=TAG)
        self._works.append(work)
        threading.Thread(target=self._run, args=(work,), name="peers", daemon=True).start()

    def _run(self, work: dist.Work) -> None:
        try:
            work.wait(FOREVER)
        except RuntimeError as error:
            if self._over.wait(GRACE):
                return
            with self._lock:
                if not self._over.is_set():
                    self.on_lost(error)

    @contextmanager
    def undisturbed(self) -> Iterator[None]:
        """Do not end this rank inside the block: it works alone there, and synchronises with the others afterwards."""
        with self._lock:
            yield

    @contextmanager
    def reporting(self, on_lost: Callable[[RuntimeError], object]) -> Iterator[None]:
        """Call this `on_lost` inside the block. A rank that leaves the block by an exception exits by itself: see `stop`."""
        before, self.on_lost = self.on_lost, on_lost
        try:
            yield
        except BaseException:
            self.stop()
            raise
        finally:
            self.on_lost = before

    def stop(self) -> None:
        """Stop watching: this rank is exiting, and the state of the others does not matter to it any more."""
        with self._lock:
            self._over.set()

    def farewell(self) -> None:
        """Tell the rank before this one that this rank exits normally. Every rank has finished by now."""
        self.stop()
        if not self._works:
            return
        try:
            self._works.append(dist.isend(torch.zeros_like(self._token), dst=self._previous, tag=TAG))
        except RuntimeError:
            pass  # it has left already
