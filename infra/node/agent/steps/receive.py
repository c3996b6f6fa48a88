"""`receive`: make the project's folder equal to the laptop's, with files from the laptop or from another
node.

Here is where they come from; what is done with them is in sync/update.py.
"""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import threading
import time
from typing import Optional

from agent.files import project_lock
from agent.files.project_lock import ProjectLock
from agent.jobs import phases
from agent.node import store
from agent.node.link import REFUSED, Link
from agent.sync.relay import PURPOSE, Relay
from agent.sync.sources import Laptop, OtherNode, SourceLost, report
from agent.sync.update import ProjectUpdate
from cloudddp.agent.protocol import transfer
from cloudddp.agent.protocol.codec import MAX_TEXT, ProtocolError
from cloudddp.agent.protocol.phases import JobPhase
from cloudddp.agent.protocol.receive import COMPARED, LISTED, ReceiveEvent, ReceiveRequest
from cloudddp.agent.protocol.transfer import LAPTOP

REQUEST = ReceiveRequest
CONNECT = 3.0  # seconds to connect to another node
LISTENING = 10.0  # seconds for its agent to listen
RETRY, LONGEST_RETRY = 0.002, 0.05  # seconds until a refused connection is tried again, doubled each time
ENDED = "the connection to the computer that syncs has ended"
LOST = 60.0  # seconds of waiting for a byte from the laptop
REPORT = 0.5  # seconds between two reports of what has been received
QUIET = 5.0  # seconds without one, at most


def step(request: ReceiveRequest) -> None:
    folder = store.project_folder(request.project)
    with project_lock.held(folder, unless_leased=request.job) as lock:
        if request.version:
            _check_jobs(request.job)
        lock.check(request.version)
        folder.mkdir(exist_ok=True)
        Receiver(request, lock).run()
        if request.job:
            lock.lease(request.job)


def _check_jobs(launched: str) -> None:
    """Refuse to change the files of a job that is about to start; for a launch, also those of one that
    runs."""
    for job in phases.running_jobs():
        phase = phases.phase_of(store.job_folder(job))
        if launched or phase in (JobPhase.SETUP, JobPhase.STARTING):
            what = "is about to start" if phase in (JobPhase.SETUP, JobPhase.STARTING) else "runs"
            raise SystemExit(f"job {job} {what} on this node; wait for its end, or cancel it, and repeat")


