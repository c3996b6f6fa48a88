"""Sends the project's files to the nodes: each byte leaves this computer once, and nodes that have all files
send them to the others, as job/distribution.py decides. Every node runs a `receive` step meanwhile. Any
program of its login user may write reports, so all of one has limits."""

from __future__ import annotations

import functools
import os
import queue
import threading
import time
import zlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

from cloudddp.agent import client, replies
from cloudddp.agent.client import Runner
from cloudddp.agent.protocol import transfer
from cloudddp.agent.protocol.codec import ProtocolError, encode
from cloudddp.agent.protocol.file_steps import ReceiveEvent, ReceiveReply, ReceiveRequest
from cloudddp.agent.protocol.manifest import manifest_to_wire
from cloudddp.agent.protocol.phases import Peer
from cloudddp.agent.protocol.sending import FileRequest, Sender, UnreadableFile
from cloudddp.agent.protocol.transfer import PLAIN, ZLIB, FileHead, Listing, PartialFile, Wants
from cloudddp.agent.protocol.writing import FILE, known_of
from cloudddp.agent.replies import decode
from cloudddp.errors import CloudDDPError, ConnectionLost, NodeError, StepWarning, q
from cloudddp.job.distribution import HERE, Distribution
from cloudddp.job.project_files import ProjectFiles
from cloudddp.ssh.fleet import Outcome
from cloudddp.text import one_line

MEASURED = 1 << 20  # bytes after which the rate of the link is known
SLOW = 32e6  # bytes per second: over a slower link, data is sent sooner if zlib makes a third less of it
SAMPLE = 1 << 16  # bytes of a frame that show whether it does


class Compression:
    """What has been measured of the link in one transfer. The threads of several nodes may use it: what two
    of them add at once may count once."""

    def __init__(self) -> None:
        self._bytes, self._seconds = 0, 0.0

    def measure(self, size: int, seconds: float) -> None:
        self._bytes += size
        self._seconds += seconds

    def encode(self, data: bytes) -> tuple[int, bytes]:
        """Return the codec for some data, and the data in that."""
        if self._bytes < MEASURED or self._bytes > SLOW * self._seconds:
            return PLAIN, data
        sample = zlib.compress(data[:SAMPLE], 1)
        if 3 * len(sample) > 2 * min(SAMPLE, len(data)):
            return PLAIN, data
        return ZLIB, sample if len(data) <= SAMPLE else zlib.compress(data, 1)


MAX_LINE = 16 << 20  # bytes of a report: what a node knows of 100,000 files takes 8 MB
MAX_NOTES = 20


class Reports:
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
            event = decode(line, ReceiveEvent, limit=MAX_LINE)
            self._notes += bool(event.note or event.lost)
            if self._notes > MAX_NOTES:
                raise ProtocolError("it sends too many notes")
            yield event


IDLE = 1.0  # seconds without anything to send, after which a node gets to know that this computer is there
SILENCE = 120.0  # seconds in which a node has to accept SLICE bytes, or to say what was asked
STUCK = 900.0  # the same while it says that it is busy, for example because its disk flushes
SLICE = 1 << 16
SLOWEST = 1e6  # bytes per second that a node gets from another one, at least


