"""Sends the project's files to the nodes: each byte leaves this computer once, and the first node passes it
on to all others.

Every node runs a `receive` step for as long as the transfer lasts. The first one gets the files on its stdin,
each other one connects to it; if that fails, it gets them from here. What follows from the nodes' reports is
in transfer_state.py; here is what is sent to them. Any program of a node's login user may write reports, so
all of a report has limits. Files are compressed (zlib level 1) only where the link is slower than zlib.
"""

from __future__ import annotations

import functools
import queue
import secrets
import threading
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from pathlib import Path

from cloudddp.agent import client, replies
from cloudddp.agent.client import Runner
from cloudddp.agent.protocol import transfer
from cloudddp.agent.protocol.codec import ProtocolError
from cloudddp.agent.protocol.file_steps import ReceiveEvent, ReceiveReply, ReceiveRequest
from cloudddp.agent.protocol.manifest import path_from_wire
from cloudddp.agent.protocol.phases import Peer
from cloudddp.agent.protocol.sending import OnSent, Sender, UnreadableFile, Wanted, ignore
from cloudddp.agent.protocol.transfer import PLAIN, ZLIB, Listing, Record, Wants
from cloudddp.agent.replies import decode
from cloudddp.cluster.connect import PROJECT
from cloudddp.errors import CloudDDPError, NodeError, q
from cloudddp.job.transfer_state import Action, Close, GiveUp, NodeState, Note, Offer, Send, TransferState
from cloudddp.ssh.fleet import Outcome

MEASURED = 1 << 20  # bytes after which the rate of the link is known
SAMPLE = 1 << 16  # bytes of a frame that are compressed to see how well and how fast that works
RARELY = 32  # frames of which one is sampled while the link is the faster one
DECAY = 0.9  # of what was measured before, per frame: a buffer on the way takes the first ones at once


def is_worth(link: float, compressor: float, ratio: float) -> bool:
    """Return whether it takes less time to compress and send than to send. `link` and `compressor` are bytes
    per second, `ratio` is the compressed size by the size."""
    return link < compressor * (1 - ratio)


