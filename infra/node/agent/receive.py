"""`receive`: make the project's folder equal to the laptop's, with files from the laptop or from another node.

The new manifest is recorded last; until then one that holds the old files and the new, so that after a broken transfer the next
sync sends what is missing, and deletes what came and is no longer wanted.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import shutil
import socket
import threading
import time
from collections.abc import Iterator
from typing import Callable, Optional

from agent import store
from agent.link import REFUSED, Link
from agent.project_writer import Partial, Partials, ProjectWriter
from agent.relay import PURPOSE, LargeFile, Relay
from agent.sources import Laptop, OtherNode, report
from agent.sync_plan import SyncPlan, plan
from cloudddp.agent.protocol import transfer
from cloudddp.agent.protocol.codec import MAX_TEXT, ProtocolError
from cloudddp.agent.protocol.transfer import (
    LAPTOP,
    Frame,
    ReceiveEvent,
    ReceiveReply,
    ReceiveRequest,
    Record,
    Wants,
)

REQUEST = ReceiveRequest
CONNECT = 3.0  # seconds to connect to another node
LISTENING = 10.0  # seconds for its agent to listen
PAUSE = 0.02
MAX_BEGUN = 16  # files that come in parts: each source begins one after the other
BUSY = 20.0  # seconds for another sync of this project to end
ENDED = "the connection to the computer that syncs has ended"
LOST = 60.0  # seconds without a frame from the laptop
REPORT = 0.5  # seconds between two reports of what has been received
QUIET = 5.0  # seconds without one, at most
OF_FILE = 4096  # bytes that count as the work on a file without contents
DISK_RESERVE = 64 << 20  # bytes that stay free


class Lost(Exception):
    """A source cannot be used any more; the text says why."""


def step(request: ReceiveRequest) -> None:
    with _alone(request.project):
        folder = store.project_folder(request.project)
        folder.mkdir(exist_ok=True)
        Receiver(request).run()


@contextlib.contextmanager
def _alone(project: str) -> Iterator[None]:
    """Hold the lock of the project's files. A sync that was interrupted ends soon after its laptop is gone."""
    store.create_root()
    deadline = time.monotonic() + BUSY
    with open(store.ROOT / f"sync-{project}.lock", "w") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except OSError:
                if time.monotonic() > deadline:
                    raise SystemExit(
                        "another sync writes to this node; wait for its end, and repeat"
                    ) from None
                time.sleep(PAUSE)
        yield


