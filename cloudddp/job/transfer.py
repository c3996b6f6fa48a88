"""Sends the project's files to the nodes: each byte leaves this computer once, and the nodes pass it on in a
chain.

Every node runs a `receive` step for as long as the transfer lasts. The first one of the chain gets the files
on its stdin, each other one connects to the node before it, or else to the first one; if both fail, it gets
them from here. The nodes after one that falls behind are told to use another source.
"""

from __future__ import annotations

import functools
import queue
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from cloudddp.agent import client, failures
from cloudddp.agent.client import Runner
from cloudddp.agent.protocol import transfer
from cloudddp.agent.protocol.codec import ProtocolError
from cloudddp.agent.protocol.manifest import MAX_FILES, path_from_wire
from cloudddp.agent.protocol.peer import Peer
from cloudddp.agent.protocol.receive import ReceiveEvent, ReceiveReply, ReceiveRequest
from cloudddp.agent.protocol.sending import OnSent, Sender, UnreadableFile, Wanted, ignore
from cloudddp.agent.protocol.transfer import LAPTOP, Listing, Record, Wants
from cloudddp.cluster.connect import PROJECT
from cloudddp.errors import CloudDDPError, Command, NodeError, Text
from cloudddp.job.compression import Compression
from cloudddp.job.transfer_progress import (
    Progress,
    Stall,
    fallen_behind,
    most_work,
    next_source,
    stalled,
)
from cloudddp.job.transfer_reports import Reports
from cloudddp.ssh.fleet import Outcome
from cloudddp.text import one_line

# Seconds without anything to send, after which a node gets to know that this computer is still there.
IDLE = 1.0
SILENCE = 30.0  # seconds without a report of a node, which sends one every 5 s: its stdin ends then
CLOSING = 30.0  # seconds for a step to end, once its stdin has
LONG_FRAME = 1.0  # seconds to make one frame; beyond that, the limits of the nodes start again

_CLOSE = object()


@dataclass(slots=True, eq=False)
class _Node:
    """A node of the chain, and what it gets from here."""

    rank: int
    progress: Progress
    listings: int  # that it was sent, and for which it has not asked for files
    reports: Reports = field(default_factory=lambda: Reports(time.monotonic()))
    inbox: queue.SimpleQueue[object] = field(default_factory=queue.SimpleQueue)
    continued: frozenset[int] = frozenset()  # the files of which it has a beginning
    wants_direct: bool = False  # it has asked for the files from this computer
    reply: ReceiveReply | None = None
    finished: bool = False  # its result is known


