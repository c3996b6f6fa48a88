"""How far a long transfer is, in bytes; nothing for a short one. A node that sends nothing for a while is
named, since its connection counts as broken only later."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from cloudddp.config import timing
from cloudddp.errors import StepUpdate
from cloudddp.job.results.receive import Transfer
from cloudddp.operations.reporter import Reporter
from cloudddp.text import size_of

_EVERY = 0.5  # seconds
_SHORT = 1.5  # seconds; what takes less is not shown


class ByteProgress:
    """Shows all transfers together; they may run in several threads."""

    def __init__(self, reporter: Reporter) -> None:
        self._progress = reporter.progress()
        self._lock = threading.Lock()
        self._transfers: dict[int, Transfer] = {}
        self._at = time.monotonic()  # when it was shown, or began
        self._next = self._at + _SHORT
        self._received = 0  # by then
        self._reporter = reporter
        self._last: dict[int, tuple[float, Transfer]] = {}  # what each node has sent last, and when
        self._ended = threading.Event()

    def __enter__(self) -> ByteProgress:
        threading.Thread(target=self._name_silent_nodes, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        with self._lock:
            self._next = float("inf")
            self._progress.stop()

    @contextmanager
    def of(self, node: int) -> Iterator[Callable[[Transfer], None]]:
        """Yield what takes the state of the transfer from that node, as often as it changes or the node is
        heard."""

        def changed(transfer: Transfer) -> None:
            now = time.monotonic()
            self._last[node] = now, transfer
            if now >= self._next or node not in self._transfers:
                self._show(node, transfer)

        self._last[node] = time.monotonic(), Transfer()  # it may be silent from the beginning
        try:
            yield changed
        finally:
            del self._last[node]

    def _name_silent_nodes(self) -> None:
        quiet = timing.current().quiet
        named: set[int] = set()
        while not self._ended.wait(min(1.0, quiet)):
            oldest = time.monotonic() - quiet
            for node, (heard, transfer) in list(self._last.items()):
                complete = 0 < transfer.total <= transfer.received
                silent = heard < oldest and not complete
                if silent and node not in named:
                    self._reporter.log(f"node {node} is not responding; waiting for it")
                    named.add(node)
                elif node in named and not silent:
                    self._reporter.log(f"node {node} is responding again")
                    named.discard(node)

    def _show(self, node: int, transfer: Transfer) -> None:
        with self._lock:
            self._transfers[node] = transfer
            now = time.monotonic()
            if now < self._next:
                return
            transfers = self._transfers.values()
            total, received = sum(one.total for one in transfers), sum(one.received for one in transfers)
            rate = max(received - self._received, 0) / max(now - self._at, 1e-6)
            source = f"node {node}" if len(self._transfers) == 1 else f"{len(self._transfers)} nodes"
            of = f"{size_of(received)} of {size_of(max(total, received))}"
            self._progress(StepUpdate(f"pulling from {source}: {of}, {size_of(int(rate))}/s"))
            self._at, self._next, self._received = now, now + _EVERY, received