class Receiver:
    """One node's part of a sync."""

    def __init__(self, request: ReceiveRequest) -> None:
        self._request = request
        self._secret = request.secret.encode()
        self._folder = store.project_folder(request.project)
        self._relay = Relay(self._folder, request.secret, len(request.chain))
        self._laptop = Laptop(self._secret)
        self._plan: Optional[SyncPlan] = None
        self._listing = b""  # the head of its frame
        self._writer: Optional[ProjectWriter] = None
        self._large: dict[int, tuple[Partial, LargeFile]] = {}
        self._records: dict[int, Record] = {}  # of the files that were written
        self._again: list[
            int
        ] = []  # files whose beginning here was wrong: the laptop has to send them as a whole
        self._restarted: set[int] = set()
        self._received = 0
        self._worked = (
            0  # bytes that were hashed and written besides, and OF_FILE for each other change of a file
        )
        self._source: Optional[OtherNode] = None
        self._instructed: Optional[int] = None  # where the laptop says that the rest comes from
        self._changed = threading.Condition()
        self._ended = False  # the laptop has closed stdin
        self._done = False

    def run(self) -> None:
        request = self._request
        if request.position + 1 < len(request.chain):
            own = request.chain[request.position]
            try:
                self._relay.listen(own.address, own.port)
            except OSError as error:
                report(ReceiveEvent(note=f"node {own.node} cannot serve other nodes: {error.strerror}"))
        threading.Thread(target=self._watch, daemon=True).start()
        if request.position == 0:
            self._use(LAPTOP)
        else:
            threading.Thread(target=self._take_instructions, daemon=True).start()
            self._from_nodes()
        self._relay.complete()  # the nodes after this one need not wait for its disk
        reply = self._finish()
        report(ReceiveEvent(received=self._received, done=reply))
        self._wait_for_end()
        self._relay.close()

    # -- sources -----------------------------------------------------------------------------------------------

    def _from_nodes(self) -> None:
        """Get the files from another node, or in the end from the laptop. Each one is tried once, the nearest first."""
        position = self._request.position
        waiting = [position - 1] + [0] * (position > 1)
        reasons = []
        while waiting:
            try:
                self._use(waiting.pop(0))
                return
            except Lost as error:
                reason = str(error)
            with self._changed:
                instructed, self._instructed = self._instructed, None
            if self._ended:
                raise SystemExit(ENDED)
            if instructed is not None:
                waiting.insert(0, instructed)
            else:
                reasons.append(reason)
                report(ReceiveEvent(note=reason[:MAX_TEXT]))
        report(ReceiveEvent(direct="; ".join(reasons)[:MAX_TEXT]))
        with self._changed:
            while self._instructed != LAPTOP and not self._ended:
                self._changed.wait()
            if self._ended:
                raise SystemExit(ENDED)
        self._use(LAPTOP)

    def _use(self, position: int) -> None:
        """Get the rest of the files from there. Raises Lost for another node."""
        source = self._laptop if position == LAPTOP else self._connected(position)
        try:
            with contextlib.closing(source):
                self._receive(source)
        except Lost as error:
            if source is self._laptop:
                raise SystemExit(str(error)) from None
            raise
        except EOFError:
            if source is self._laptop:
                raise SystemExit(ENDED) from None
            raise Lost(f"{source.name} has closed the connection") from None
        except ProtocolError as error:
            if source is self._laptop:
                raise SystemExit(f"refused what {source.name} has sent: {error}") from None
            raise Lost(f"{source.name}: {error}") from None
        except REFUSED as error:
            if source is self._laptop or _is_own(error):
                raise
            raise Lost(f"{source.name}: {error}") from None
        finally:
            self._source = None

    def _connected(self, position: int) -> OtherNode:
        peer = self._request.chain[position]
        deadline = time.monotonic() + LISTENING
        while True:
            try:
                connection = socket.create_connection((peer.address, peer.port), CONNECT)
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                link = Link(connection, self._request.secret, PURPOSE)
                try:
                    link.connect()
                except BaseException:
                    link.close()
                    raise
                self._source = OtherNode(link, peer.node, self._secret)
                return self._source
            except REFUSED as error:
                refused = isinstance(error, ConnectionRefusedError)
                if not refused or time.monotonic() > deadline or self._ended:
                    why = "timed out" if isinstance(error, (TimeoutError, socket.timeout)) else str(error)
                    raise Lost(
                        f"node {peer.node} cannot be reached at {peer.address}:{peer.port}: {why}"
                    ) from None
            time.sleep(PAUSE)

    def _take_instructions(self) -> None:
        """Read what the laptop says until its stream ends, or until the main thread has to read it."""
        position = None
        while position != LAPTOP:
            try:
                frame = self._laptop.read()
                if frame.kind != transfer.SOURCE:
                    continue
                position = transfer.read_source(frame)
            except (*REFUSED, EOFError):
                self._end_of_laptop()
                return
            with self._changed:
                self._instructed = position
                self._changed.notify_all()
            if (source := self._source) is not None:
                source.end()

    def _end_of_laptop(self) -> None:
        with self._changed:
            self._ended = True
            self._changed.notify_all()
        if not self._done and (source := self._source) is not None:
            source.end()

    def _wait_for_end(self) -> None:
        """Serve the nodes after this one until the laptop ends the sync."""
        self._done = True
        if self._request.position == 0 or self._instructed == LAPTOP:
            with contextlib.suppress(*REFUSED, EOFError):
                while True:
                    self._laptop.read()
        with self._changed:
            while not self._ended and self._request.position and self._instructed != LAPTOP:
                self._changed.wait()

    def _watch(self) -> None:
        """Report what has been received, and end this process if the laptop is silent."""
        shown, quiet = (0, 0), 0.0
        while True:
            time.sleep(REPORT)
            quiet += REPORT
            with contextlib.suppress(OSError):
                present = self._received, self._worked
                if present != shown or quiet >= QUIET:
                    shown, quiet = present, 0.0
                    report(ReceiveEvent(received=present[0], worked=present[1]))
            if time.monotonic() - self._laptop.heard > LOST:
                os._exit(1)

    # -- what arrives --------------------------------------------------------------------------------------------

    def _receive(self, source: Laptop | OtherNode) -> None:
        """Take frames until the source has sent all that this node lacks."""
        actions: dict[int, Callable[[Frame], None]] = {
            transfer.BATCH: self._take_batch,
            transfer.PART: self._take_part,
            transfer.END: self._take_end,
        }
        is_asked = False
        while True:
            frame = source.read()
            if frame.kind == transfer.LISTING and not is_asked:
                if self._plan is None:
                    report(ReceiveEvent(stage=transfer.LISTED))
                    self._begin(frame)
                source.ask(self._wants())
                is_asked = True
                self._report_codecs()
                continue
            if frame.kind in (transfer.ALIVE, transfer.SOURCE):
                continue
            if self._ended and source is not self._laptop:
                raise SystemExit(ENDED)
            if not is_asked:
                raise Lost(f"{source.name} sent a file before the listing")
            if self._writer is None:
                self._prepare()
            self._received += len(frame.raw)
            if frame.kind == transfer.DONE and self._again:
                report(ReceiveEvent(again=tuple(self._again)))
                self._again.clear()
                continue
            if frame.kind == transfer.DONE:
                break
            action = actions.get(frame.kind)
            if action is not None:
                action(frame)
        missing = self._missing()
        if missing:
            name = self._the_plan.names[missing[0]]
            raise Lost(
                f"{source.name} does not have {name!r}" + f" and {len(missing) - 1} more" * (len(missing) > 1)
            )

    @property
    def _the_plan(self) -> SyncPlan:
        assert self._plan is not None  # noqa: S101  it is made with the first frame
        return self._plan

    def _begin(self, frame: Frame) -> None:
        """Decide what this node lacks. Nothing is changed yet."""
        listing = transfer.read_listing(frame)
        self._plan = made = plan(self._folder, listing)
        self._relay.listed(frame.raw, listing.entries(), frozenset((*made.wanted, *made.move)))

    def _wants(self) -> Wants:
        made = self._the_plan
        missing = self._missing()
        offsets = {}
        if made.large:
            begun = Partials(self._folder)
            for index in made.large:
                known = self._large.get(index)
                there = known[0].written if known else begun.size(made.names[index], made.entries[index])
                if there and index not in self._records:
                    offsets[str(index)] = there
        everything = len(missing) == made.regular
        return Wants(everything, () if everything else tuple(missing), offsets, made.size, len(made.delete))

    def _report_codecs(self) -> None:
        """Report what this node can decode, while the answer to its request is on the way: to find that out takes milliseconds."""
        is_receiver = bool(self._the_plan.wanted)
        codecs = transfer.codecs() if is_receiver else transfer.ALL_CODECS
        report(ReceiveEvent(codecs=codecs, stage=transfer.COMPARED))

    def _missing(self) -> list[int]:
        return [index for index in self._the_plan.wanted if index not in self._records]

    def _prepare(self) -> None:
        """Change the project's folder: from now on its manifest has the old files and the new."""
        made = self._the_plan
        free = shutil.disk_usage(str(self._folder)).free
        if made.size and free < made.size + DISK_RESERVE:
            raise SystemExit(f"not enough disk space for the project: {free >> 20} MiB free")
        if made.is_change:
            made.record_both(self._folder)
        writer = ProjectWriter(self._folder, self._has_worked)
        writer.forget_partials({made.names[index] for index in made.large})
        for index, name in made.move.items():  # first: what is deleted or replaced later makes way for them
            writer.move(name, made.names[index], made.entries[index])
            self._has_worked(OF_FILE)
        self._relay.renamed(made.move)
        writer.remove([*made.delete, *made.move.values()])  # the latter for folders that are empty now
        for index in made.links:
            writer.link(made.names[index], made.entries[index].target)
            self._has_worked(OF_FILE)
        for index in made.touch:
            writer.touch(made.names[index], made.entries[index])
            self._has_worked(OF_FILE)
        self._writer = writer

    def _has_worked(self, size: int) -> None:
        self._worked += size

    def _take_batch(self, frame: Frame) -> None:
        assert self._writer is not None  # noqa: S101  _prepare was called
        made = self._the_plan
        for record, contents in transfer.read_batch(frame):
            if record.missing or record.number not in made.wanted or record.number in self._records:
                continue
            self._writer.small(made.names[record.number], record, contents)
            self._records[record.number] = record
        self._relay.arrived(frame)

    def _take_part(self, frame: Frame) -> None:
        index, offset, data = transfer.read_part(frame)
        if index not in self._the_plan.wanted or index in self._records:
            return
        partial, large = self._begun(index)
        if offset == 0 and partial.written:  # the sender starts again
            self._relay.ended(large, None)
            large = LargeFile(index, partial.restart(), 0, again=True)
            self._large[index] = partial, large
            self._relay.begin(large)
        partial.write(offset, data)
        self._relay.grown(large, partial.written)

    def _begun(self, index: int) -> tuple[Partial, LargeFile]:
        """Return a file that comes in parts, opened when the first of them arrives."""
        assert self._writer is not None  # noqa: S101  _prepare was called
        if index not in self._large:
            if len(self._large) >= MAX_BEGUN:
                raise Lost("too many files were begun at the same time")
            made = self._the_plan
            partial = self._writer.partial(made.names[index], made.entries[index])
            large = LargeFile(index, partial.begin(), partial.written, again=index in self._restarted)
            self._large[index] = partial, large
            self._relay.begin(large)
        return self._large[index]

    def _take_end(self, frame: Frame) -> None:
        record = transfer.read_end(frame)
        if record.number not in self._the_plan.wanted or record.number in self._records:
            return
        partial, large = self._begun(record.number)
        del self._large[record.number]
        with contextlib.closing(partial):
            good = partial.finish(record)
        self._relay.ended(large, frame.raw if good else None)
        if not good and self._source is None and record.number not in self._restarted:
            self._restarted.add(
                record.number
            )  # its beginning came from another node, or from an earlier sync
            self._again.append(record.number)
            return
        if not good:
            raise Lost(f"{self._the_plan.names[record.number]!r} was changed on the way")
        self._records[record.number] = record

    def _finish(self) -> ReceiveReply:
        """Record the manifest that the project has now."""
        made = self._the_plan
        if made.is_change:
            report(ReceiveEvent(received=self._received, stage=transfer.WRITING))
            if self._writer is not None:
                self._writer.to_disk()
            made.record(self._folder, self._records)
        return ReceiveReply(
            written=len(self._records) + len(made.links),
            deleted=len(made.delete),
            kept=len(made.touch) + len(made.move),
            received=self._received,
        )


def _is_own(error: BaseException) -> bool:
    """Whether an error is this node's own: no other source would help."""
    return isinstance(error, OSError) and error.errno in (
        errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM, errno.EIO,
    )  # fmt: skip
