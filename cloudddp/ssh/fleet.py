"""Many nodes at once: a thread and a connection per node; results that are never lost.

The result of "do this on every node" is an `Outcome`: node -> value, and node -> error, in every case. The
first fatal error, or Ctrl-C, ends the wait at once; threads are daemons and are not joined, so that the
slowest host never delays the user.
"""

from __future__ import annotations

import functools
import queue
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from math import inf
from typing import Generic, TypeVar

from cloudddp import timings
from cloudddp.config import timing
from cloudddp.errors import CloudDDPError, ConnectError, NodeError
from cloudddp.ssh.connection import DEFAULT_WINDOW, STREAM_WINDOW, Connection
from cloudddp.ssh.running import CommandSpec, Result
from cloudddp.ssh.target import Target
from cloudddp.ssh.time_limits import AwakeClock

# Bytes that nodes may send ahead, all together, unless that is less than paramiko's default.
MAX_WINDOWS = 128 << 20
POLL = 0.2  # seconds: how often `meanwhile` is called

T = TypeVar("T")


@dataclass(slots=True)
class Outcome(Generic[T]):
    """Values and errors by node. A node in neither was still working when the others were stopped."""

    values: dict[int, T] = field(default_factory=dict)
    errors: dict[int, Exception] = field(default_factory=dict)

    def all(self) -> dict[int, T]:
        """Return all values in node order; raise the error of the first node that has one, with the number of
        others."""
        if not self.errors:
            return dict(sorted(self.values.items()))
        first = min(self.errors)
        error = self.errors[first]
        if isinstance(error, CloudDDPError):
            error.more_nodes = len(self.errors) - 1
        raise error


def each(
    work: Mapping[int, Callable[[], T]],
    *,
    fatal: Callable[[Exception], bool] = lambda _: True,
    on_stop: Callable[[], None] = lambda: None,
    meanwhile: Callable[[], Mapping[int, Exception] | None] = lambda: None,
) -> Outcome[T]:
    """Call one function per node, each in a thread of its own.

    Returns when all have returned, or at the first error for which `fatal` is true: then `on_stop` is called
    (it closes connections, which ends the others) and no other function is waited for. The same happens for
    KeyboardInterrupt, and for what `meanwhile` raises, which the waiting thread calls several times a second.
    The nodes that `meanwhile` returns have failed with these errors, and are no longer waited for.
    """
    outcome: Outcome[T] = Outcome()
    done: queue.SimpleQueue[tuple[int, T | Exception]] = queue.SimpleQueue()

    def run(node: int) -> None:
        try:
            done.put((node, work[node]()))
        except Exception as error:
            done.put((node, error))

    def take() -> tuple[int, T | Exception]:
        while True:  # a wait without a timeout would not see Ctrl-C
            try:
                return done.get(timeout=POLL)
            except queue.Empty:
                for node, error in (meanwhile() or {}).items():
                    done.put((node, error))

    try:
        for node in work:  # inside the try: Ctrl-C may come while threads are started
            threading.Thread(target=run, args=(node,), daemon=True, name=f"node {node}").start()
        while len(outcome.values) + len(outcome.errors) < len(work):
            node, end = take()
            if node in outcome.errors or node in outcome.values:
                continue  # it was given up before
            if not isinstance(end, Exception):
                outcome.values[node] = end
                continue
            outcome.errors[node] = end
            if fatal(end):
                on_stop()
                # The values that arrived before the stop; later errors are caused by the stop itself.
                while not done.empty():
                    node, end = done.get()
                    if not isinstance(end, Exception) and node not in outcome.errors:
                        outcome.values[node] = end
                break
    except BaseException:
        on_stop()
        raise
    return outcome


