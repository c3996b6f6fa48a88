"""Sends the project's files to the nodes: each byte leaves this computer once, and the nodes pass it on in a chain.

Every node runs a `receive` step for as long as the transfer lasts. The first one of the chain gets the files on its stdin,
each other one connects to the node before it, or else to the first one; if both fail, it gets them from here. The nodes after one
that falls behind are told to use another source.
"""

from __future__ import annotations

import functools
import queue
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from cloudddp.agent import client
from cloudddp.agent.client import Runner
from cloudddp.agent.decode import decode
from cloudddp.agent.protocol import transfer
from cloudddp.agent.protocol.codec import ProtocolError
from cloudddp.agent.protocol.manifest import path_from_wire
from cloudddp.agent.protocol.peer import Peer
from cloudddp.agent.protocol.sending import Gone, Sender, Wanted
from cloudddp.agent.protocol.transfer import (
    LAPTOP,
    ZSTD,
    Listing,
    ReceiveEvent,
    ReceiveReply,
    ReceiveRequest,
    Record,
    Wants,
)
from cloudddp.cluster.connect import PROJECT
from cloudddp.errors import CloudDDPError, NodeError, Text
from cloudddp.job.compression import Compression
from cloudddp.ssh.fleet import Outcome, gather
from cloudddp.ssh.running import Result
from cloudddp.text import one_line

IDLE = (
    1.0  # seconds without anything to send, after which a node gets to know that this computer is still there
)
SILENCE = 30.0  # seconds without a report of a node, which sends one every 5 s: its stdin ends then
MAX_NOISE = 1 << 16  # bytes
MAX_LINE = 4 << 20  # bytes of a report: the indexes of 100,000 files take 700 kB

# A node has fallen behind when the node before it has so many bytes more, and gets them so many times faster.
BEHIND = 32 << 20
FACTOR = 4
RATE_SECONDS = 3.0  # over which rates are measured

_CLOSE = object()


@dataclass(slots=True)
class _Node:
    """One node of the chain, by what it has reported."""

    rank: int
    position: int
    source: int  # the position of the node that it gets the files from, or LAPTOP
    inbox: queue.SimpleQueue[object] = field(default_factory=queue.SimpleQueue)
    received: deque[tuple[float, int]] = field(default_factory=lambda: deque([(time.monotonic(), 0)]))
    line: bytearray = field(default_factory=bytearray)
    begun: bool = False  # it has reported something
    noise: int = 0  # bytes before that
    heard: float = field(default_factory=time.monotonic)
    reply: ReceiveReply | None = None
    ended: bool = False
    has_zstd: bool = False  # it can decode it
    avoided: bool = False  # the nodes after it use another one

    @property
    def bytes(self) -> int:
        return self.received[-1][1]

    def rate(self, now: float) -> float | None:
        """Return bytes per second in the last RATE_SECONDS, None before."""
        first, begin = self.received[0]
        return (self.bytes - begin) / (now - first) if now - first >= RATE_SECONDS else None


