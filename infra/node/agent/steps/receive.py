"""`receive`: make the project's folder equal to the laptop's, with files from the laptop or from the
first node.

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
from agent.sync.sources import FirstNode, Laptop, SourceLost, report
from agent.sync.update import ProjectUpdate
from cloudddp.agent.protocol import transfer
from cloudddp.agent.protocol.codec import MAX_TEXT, ProtocolError
from cloudddp.agent.protocol.file_steps import COMPARED, LISTED, ReceiveEvent, ReceiveRequest
from cloudddp.agent.protocol.phases import JobPhase

REQUEST = ReceiveRequest
CONNECT = 3.0  # seconds to connect to the first node
LISTENING = 10.0  # seconds for its agent to listen
ENDED = "the connection to the computer that syncs has ended"
LOST = 60.0  # seconds of waiting for a byte from the laptop
REPORT = 0.5  # seconds between two reports of what has been received
QUIET = 5.0  # seconds without one, at most
OWN = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM, errno.EIO)


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
        self._is_first = request.node == request.first.node
        folder = store.project_folder(request.project)
        self._relay = Relay(folder, request.secret, request.nodes - 1 if self._is_first else 0)
        self._laptop = Laptop(self._secret)
        self._project = ProjectUpdate(folder, self._relay, lock, request.origin, adds=request.adds)
        self._source: Optional[FirstNode] = None
        # The laptop offers the files, or has ended the sync: from then on the main thread reads its frames.
        self._is_offered = threading.Event()
        self._ended = False

    def run(self) -> None:
        threading.Thread(target=self._watch, daemon=True).start()
        if self._is_first:
            self._is_offered.set()
            if self._request.nodes > 1:
                self._listen()
        else:
            threading.Thread(target=self._wait_for_offer, daemon=True).start()
        if self._is_first or not self._from_first():
            self._from_laptop()
        self._relay.complete()  # the other nodes need not wait for the disk of this one
        reply = self._project.finish()
        report(ReceiveEvent(received=self._project.received, done=reply))
        self._wait_for_end()
        self._relay.close()

    def _listen(self) -> None:
        own = self._request.first
        try:
            self._relay.listen(own.address, own.port)
        except OSError as error:
            report(ReceiveEvent(note=f"node {own.node} cannot serve other nodes: {error.strerror}"))

    # -- sources ---------------------------------------------------------------------------------------------

    def _from_first(self) -> bool:
        """Get the files from the first node; return whether that was possible. If not, the laptop offers
        them."""
        name = f"node {self._request.first.node}"
        try:
            with contextlib.closing(self._connected()) as source:
                self._receive(source)
            return True
        except SourceLost as error:
            reason = str(error)
        except EOFError:
            reason = f"{name} has closed the connection"
        except REFUSED as error:
            if _is_own(error):
                raise
            reason = f"{name}: {error}"
        finally:
            self._source = None
        if not self._is_offered.is_set():
            report(ReceiveEvent(direct=reason[:MAX_TEXT]))
        self._is_offered.wait()
        return False

    def _connected(self) -> FirstNode:
        first, secret, is_offered = self._request.first, self._request.secret, self._is_offered.is_set
        try:
            retried = (ConnectionRefusedError,)
            link = Link.within(
                LISTENING, first, secret, PURPOSE, connect=CONNECT, again=retried, ended=is_offered
            )
        except REFUSED as error:
            why = "timed out" if isinstance(error, (TimeoutError, socket.timeout)) else str(error)
            where = f"{first.address}:{first.port}"
            raise SourceLost(f"node {first.node} cannot be reached at {where}: {why}") from None
        self._source = FirstNode(link, first.node, self._secret)
        if is_offered():
            link.end()
        return self._source

    def _from_laptop(self) -> None:
        if self._ended:
            raise SystemExit(ENDED)
        try:
            self._receive(self._laptop)
        except SourceLost as error:
            raise SystemExit(f"{error}; repeat the command") from None
        except EOFError:
            raise SystemExit(ENDED) from None
        except ProtocolError as error:
            raise SystemExit(f"refused what {self._laptop.name} has sent: {error}") from None

    def _wait_for_offer(self) -> None:
        """Read what the laptop says until it offers the files, or its stream ends."""
        try:
            while self._laptop.read().kind != transfer.SOURCE:
                pass
        except (*REFUSED, EOFError):
            self._ended = True
        self._is_offered.set()
        if (source := self._source) is not None:
            source.end()

    def _wait_for_end(self) -> None:
        """Serve the other nodes until the laptop ends the sync."""
        self._is_offered.wait()
        with contextlib.suppress(*REFUSED, EOFError):
            while not self._ended:
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

    def _receive(self, source: Laptop | FirstNode) -> None:
        """Take frames until the source has sent all that this node lacks."""
        project, is_asked = self._project, False
        while True:
            frame = source.read()
            if frame.kind in (transfer.ALIVE, transfer.SOURCE):
                continue
            if frame.kind == transfer.LISTING and not is_asked:
                report(ReceiveEvent(stage=LISTED))
                source.ask(project.compare(frame))
                is_asked = True
                report(ReceiveEvent(stage=COMPARED))
                continue
            if not is_asked:
                raise SourceLost(f"{source.name} sent a file before the listing")
            project.take(frame, is_direct=source is self._laptop)
            if frame.kind == transfer.DONE and project.again:
                report(ReceiveEvent(again=tuple(project.again)))
                project.again.clear()
            elif frame.kind == transfer.DONE:
                break
        if missing := project.missing():
            more = f" and {len(missing) - 1} more" * (len(missing) > 1)
            raise SourceLost(f"{source.name} does not have {project.plan.names[missing[0]]!r}{more}")


def _is_own(error: BaseException) -> bool:
    """Whether an error is this node's own: no other source would help."""
    return isinstance(error, OSError) and error.errno in OWN