class _Node:
    """A node, and what is to be written to its stdin: frames, None for the end."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.reports = Reports()
        self.inbox: queue.SimpleQueue[Iterable[bytes] | None] = queue.SimpleQueue()
        self.reply: ReceiveReply | None = None
        self.port = 0  # at which others get files from it
        self.moved = time.monotonic()  # when it last got further, or had nothing to do
        self.is_busy = self.has_ended = False


@dataclass
class View:
    """The callbacks of a transfer; `note` gets what the user should know."""

    note: Callable[[str], None]

    def approve(self, lacking: Mapping[int, Sequence[str]], here: Collection[int], delete: int) -> None:
        """Take the files that each node lacks, which nodes get them from here first, and how many files a
        node will delete, before anything is sent. May raise."""

    def sent(self, size: int) -> None:
        """A frame has left this computer."""

    def copied(self) -> None:
        """A node has got its files from another one."""


class Transfer:
    """One transfer of files to the nodes at these private addresses, '' where they are not to get files from
    each other, as `request` says, with the `versions` that the project had on each node when it was compared.
    `unstable` are the files that were changing while they were sent."""

    def __init__(
        self,
        runner: Runner,
        files: ProjectFiles,
        addresses: Mapping[int, str],
        view: View,
        request: ReceiveRequest,
        versions: Mapping[int, int] = MappingProxyType({}),
    ) -> None:
        self._runner, self._project, self._addresses, self._view = runner, files, addresses, view
        self._request, self._key, self._versions = request, request.secret.encode(), versions
        self._files = [*files.manifest.items()]
        self._listing = Listing(manifest_to_wire(files.manifest)).frame(self._key)
        self._distribution = Distribution(addresses)
        self._wants: dict[int, Wants] = {}
        self._nodes = {rank: _Node(rank) for rank in addresses}
        self._lock = threading.RLock()  # of all that follows
        self._is_approved = self._is_explained = self._is_over = False
        self._error: Exception | None = None  # of this computer: it ends the transfer
        self._compression = Compression()
        self.unstable: list[str] = []

    def run(self) -> Outcome[ReceiveReply]:
        """Return the nodes' replies and errors. Raises what `approve` raises, CloudDDPError for an unreadable
        file."""
        for node in self._nodes.values():
            node.inbox.put((self._listing,))
        outcome = self._runner.each(
            lambda rank: self._serve(self._nodes[rank]),
            nodes=self._nodes,
            fatal=lambda _: False,
            meanwhile=self._watch,
        )
        if self._error is not None:
            raise self._error
        return outcome

    def _serve(self, node: _Node) -> ReceiveReply:
        """Run the step of a node, which lasts until the whole transfer ends, and return its reply."""
        serves = self._addresses[node.rank] if len(self._nodes) > 1 else ""
        request = replace(self._request, address=serves, version=self._versions.get(node.rank, 0))

        def received(data: bytes) -> None:
            for event in node.reports.feed(data):
                with self._lock:
                    self._take(node, event)

        try:
            body = functools.partial(self._input, node)
            result = client.run_step(
                self._runner, node.rank, request, body=body, timeout=SILENCE, on_stdout=received
            )
            if node.reply is None:
                if not result.exit_code:
                    raise ProtocolError("it ends without a reply")
                raise NodeError(f"node {node.rank}: {replies.failure_text(result)}")
            return node.reply
        except ProtocolError as error:
            raise replies.unreadable(node.rank, ReceiveRequest.STEP, error) from None
        finally:
            self._end(node)

    def _end(self, node: _Node) -> None:
        with self._lock:
            node.has_ended = True
            self._distribution.gone(node.rank)
            self._go_on()

    def _take(self, node: _Node, event: ReceiveEvent) -> None:
        """Raises ProtocolError for what no agent reports."""
        node.is_busy = event.busy
        if event != ReceiveEvent(busy=event.busy):
            node.moved = time.monotonic()
        if event.note:
            self._view.note(f"node {node.rank}: {one_line(event.note, 300)}")
        if event.wants is not None:
            if bool(event.lost) != (node.rank in self._wants):
                raise ProtocolError("it says twice what it lacks")
            if event.lost and not self._is_explained:
                self._is_explained = True
                text = f"nodes cannot copy files from each other ({one_line(event.lost, 300)})"
                self._view.note(StepWarning(f"{text}; sending from this computer"))
            self._distribution.answered(node.rank, sum(size for _, size in self._lacked(event.wants)))
            self._wants[node.rank] = event.wants
        if event.complete:
            node.port = event.port
            if self._distribution.copied(node.rank):
                self._view.copied()
            self._distribution.complete(node.rank, serves=bool(event.port))
        node.reply = event.done or node.reply
        self._go_on()

    def _go_on(self) -> None:
        """Send what is due, or end the steps of all nodes."""
        if all(node.has_ended or node.reply for node in self._nodes.values()) or self._error is not None:
            for node in self._nodes.values():
                node.inbox.put(None)
            self._is_over = True
            return
        due = self._distribution.due()
        if due and not self._is_approved:
            self._is_approved = True
            try:
                here = [rank for rank, source in due.items() if source == HERE]
                lacking = {rank: [name for name, _ in self._lacked(one)] for rank, one in self._wants.items()}
                self._view.approve(lacking, here, max(want.delete for want in self._wants.values()))
            except Exception as error:
                self._fail(error)
                return
        for rank, source in due.items():
            node = self._nodes[rank]
            if source == HERE:
                node.inbox.put(self._contents(node, self._wants[rank]))
            else:
                peer = Peer(source, self._addresses[source], self._nodes[source].port)
                node.inbox.put((transfer.frame(self._key, transfer.FETCH, encode(peer)),))

    def _lacked(self, wants: Wants) -> Iterator[tuple[str, int]]:
        """Yield each file of which a node does not have the contents, and how many bytes are to be sent.
        Raises ProtocolError for one that is none."""
        for index, known in wants.of(self._files):
            name, entry = self._files[index]
            if known.size < entry.size:
                yield name, entry.size - known.size
            elif self._known(name) not in (known, None):
                yield name, entry.size

    @functools.cache  # noqa: B019  it lives as long as the transfer
    def _known(self, name: str) -> PartialFile | None:
        """Return what is here; None for a file that no longer exists."""
        try:
            return known_of(os.open(self._project.root / self._project.locate(name), FILE))
        except OSError:
            return None

    def _watch(self) -> dict[int, Exception]:
        """Return the errors of the nodes that are given up."""
        now, found = time.monotonic(), dict[int, Exception]()
        with self._lock:
            for node in self._nodes.values():
                if (node.reply or self._distribution.is_waiting(node.rank)) and not self._is_over:
                    node.moved = now
                limit = (STUCK if node.is_busy else SILENCE) + self._distribution.copied(node.rank) / SLOWEST
                if not node.has_ended and now - node.moved > limit:
                    found[node.rank] = given_up(node.rank, limit)
                    self._end(node)
        return found

    def _fail(self, error: Exception) -> None:
        with self._lock:
            self._error = self._error or error
            self._go_on()

    # -- to a node -------------------------------------------------------------------------------------------

    def _input(self, node: _Node) -> Iterator[bytes]:
        """Yield what goes to the stdin of a node, b"" while there is nothing to send."""
        last = time.monotonic()
        for frame in self._frames(node):
            if node.has_ended:
                return
            if not frame and time.monotonic() - last < IDLE:
                yield b""
                continue
            if frame:
                for at in range(0, len(frame), SLICE):
                    node.moved = time.monotonic()
                    yield frame[at : at + SLICE]
            else:
                yield transfer.frame(self._key, transfer.ALIVE)
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

    def _contents(self, node: _Node, wants: Wants) -> Iterator[bytes]:
        """Yield the frames of files, b"" while what the node has is only hashed."""
        files = (FileRequest(index, self._files[index][0], known) for index, known in wants.of(self._files))
        sender = Sender(
            str(self._project.root),
            self._key,
            on_sent=self._sent,
            encode=self._compression.encode,
            locate=self._project.locate,
        )
        try:
            for frame in sender.frames(files):
                began = time.monotonic()
                yield frame
                node.moved = time.monotonic()
                if frame:
                    self._compression.measure(len(frame), node.moved - began)
                    with self._lock:
                        self._view.sent(len(frame))
            yield transfer.frame(self._key, transfer.DONE)
        except UnreadableFile as error:
            text = f"cannot read {error.path}, which the nodes need: {error.error.strerror}"
            hint = (
                "correct its permissions, or add it to .gitignore or sync.exclude if it is temporary; then "
            )
            self._fail(CloudDDPError(text, hint=f"{hint}repeat the command"))
        except Exception as error:
            self._fail(error)

    def _sent(self, path: str, head: FileHead) -> None:
        if head.changed and path not in self.unstable:
            self.unstable.append(path)


def given_up(rank: int, limit: float) -> ConnectionLost:
    """Return the error for a node that has made no progress for so many seconds."""
    return ConnectionLost(
        f"node {rank}: it made no progress for {limit:.0f} s",
        hint=f"is the node overloaded, or its disk? Look with `cloudddp ssh {q(rank)}`; the same command "
        "continues",
    )