class Transfer:
    """One transfer of a listing to the nodes of a chain. `approve` gets what the first node lacks before anything is sent, and may
    raise; `note` gets what the user should know, `on_bytes` the size of each frame that has left; `sent` each file as it was read, and whether it was stable meanwhile."""

    def __init__(
        self,
        runner: Runner,
        root: Path,
        listing: Listing,
        chain: Sequence[Peer],
        *,
        project: str = PROJECT,
        approve: Callable[[Wants], None],
        note: Callable[[Text], None],
        sent: Callable[[str, Record, bool], None],
        on_bytes: Callable[[int], None] = lambda _size: None,
    ) -> None:
        self._runner, self._root, self._listing = runner, root, listing
        self._chain, self._project = tuple(chain), project
        self._approve, self._note, self._sent, self._on_bytes = approve, note, sent, on_bytes
        self._secret = secrets.token_hex(32)
        self._key = self._secret.encode()
        self._nodes = {
            peer.node: _Node(peer.node, position, position - 1) for position, peer in enumerate(chain)
        }
        self._lock = threading.RLock()
        self._error: Exception | None = None  # of this computer: it ends the transfer
        self._compression = Compression()
        self._is_approved = False
        self._is_direct = False

    def run(self) -> Outcome[ReceiveReply | None]:
        """Return the nodes' replies and errors. Raises what `approve` raises, and CloudDDPError if a file cannot be read."""
        starts = {rank: functools.partial(self._start, node) for rank, node in self._nodes.items()}
        outcome = gather(starts, fatal=lambda _: False, on_stop=self._runner.close)
        if self._error is not None:
            raise self._error
        return outcome

    def _start(self, node: _Node, on_end: Callable[[ReceiveReply | Exception | None], None]) -> None:
        """Start the step of a node, which lasts until the whole transfer ends."""

        def ended(end: Result | Exception) -> None:
            try:
                on_end(self._reply(node, end))
            except Exception as error:
                on_end(error)
            finally:
                self._ended(node)

        client.start_step(
            self._runner,
            node.rank,
            ReceiveRequest(self._project, self._secret, node.position, self._chain),
            ended,
            body=self._input(node),
            timeout=SILENCE,
            on_stdout=lambda data: self._received(node, data),
        )

    def _reply(self, node: _Node, end: Result | Exception) -> ReceiveReply | None:
        try:
            if isinstance(end, Exception):
                raise end
            if node.reply is None and self._error is None:
                if not end.exit_code:
                    raise ProtocolError("it ends without a reply")
                raise NodeError(f"node {node.rank}: {client.failure_text(end)}")
            return node.reply
        except ProtocolError as error:
            raise client.unreadable(node.rank, ReceiveRequest.STEP, error) from None

    def _ended(self, node: _Node) -> None:
        """Note that a node needs nothing more; the last one ends the steps of all, which have served each other until then."""
        with self._lock:
            node.ended = True
            if all(one.ended for one in self._nodes.values()):
                self._close()

    def _close(self) -> None:
        for one in self._nodes.values():
            one.inbox.put(_CLOSE)

    def _fail(self, error: Exception) -> None:
        """End the transfer for all nodes, since of this computer's fault."""
        with self._lock:
            self._error = self._error or error
            self._close()

    # -- to a node -----------------------------------------------------------------------------------------------

    def _input(self, node: _Node) -> Iterator[bytes]:
        """Yield what goes to the stdin of a node, b"" while there is nothing to send."""
        if node.position == 0:
            yield self._listing.frame(self._key)
        last = time.monotonic()
        while time.monotonic() - node.heard < SILENCE:
            try:
                todo = node.inbox.get_nowait()
            except queue.Empty:
                is_due = time.monotonic() - last >= IDLE
                last = time.monotonic() if is_due else last
                yield transfer.frame(self._key, transfer.ALIVE) if is_due else b""
                continue
            if todo is _CLOSE:
                yield transfer.frame(self._key, transfer.CLOSE)
                return
            if isinstance(todo, bytes):
                yield todo
            elif isinstance(todo, Wants):
                try:
                    yield from self._files(node, todo)
                except Exception as error:
                    self._fail(_explained(error))

    def _files(self, node: _Node, wants: Wants) -> Iterator[bytes]:
        entries = self._listing.entries()
        wanted = [
            Wanted(index, path_from_wire(entries[index][0]), offset) for index, offset in wants.of(entries)
        ]
        sender = Sender(str(self._root), self._key, sent=self._sent, encode=self._compression.encode)
        for frame in sender.frames(wanted):
            if time.monotonic() - node.heard > SILENCE:
                return
            began = time.monotonic()
            yield frame
            self._compression.measure(len(frame), time.monotonic() - began)
            self._on_bytes(len(frame))
        yield transfer.frame(self._key, transfer.DONE)

    # -- from a node ---------------------------------------------------------------------------------------------

    def _received(self, node: _Node, data: bytes) -> None:
        """Take what a node reports. Raises ProtocolError."""
        node.line += data
        if len(node.line) > MAX_LINE:
            raise ProtocolError("a report is too long")
        *lines, rest = bytes(node.line).split(b"\n")
        node.line[:] = rest
        for line in lines:
            try:
                event = decode(line, ReceiveEvent)
            except ProtocolError:
                node.noise += len(line)
                if node.begun or node.noise > MAX_NOISE:
                    raise
                continue  # a .bashrc has written before
            node.begun, node.heard = True, time.monotonic()
            self._act(node, event)

    def _act(self, node: _Node, event: ReceiveEvent) -> None:
        if event.received:
            self._count(node, event.received)
        if event.codecs:
            self._decodable(node, event.codecs)
        if event.wants is not None:
            self._send(node, event.wants)
        if event.direct:
            self._send_directly(node, event.direct)
        elif event.note:
            self._note(f"node {node.rank}: {one_line(event.note, 300)}")
        if event.done is not None:
            node.reply = event.done
            self._ended(node)

    def _decodable(self, node: _Node, codecs: Sequence[int]) -> None:
        """Use zstd once all nodes have reported that they can decode it: each frame is passed on as it is."""
        with self._lock:
            node.has_zstd = ZSTD in codecs
            if all(one.has_zstd for one in self._nodes.values()):
                self._compression.use_zstd()

    def _send(self, node: _Node, wants: Wants) -> None:
        wants.of(self._listing.entries())  # raises ProtocolError for what was not listed
        with self._lock:
            try:
                if not self._is_approved:
                    self._approve(wants)
                    self._is_approved = True
            except Exception as error:
                self._fail(error)
                return
        node.inbox.put(wants)

    def _send_directly(self, node: _Node, reason: str) -> None:
        """Send the files to a node that can get them from no other one."""
        with self._lock:
            first, self._is_direct = not self._is_direct, True
        if first:
            self._note(
                f"warning: nodes cannot copy files from each other ({one_line(reason, 300)}); sending from this computer"
            )
        node.source = LAPTOP
        node.inbox.put(transfer.source(self._key, LAPTOP))
        node.inbox.put(self._listing.frame(self._key))

    def _count(self, node: _Node, received: int) -> None:
        now = time.monotonic()
        with self._lock:
            node.received.append((now, received))
            while len(node.received) > 1 and now - node.received[1][0] >= RATE_SECONDS:
                node.received.popleft()
            for slow in fallen_behind(list(self._nodes.values()), now):
                self._avoid(slow)

    def _avoid(self, slow: _Node) -> None:
        """Tell the nodes that get the files from this one to use the one before it."""
        slow.avoided = True
        after = [one for one in self._nodes.values() if one.source == slow.position and not one.ended]
        for one in after:
            one.source = slow.source
            one.inbox.put(transfer.source(self._key, slow.source))
        if after:
            self._note(f"node {slow.rank} is slow; the nodes after it use another source")


def fallen_behind(nodes: Sequence[_Node], now: float) -> list[_Node]:
    """Return the nodes that hold up the ones after them."""
    by_position = {one.position: one for one in nodes}
    return [
        one
        for one in nodes
        if not (one.avoided or one.ended)
        and (before := by_position.get(one.source)) is not None
        and before.bytes - one.bytes > BEHIND
        and (rate := one.rate(now)) is not None
        and (before.ended or (before.rate(now) or 0.0) > FACTOR * rate)
    ]


def _explained(error: Exception) -> Exception:
    if not isinstance(error, Gone):
        return error
    return CloudDDPError(
        f"{error.path} disappeared before it was sent to the nodes: {error.error.strerror}",
        hint="repeat the command; add temporary files to .gitignore or sync.exclude",
    )