class Fleet:
    """Open connections to every node of a cluster, by node rank."""

    def __init__(self, targets: Mapping[int, Target]) -> None:
        self.targets = dict(targets)
        self._connections: dict[int, Connection] = {}
        self._lock = threading.Lock()
        self._closed = False
        self._clock = AwakeClock()
        self._silent_since: dict[int, float] = {}  # time.monotonic() of the first attempt without an answer
        self._failures: dict[int, str] = {}  # why the last attempt failed, by node that is not connected

    def __enter__(self) -> Fleet:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def connect(
        self,
        *,
        within: float = 0.0,
        connect_timeout: float | None = None,
        meanwhile: Callable[[], None] = lambda: None,
        partly: bool = False,
    ) -> dict[int, Exception]:
        """Connect to every node. With `within`, retry for that many seconds the nodes that may still be
        booting.

        `meanwhile` is called while this lasts, and may raise to end it. With `partly`, nodes that cannot be
        reached are removed from the fleet and returned with their errors; raises only if no node can be
        reached.
        """
        work = {
            node: functools.partial(self.connect_node, node, within=within, connect_timeout=connect_timeout)
            for node in self.targets
        }

        def look() -> None:
            self._clock()
            meanwhile()

        outcome = each(work, fatal=lambda _: not partly, on_stop=self.close, meanwhile=look)
        for node, error in outcome.errors.items() if outcome.values else ():
            if isinstance(error, ConnectError) and error.patience == inf:
                error.other_node = node
        if not partly or not outcome.values:
            outcome.all()
        self.targets = {node: target for node, target in self.targets.items() if node in outcome.values}
        return outcome.errors

    @property
    def nodes(self) -> tuple[int, ...]:
        return tuple(self.targets)

    @property
    def ids(self) -> dict[int, str]:
        return {node: target.id for node, target in self.targets.items()}

    def silent_for(self) -> tuple[int, float] | None:
        """Return the node that has answered nothing for the longest time so far, and that time in seconds."""
        now = time.monotonic()
        return max(
            ((node, now - since) for node, since in dict(self._silent_since).items()),
            key=lambda item: item[1],
            default=None,
        )

    def missing(self) -> list[int]:
        """Return the nodes to which there is no connection."""
        with self._lock:
            return sorted(self.targets.keys() - self._connections.keys())

    def last_failure(self) -> str:
        """Return why the last attempt failed to connect to the first node that does not answer yet; '' if
        none failed."""
        failures = dict(self._failures)
        return failures[min(failures)] if failures else ""

    def connect_node(self, node: int, *, within: float = 0.0, connect_timeout: float | None = None) -> None:
        """Connect to one node; `within`: as `connect`."""
        limit = timing.current().connect if connect_timeout is None else connect_timeout
        began = time.monotonic()
        refused: float | None = None  # when the last unbroken run of refusals began
        self._clock()
        slept = self._clock.slept
        while True:
            try:
                attempt = time.monotonic()
                remaining = max(began + within - attempt, 1.0) if within else limit
                with timings.span("SSH connect", node):
                    connection = self._open(node, min(limit, remaining))
                self._silent_since.pop(node, None)
                self._failures.pop(node, None)
                break
            except ConnectError as error:
                self._clock()
                if self._clock.slept > slept:  # once: it may not be the node that was silent
                    slept = inf
                    continue
                now = time.monotonic()
                self._failures[node] = error.message
                if error.silent:
                    self._silent_since.setdefault(node, attempt)
                else:
                    self._silent_since.pop(node, None)
                # A node that boots is not refusing yet, however long that takes, so patience counts from the
                # first refusal.
                refused = None if error.patience == inf else (refused or now)
                if now - began >= within or (refused is not None and now - refused >= error.patience):
                    if within and error.patience:
                        error.retried = now - began
                    raise
                time.sleep(0.25 if within < 30 else 1.0)
        with self._lock:
            if not self._closed:
                self._connections[node] = connection
                return
        connection.close()  # the fleet was closed while this node was connecting

    def each(
        self,
        work: Callable[[int], T],
        *,
        nodes: Iterable[int] | None = None,
        fatal: Callable[[Exception], bool] = lambda _: True,
        meanwhile: Callable[[], Mapping[int, Exception] | None] = lambda: None,
    ) -> Outcome[T]:
        """Run `work(node rank)` for every node, or for some. A fatal error closes every connection of the
        fleet. `meanwhile`: as in `each`."""

        def look() -> Mapping[int, Exception] | None:
            self._clock()
            return meanwhile()

        chosen = self.targets if nodes is None else nodes
        return each(
            {node: functools.partial(work, node) for node in chosen},
            fatal=fatal,
            on_stop=self.close,
            meanwhile=look,
        )

    def connection(self, node: int) -> Connection:
        """Return the connection to a node. Raises NodeError."""
        with self._lock:
            connection = self._connections.get(node)
        if connection is None:
            raise NodeError(f"{self.targets[node].label}: not connected")
        return connection

    @property
    def window(self) -> int:
        """How many bytes of a stream each node may send ahead: all together need no more than MAX_WINDOWS."""
        return min(max(MAX_WINDOWS // max(len(self.targets), 1), DEFAULT_WINDOW), STREAM_WINDOW)

    def _open(self, node: int, connect_timeout: float | None = None) -> Connection:
        return Connection.open(self.targets[node], connect_timeout=connect_timeout, window=self.window)

    def run(self, node: int, spec: CommandSpec) -> Result:
        """Run a command on one node: Connection.run."""
        return self.connection(node).run(spec)

    def host_key(self, node: int) -> str:
        """Return the host key that a node has presented."""
        return self.connection(node).host_key

    def expect(self, node: int, host_key: str) -> None:
        """Accept only that host key from the node's next connection on."""
        self.targets[node] = replace(self.targets[node], host_keys=(host_key,))

    def leave_out(self, nodes: Iterable[int]) -> None:
        """Remove nodes from the fleet and close their connections."""
        for node in nodes:
            self.targets.pop(node)
            with self._lock:
                connection = self._connections.pop(node, None)
            if connection is not None:
                connection.close()

    def reconnect(self, node: int, wanted: Callable[[], bool] = lambda: True) -> None:
        """Replace a node's connection by a new one. Raises NodeError if that is no longer `wanted` once it
        is open."""
        connection = self._open(node)
        with self._lock:
            replaces = wanted()
            if replaces:
                old = self._connections.get(node)
                self._connections[node] = connection
        if not replaces:
            connection.close()
            raise NodeError(f"{self.targets[node].label}: a new connection is no longer wanted")
        if old is not None:
            old.close()

    def close(self) -> None:
        with self._lock:
            self._closed = True
            connections, self._connections = list(self._connections.values()), {}
        for connection in connections:
            connection.close()