class Receiver:
    """One node's part of a sync."""

    def __init__(self, request: ReceiveRequest, lock: ProjectLock) -> None:
        self._request = request
        self._secret = request.secret.encode()
        self._folder = store.project_folder(request.project)
        self._relay = Relay(self._folder, request.secret, len(request.chain))
        self._laptop = Laptop(self._secret)
        self._project = ProjectUpdate(self._folder, self._relay, lock, request.origin, adds=request.adds)
        self._source: Optional[OtherNode] = None
        self._instructed: Optional[int] = None  # where the laptop says that the rest comes from
        self._is_direct = False  # the main thread reads what the laptop sends
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
        reply = self._project.finish()
        report(ReceiveEvent(received=self._project.received, done=reply))
        self._wait_for_end()
        self._relay.close()

    # -- sources ---------------------------------------------------------------------------------------------

    def _from_nodes(self) -> None:
        """Get the files from another node, or in the end from the laptop. Each one is tried once, the nearest
        first."""
        position = self._request.position
        waiting = [position - 1] + [0] * (position > 1)
        reasons = []
        while waiting:
            try:
                self._use(waiting.pop(0))
                return
            except SourceLost as error:
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
        """Get the rest of the files from there. Raises SourceLost for another node."""
        self._is_direct = position == LAPTOP
        source = self._laptop if self._is_direct else self._connected(position)
        try:
            with contextlib.closing(source):
                self._receive(source)
        except SourceLost as error:
            if source is self._laptop:
                raise SystemExit(f"{error}; repeat the command") from None
            raise
        except EOFError:
            if source is self._laptop:
                raise SystemExit(ENDED) from None
            raise SourceLost(f"{source.name} has closed the connection") from None
        except ProtocolError as error:
            if source is self._laptop:
                raise SystemExit(f"refused what {source.name} has sent: {error}") from None
            raise SourceLost(f"{source.name}: {error}") from None
        except REFUSED as error:
            if source is self._laptop or _is_own(error):
                raise
            raise SourceLost(f"{source.name}: {error}") from None
        finally:
            self._source = None

    def _connected(self, position: int) -> OtherNode:
        peer = self._request.chain[position]
        deadline, delay = time.monotonic() + LISTENING, RETRY
        while True:
            try:
                link = Link.to(peer.address, peer.port, self._request.secret, PURPOSE, CONNECT)
                self._source = OtherNode(link, peer.node, self._secret)
                return self._source
            except REFUSED as error:
                refused = isinstance(error, ConnectionRefusedError)
                if not refused or time.monotonic() > deadline or self._ended:
                    why = "timed out" if isinstance(error, (TimeoutError, socket.timeout)) else str(error)
                    raise SourceLost(
                        f"node {peer.node} cannot be reached at {peer.address}:{peer.port}: {why}"
                    ) from None
            time.sleep(delay)
            delay = min(2 * delay, LONGEST_RETRY)

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
        with self._changed:
            # Once the laptop has named itself as the source, only this thread reads what it sends.
            while not (self._ended or self._is_direct or self._instructed == LAPTOP):
                self._changed.wait()
            if self._ended:
                return
        with contextlib.suppress(*REFUSED, EOFError):
            while True:
                self._laptop.read()

    def _watch(self) -> None:
        """Report what has been received, and end this process if the laptop is silent."""
        shown, quiet = (0, 0), 0.0
        while True:
            time.sleep(REPORT)
            quiet += REPORT
            with contextlib.suppress(OSError):
                present = self._project.received + self._laptop.pending, self._project.worked
                if present != shown or quiet >= QUIET:
                    shown, quiet = present, 0.0
                    report(ReceiveEvent(received=present[0], worked=present[1]))
            if self._laptop.silence > LOST:
                os._exit(1)

    # -- what arrives ----------------------------------------------------------------------------------------

    def _receive(self, source: Laptop | OtherNode) -> None:
        """Take frames until the source has sent all that this node lacks."""
        project = self._project
        is_asked = False
        while True:
            frame = source.read()
            if frame.kind == transfer.LISTING and not is_asked:
                if not project.is_planned:
                    report(ReceiveEvent(stage=LISTED))
                    project.begin(frame)
                source.ask(project.wants())
                is_asked = True
                report(ReceiveEvent(stage=COMPARED))
                continue
            if frame.kind in (transfer.ALIVE, transfer.SOURCE):
                continue
            if self._ended and source is not self._laptop:
                raise SystemExit(ENDED)
            if not is_asked:
                raise SourceLost(f"{source.name} sent a file before the listing")
            project.prepare()
            project.received += len(frame.raw)
            if frame.kind == transfer.DONE and project.again:
                report(ReceiveEvent(again=tuple(project.again)))
                project.again.clear()
                continue
            if frame.kind == transfer.DONE:
                break
            if frame.kind == transfer.BATCH:
                project.take_batch(frame)
            elif frame.kind == transfer.PART:
                project.take_part(frame)
            elif frame.kind == transfer.END:
                project.take_end(frame, is_direct=source is self._laptop)
        missing = project.missing()
        if missing:
            name = project.plan.names[missing[0]]
            raise SourceLost(
                f"{source.name} does not have {name!r}" + f" and {len(missing) - 1} more" * (len(missing) > 1)
            )


def _is_own(error: BaseException) -> bool:
    """Whether an error is this node's own: no other source would help."""
    return isinstance(error, OSError) and error.errno in (
        errno.ENOSPC,
        errno.EDQUOT,
        errno.EROFS,
        errno.EACCES,
        errno.EPERM,
        errno.EIO,
    )
