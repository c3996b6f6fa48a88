"""How far a long transfer is, in bytes; nothing for a short one. A node that sends nothing for a while is
named, since its connection counts as broken only later."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from math import inf

from cloudddp.config import timing
from cloudddp.errors import StepUpdate
from cloudddp.job.results.receive import Progress
from cloudddp.operations.reporter import Reporter
from cloudddp.text import size_of

_EVERY = 0.5  # seconds
_SHORT = 1.5  # seconds; what takes less is not shown


class ByteProgress:
    """Shows all transfers together, in a thread of its own; they may run in several threads."""

    def __init__(self, reporter: Reporter) -> None:
        self._reporter = reporter
        # What each node has sent, of how much, and when it was heard last, infinity once it has ended.
        self._nodes: dict[int, tuple[int, int, float]] = {}
        self._progress, self._ended = reporter.progress(), threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> ByteProgress:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    @contextmanager
    def of(self, node: int) -> Iterator[Progress]:
        """Yield what takes the state of the transfer from that node, also when it is only heard."""

        def changed(received: int, total: int) -> None:
            self._nodes[node] = received, total, time.monotonic()

        changed(0, 0)  # it may be silent from the beginning
        try:
            yield changed
        finally:
            self._nodes[node] = (*self._nodes[node][:2], inf)

    def _watch(self) -> None:
        quiet, named = timing.current().quiet, set[int]()
        before, at = 0, time.monotonic()  # when it was shown, or began
        due = at + _SHORT
        while True:
            is_over = self._ended.wait(min(_EVERY, quiet))
            now, nodes = time.monotonic(), self._nodes.copy()
            if nodes and now >= due:
                received, total, _ = map(sum, zip(*nodes.values(), strict=True))
                rate = max(received - before, 0) / max(now - at, 1e-6)
                source = f"node {min(nodes)}" if len(nodes) == 1 else f"{len(nodes)} nodes"
                of = f"{size_of(received)} of {size_of(max(total, received))}"
                self._progress(StepUpdate(f"pulling from {source}: {of}, {size_of(int(rate))}/s"))
                before, at, due = received, now, now + _EVERY
            if is_over:
                self._progress.stop()
                return
            for node, (received, total, heard) in nodes.items():
                is_silent = heard < now - quiet and not 0 < total <= received
                if is_silent and node not in named:
                    named.add(node)
                    self._reporter.log(f"node {node} is not responding; waiting for it")
                elif node in named and not is_silent:
                    named.discard(node)
                    if heard < inf:
                        self._reporter.log(f"node {node} is responding again")