class Transfer:
    """One transfer of a listing to the nodes of a chain. `approve` gets what a node lacks before that is sent
    from here, and may raise: for the first node of the chain that ends the transfer, for another one only its
    step. `note` gets what the user should know, `on_bytes` the size of each frame that has left; `on_sent`
    each file's path, its record as it was read, and its inode, or None if it was changing. `versions`: of the
    project on each node when it was compared; `job`: the one whose launch this is part of, or ''."""

    def __init__(
        self,
        runner: Runner,
        root: Path,
        listing: Listing,
        chain: Sequence[Peer],
        *,
        project: str = PROJECT,
        origin: str = "",
        versions: Mapping[int, int] | None = None,
        job: str = "",
        adds: bool = False,
        approve: Callable[[int, Wants], None],
        note: Callable[[Text], None],
        on_sent: OnSent = ignore,
        on_bytes: Callable[[int], None] = lambda _size: None,
    ) -> None:
        self._runner, self._root, self._listing = runner, root, listing
        self._chain, self._project, self._origin = tuple(chain), project, origin
        self._versions, self._job, self._adds = versions or {}, job, adds
        self._approve, self._note, self._on_sent, self._on_bytes = approve, note, on_sent, on_bytes
        self._secret = secrets.token_hex(32)
        self._key = self._secret.encode()
        self._entries = listing.entries()
        self._most_work = most_work(self._entries)
        self._nodes = [
            _Node(peer.node, Progress(peer.node, position, position - 1), listings=int(position == 0))
            for position, peer in enumerate(chain)
        ]  # by position
        self._progress = [one.progress for one in self._nodes]
        self._lock = threading.RLock()
        self._error: Exception | None = None  # of this computer: it ends the transfer
        self._closed: float | None = None  # when all steps were asked to end
        self._compression = Compression()
        self._is_approved = False
        self._is_direct = False

    @functools.cached_property
    def _listing_frame(self) -> bytes:
        return self._listing.frame(self._key)

    def run(self) -> Outcome[ReceiveReply | None]:
        """Return the nodes' replies and errors. Raises what `approve` raises, and CloudDDPError if a file
        cannot be read."""
        by_rank = {one.rank: one for one in self._nodes}
        outcome = self._runner.each(
            lambda rank: self._serve(by_rank[rank]),
            nodes=by_rank,
            fatal=lambda _: False,
            meanwhile=self._watch,
        )
        if self._error is not None:
            raise self._error
        return outcome

    def _serve(self, node: _Node) -> ReceiveReply | None:
        """Run the step of a node, which lasts until the whole transfer ends, and return its reply."""
        try:
            result = client.run_step(
                self._runner,
                node.rank,
                ReceiveRequest(
                    self._project,
                    self._secret,
                    node.progress.position,
                    self._chain,
                    self._origin,
                    version=self._versions.get(node.rank, 0),
                    job=self._job,
                    adds=self._adds,
                ),
                body=functools.partial(self._input, node),
                timeout=SILENCE,
                on_stdout=lambda data: self._received(node, data),
            )
            if node.reply is None and self._error is None:
                if not result.exit_code:
                    raise ProtocolError("it ends without a reply")
                raise NodeError(f"node {node.rank}: {failures.failure_text(result)}")
            return node.reply
        except ProtocolError as error:
            raise failures.unreadable(node.rank, ReceiveRequest.STEP, error) from None
        finally:
            self._finish(node)

    def _finish(self, node: _Node) -> None:
        """Note that the result of a node is known: a step that was given up may end later."""
        with self._lock:
            node.finished = True
            self._ended(node)

    def _ended(self, node: _Node) -> None:
        """Note that a node needs nothing more; the last one ends the steps of all, which have served each
        other until then."""
        with self._lock:
            node.progress.ended = True
            if all(one.ended for one in self._progress):
                self._close()

    def _close(self) -> None:
        if self._closed is None:
            self._closed = time.monotonic()
        for one in self._nodes:
            one.inbox.put(_CLOSE)

    def _fail(self, error: Exception) -> None:
        """End the transfer for all nodes, since of this computer's fault."""
        with self._lock:
            self._error = self._error or error
            self._close()

    # -- progress --------------------------------------------------------------------------------------------

    def _watch(self) -> dict[int, Exception]:
        """Give nodes that make no progress another source, or give them up; return the errors of those."""
        now = time.monotonic()
        with self._lock:
            if self._closed is not None:
                late = now - self._closed >= CLOSING
                given_up = [one for one in self._nodes if late and not one.finished]
                why = f"its step did not end within {CLOSING:g} s"
            else:
                given_up = self._without_progress(now)
                why = "it made no progress while files were sent to it"
        for node in given_up:
            self._finish(node)
        return {node.rank: _given_up(node, why) for node in given_up}

    def _without_progress(self, now: float) -> list[_Node]:
        given_up = []
        for progress, stall in stalled(self._progress, now):
            node = self._nodes[progress.position]
            if stall is Stall.GIVE_UP:
                self._avoid(progress)
                given_up.append(node)
            else:
                self._note(f"node {node.rank} receives nothing from its source; it uses another source")
                self._use(node, next_source(progress, self._progress))
                progress.moves += 1
        return given_up

    def _use(self, node: _Node, source: int) -> None:
        """Tell a node where to get the rest of the files from."""
        node.progress.source, node.progress.progressed = source, time.monotonic()
        node.inbox.put(transfer.source(self._key, source))
        if source == LAPTOP:
            node.listings += 1
            node.inbox.put(self._listing_frame)

    def _restart_limits(self) -> None:
        """Give the nodes time: this computer has been busy, so they could make no progress."""
        now = time.monotonic()
        with self._lock:
            for one in self._progress:
                one.heard = one.progressed = now

    # -- to a node -------------------------------------------------------------------------------------------

    def _input(self, node: _Node) -> Iterator[bytes]:
        """Yield what goes to the stdin of a node, b"" while there is nothing to send."""
        node.progress.begin(time.monotonic())
        if node.progress.position == 0:
            yield self._listing_frame
        last = time.monotonic()
        while time.monotonic() - node.progress.heard < SILENCE and not node.finished:
            try:
                todo = node.inbox.get_nowait()
            except queue.Empty:
                is_due = time.monotonic() - last >= IDLE
                last = time.monotonic() if is_due else last
                yield self._alive() if is_due else b""
                continue
            if todo is _CLOSE:
                yield transfer.frame(self._key, transfer.CLOSE)
                return
            if isinstance(todo, bytes):
                yield todo
            elif isinstance(todo, list):
                try:
                    yield from self._files(node, todo)
                except Exception as error:
                    self._fail(_explained(error))

    def _alive(self) -> bytes:
        return transfer.frame(self._key, transfer.ALIVE)

    def _files(self, node: _Node, wanted: Sequence[tuple[int, int]]) -> Iterator[bytes]:
        files = (Wanted(index, path_from_wire(self._entries[index][0]), offset) for index, offset in wanted)
        sender = Sender(str(self._root), self._key, on_sent=self._sent, encode=self._compression.encode)
        frames = sender.frames(files)
        last = asked = time.monotonic()
        while (frame := next(frames, None)) is not None:
            now = time.monotonic()
            if not frame or now - asked > LONG_FRAME:
                self._restart_limits()
            if now - node.progress.heard > SILENCE or node.finished:
                return
            if frame:
                yield frame
                self._compression.measure(len(frame), time.monotonic() - now)
                with self._lock:
                    self._on_bytes(len(frame))
                last = time.monotonic()
            else:  # it hashes what the node has
                is_due = now - last >= IDLE
                last = now if is_due else last
                yield self._alive() if is_due else b""
            asked = time.monotonic()
        yield transfer.frame(self._key, transfer.DONE)

    def _sent(self, path: str, record: Record, inode: int | None) -> None:
        with self._lock:
            self._on_sent(path, record, inode)

    # -- from a node -----------------------------------------------------------------------------------------

    def _received(self, node: _Node, data: bytes) -> None:
        """Take what a node reports. Raises ProtocolError."""
        if node.finished:
            raise ProtocolError("its step goes on")
        now = time.monotonic()
        for event in node.reports.feed(data, now):
            with self._lock:
                node.progress.take(event, now, self._most_work)
                self._act(node, event)

    def _act(self, node: _Node, event: ReceiveEvent) -> None:
        if event.received:
            self._count(node, event.received)
        if event.wants is not None:
            self._send(node, event.wants)
        if event.again:
            self._send_again(node, event.again)
        if event.direct:
            self._send_directly(node, event.direct)
        elif event.note:
            self._note(f"node {node.rank}: {one_line(event.note, 300)}")
        if event.done is not None:
            node.reply = event.done
            self._ended(node)

    def _send(self, node: _Node, wants: Wants) -> None:
        """Send what a node lacks: it asks once for each listing that it got from here."""
        if not node.listings:
            raise ProtocolError("it asks for files that were not offered")
        node.listings -= 1
        wanted = wants.of(self._entries)  # raises ProtocolError for what was not listed
        try:
            self._approve(node.rank, wants)
        except Exception as error:
            if self._is_approved or node.progress.position:
                raise
            self._fail(error)
            return
        self._is_approved = True
        node.progress.deletes = min(wants.delete, MAX_FILES)
        node.continued = frozenset(index for index, offset in wanted if offset)
        node.inbox.put(wanted)

    def _send_again(self, node: _Node, indexes: Sequence[int]) -> None:
        """Send files as a whole whose partial file on a node was corrupt: each of those that it continued,
        once."""
        if not node.continued.issuperset(indexes) or len(set(indexes)) < len(indexes):
            raise ProtocolError("it asks again for a file that was sent as a whole")
        node.continued -= frozenset(indexes)
        node.inbox.put([(index, 0) for index in indexes])

    def _send_directly(self, node: _Node, reason: str) -> None:
        """Send the files to a node that can get them from no other one."""
        if node.wants_direct or node.progress.position == 0:
            raise ProtocolError("it asks again to get the files from this computer")
        node.wants_direct = True
        first, self._is_direct = not self._is_direct, True
        if first:
            self._note(
                f"warning: nodes cannot copy files from each other ({one_line(reason, 300)}); sending from "
                "this computer"
            )
        if node.progress.source != LAPTOP:
            self._use(node, LAPTOP)

    def _count(self, node: _Node, received: int) -> None:
        now = time.monotonic()
        with self._lock:
            node.progress.count(received, now)
            for slow in fallen_behind(self._progress, now):
                self._avoid(slow)

    def _avoid(self, slow: Progress) -> None:
        """Tell the nodes that get the files from this one to use the one before it."""
        slow.avoided = True
        after = [
            one for one in self._nodes if one.progress.source == slow.position and not one.progress.ended
        ]
        for one in after:
            self._use(one, slow.source)
        if after:
            self._note(f"node {slow.rank} is slow; the nodes after it use another source")


def _given_up(node: _Node, why: str) -> NodeError:
    reason = f"node {node.rank}: {why}"
    return NodeError(
        reason,
        hint=(
            "is the node overloaded, or its disk? Look with ",
            Command("ssh", str(node.rank)),
            "; ",
            Command("sync"),
            " continues",
        ),
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