class Compression:
    """What has been measured of the link and of the compressor in one transfer. The threads of several nodes
    may use it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._total = 0
        self._bytes = self._seconds = 0.0  # recent ones of the link
        self._speed = float("inf")  # of the compressor, as it was measured last
        self._unsampled = 0  # frames since

    def measure(self, size: int, seconds: float) -> None:
        with self._lock:
            self._total += size
            self._bytes = DECAY * self._bytes + size
            self._seconds = DECAY * self._seconds + seconds

    def encode(self, data: bytes) -> tuple[int, bytes]:
        """Return the codec for some data, and the data in that."""
        if not data or self._total < MEASURED:
            return PLAIN, data
        link = self._bytes / max(self._seconds, 1e-9)
        self._unsampled += 1
        if link > self._speed and self._unsampled < RARELY:
            return PLAIN, data
        self._unsampled = 0
        sample = data[:SAMPLE]
        began = time.thread_time()  # not the time in which other programs had the processor
        ratio = len(zlib.compress(sample, 1)) / len(sample)
        self._speed = len(sample) / max(time.thread_time() - began, 1e-9)
        return (ZLIB, zlib.compress(data, 1)) if is_worth(link, self._speed, ratio) else (PLAIN, data)


MAX_LINE = 4 << 20  # bytes of a report: the indexes of 100,000 files take 700 kB
MAX_NOTES = 20


class Reports:
    """The reports of one node."""

    def __init__(self) -> None:
        self._line = bytearray()  # the beginning of a report
        self._notes = 0

    def feed(self, data: bytes) -> Iterator[ReceiveEvent]:
        """Yield the reports that are complete. Raises ProtocolError for what no agent sends."""
        self._line += data
        if len(self._line) > MAX_LINE:
            raise ProtocolError("a report is too long")
        if b"\n" not in data:
            return
        *lines, rest = bytes(self._line).split(b"\n")
        self._line[:] = rest
        for line in lines:
            event = decode(line, ReceiveEvent)
            self._notes += bool(event.note)
            if self._notes > MAX_NOTES:
                raise ProtocolError("it sends too many notes")
            yield event


# Seconds without anything to send, after which a node gets to know that this computer is still there.
IDLE = 1.0
SILENCE = 30.0  # seconds without a report of a node, which sends one every 5 s: its stdin ends then
LONG_FRAME = 1.0  # seconds to make one frame; beyond that, the limits of the nodes start again


class _Node:
    """A node, and what is to be written to its stdin: frames, None for the end."""

    def __init__(self, state: NodeState) -> None:
        self.rank, self.state = state.rank, state
        self.reports = Reports()
        self.inbox: queue.SimpleQueue[Iterable[bytes] | None] = queue.SimpleQueue()
        self.reply: ReceiveReply | None = None


@dataclass(eq=False)
class Transfer:
    """One transfer of a listing to the nodes `peers`, of which the first one serves the others. `approve`
    gets what a node lacks before that is sent from here, and may raise: for the first node that ends the
    transfer, for another one only its step. `note` gets what the user should know, `on_bytes` the size of
    each frame that has left; `on_sent` each file's path, its record as it was read, and its inode, or None if
    it was changing. `versions`: of the project on each node when it was compared; `job`: the one whose launch
    this is part of, or ''; `locate`: as for Sender."""

    runner: Runner
    root: Path
    listing: Listing
    peers: Sequence[Peer]
    _: KW_ONLY
    project: str = PROJECT
    origin: str = ""
    versions: Mapping[int, int] | None = None
    job: str = ""
    adds: bool = False
    approve: Callable[[int, Wants], None]
    note: Callable[[str], None]
    on_sent: OnSent = ignore
    on_bytes: Callable[[int], None] = lambda _size: None
    locate: Callable[[str], str] = str

    def __post_init__(self) -> None:
        secret, first, count = secrets.token_hex(32), self.peers[0], len(self.peers)
        self._request = ReceiveRequest(
            self.project, secret, first.node, first, count, self.origin, job=self.job, adds=self.adds
        )
        self._key = secret.encode()
        self._entries = self.listing.entries()
        self._state = TransferState([peer.node for peer in self.peers], self._entries)
        self._nodes = {rank: _Node(state) for rank, state in self._state.nodes.items()}
        self._lock = threading.RLock()  # of the state
        self._error: Exception | None = None  # of this computer: it ends the transfer
        self._compression = Compression()

    @functools.cached_property
    def _listing_frame(self) -> bytes:
        return self.listing.frame(self._key)

    def run(self) -> Outcome[ReceiveReply | None]:
        """Return the nodes' replies and errors. Raises what `approve` raises, and CloudDDPError if a file
        cannot be read."""
        self._do([self._state.offer(self._state.first, time.monotonic())])
        outcome = self.runner.each(
            lambda rank: self._serve(self._nodes[rank]),
            nodes=self._nodes,
            fatal=lambda _: False,
            meanwhile=self._watch,
        )
        if self._error is not None:
            raise self._error
        return outcome

    def _serve(self, node: _Node) -> ReceiveReply | None:
        """Run the step of a node, which lasts until the whole transfer ends, and return its reply."""
        request = replace(self._request, node=node.rank, version=(self.versions or {}).get(node.rank, 0))
        try:
            result = client.run_step(
                self.runner,
                node.rank,
                request,
                body=functools.partial(self._input, node),
                timeout=SILENCE,
                on_stdout=lambda data: self._received(node, data),
            )
            if node.reply is None and self._error is None:
                if not result.exit_code:
                    raise ProtocolError("it ends without a reply")
                raise NodeError(f"node {node.rank}: {replies.failure_text(result)}")
            return node.reply
        except ProtocolError as error:
            raise replies.unreadable(node.rank, ReceiveRequest.STEP, error) from None
        finally:
            with self._lock:
                self._do(self._state.finish(node.rank, time.monotonic()))

    def _received(self, node: _Node, data: bytes) -> None:
        now = time.monotonic()
        for event in node.reports.feed(data):
            with self._lock:
                node.reply = event.done or node.reply
                self._do(self._state.take(node.rank, event, now))

    def _watch(self) -> dict[int, Exception]:
        """Do what is due; return the errors of the nodes that are given up."""
        with self._lock:
            actions = self._state.tick(time.monotonic())
            self._do(actions)
        return {one.rank: _given_up(one) for one in actions if isinstance(one, GiveUp)}

    def _do(self, actions: Iterable[Action]) -> None:
        for action in actions:
            if isinstance(action, Note):
                self.note(action.text)
            elif isinstance(action, Offer):
                self._nodes[action.rank].inbox.put(self._offer())
            elif isinstance(action, Send):
                if action.wants is None or self._is_approved(action.rank, action.wants):
                    self._nodes[action.rank].inbox.put(self._files(action.files))
            elif isinstance(action, Close):
                for node in self._nodes.values():
                    node.inbox.put(None)

    def _is_approved(self, rank: int, wants: Wants) -> bool:
        """Raises what `approve` raises for another node than the first."""
        try:
            self.approve(rank, wants)
        except Exception as error:
            if rank != self._state.first.rank:
                raise
            self._fail(error)
            return False
        return True

    def _fail(self, error: Exception) -> None:
        """End the transfer for all nodes, since of this computer's fault."""
        with self._lock:
            self._error = self._error or error
            self._do(self._state.close(time.monotonic()))

    # -- to a node -------------------------------------------------------------------------------------------

    def _input(self, node: _Node) -> Iterator[bytes]:
        """Yield what goes to the stdin of a node, b"" while there is nothing to send."""
        last = time.monotonic()
        with self._lock:
            self._state.begin(node.rank, last)
        for data in self._frames(node):
            if node.state.finished or time.monotonic() - node.state.heard >= SILENCE:
                return
            is_due = not data and time.monotonic() - last >= IDLE
            yield transfer.frame(self._key, transfer.ALIVE) if is_due else data
            if data or is_due:
                last = time.monotonic()

    def _frames(self, node: _Node) -> Iterator[bytes]:
        while True:
            try:
                frames = node.inbox.get_nowait()
            except queue.Empty:
                yield b""
                continue
            if frames is None:
                yield transfer.frame(self._key, transfer.CLOSE)
                return
            yield from frames

    def _offer(self) -> Iterator[bytes]:
        yield transfer.frame(self._key, transfer.SOURCE)
        yield self._listing_frame

    def _files(self, wanted: Sequence[tuple[int, int]]) -> Iterator[bytes]:
        """Yield the frames of files, b"" while what the node has is only hashed."""
        files = (Wanted(index, path_from_wire(self._entries[index][0]), offset) for index, offset in wanted)
        sender = Sender(
            str(self.root),
            self._key,
            on_sent=self._sent,
            encode=self._compression.encode,
            locate=self.locate,
        )
        asked = time.monotonic()
        try:
            for frame in sender.frames(files):
                now = time.monotonic()
                if not frame or now - asked > LONG_FRAME:
                    with self._lock:
                        self._state.restart_limits(now)
                yield frame
                asked = time.monotonic()
                if frame:
                    self._compression.measure(len(frame), asked - now)
                    with self._lock:
                        self.on_bytes(len(frame))
            yield transfer.frame(self._key, transfer.DONE)
        except Exception as error:
            self._fail(_explained(error))

    def _sent(self, path: str, record: Record, inode: int | None) -> None:
        with self._lock:
            self.on_sent(path, record, inode)


def _given_up(one: GiveUp) -> NodeError:
    reason = f"node {one.rank}: {one.why}"
    return NodeError(
        reason,
        hint=f"is the node overloaded, or its disk? Look with `cloudddp ssh {q(one.rank)}`; `cloudddp sync` "
        "continues",
        reason=reason,
    )


def _explained(error: Exception) -> Exception:
    if not isinstance(error, UnreadableFile):
        return error
    return CloudDDPError(
        f"cannot read {error.path}, which the nodes need: {error.error.strerror}",
        hint="correct its permissions, or add it to .gitignore or sync.exclude if it is temporary; then "
        "repeat the command",
    )
