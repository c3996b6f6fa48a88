"""`receive`: make the project's folder equal to the laptop's, with files from the laptop or from another
node.

Here is where they come from; what is done with them is in sync/update.py.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import socket
from pathlib import Path

from agent.files import project_lock
from agent.files.project_lock import ProjectLock
from agent.files.sync_record import Synced
from agent.jobs import phases, poweroff
from agent.node import serving, store
from agent.node.link import REFUSED, Link, Server
from agent.sync.laptop import Laptop, report
from agent.sync.update import ProjectUpdate
from cloudddp.agent.protocol import transfer
from cloudddp.agent.protocol.codec import MAX_TEXT, ProtocolError, decode
from cloudddp.agent.protocol.file_steps import ReceiveEvent, ReceiveRequest
from cloudddp.agent.protocol.phases import JobPhase, Peer
from cloudddp.agent.protocol.receiving import Receiver
from cloudddp.agent.protocol.sharing import WIDTH
from cloudddp.agent.protocol.transfer import Wants

REQUEST = ReceiveRequest
PURPOSE = "sync"
CONNECT = 10.0  # seconds to connect to another node
ENDED = "the connection to the computer that syncs has ended"
OWN = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM, errno.EIO)


def step(request: ReceiveRequest) -> None:
    folder = store.project_folder(request.project)
    if request.job:
        poweroff.occupy()
    with project_lock.held(folder, unless_leased=request.job) as lock:
        if request.version or request.put_back is not None:
            _check_jobs(may_run=not request.job and request.put_back is None)
        lock.check(request.version)
        folder.mkdir(exist_ok=True)
        _receive(request, folder, lock)
        if request.job:
            lock.lease(request.job)


def _check_jobs(*, may_run: bool) -> None:
    """Refuse to change the files of a job that is about to start, or of one that runs, unless it `may_run`:
    that is for a plain sync, since results are the files of jobs."""
    for job in phases.running_jobs():
        phase = phases.phase_of(store.job_folder(job))
        if not may_run or phase in (JobPhase.SETUP, JobPhase.STARTING):
            what = "is about to start" if phase in (JobPhase.SETUP, JobPhase.STARTING) else "runs"
            raise SystemExit(f"job {job} {what} on this node; wait for its end, or cancel it, and repeat")


def _receive(request: ReceiveRequest, folder: Path, lock: ProjectLock) -> None:
    laptop = Laptop(request.secret.encode())
    try:
        listing = transfer.read_listing(laptop.read())
        synced = Synced(folder, request.origin) if request.put_back is None else None
        update = ProjectUpdate(folder, listing, lock, synced, request.put_back or ())
        receiver = Receiver({index: update.files[index][1].size for index in update.wanted}, update)
        laptop.progress = lambda: receiver.received
        wants = update.wants(receiver.missing)
        update.check_space(wants)
        report(ReceiveEvent(wants=wants))
        while (frame := laptop.read()).kind != transfer.DONE:
            update.start()
            if frame.kind != transfer.FETCH:
                receiver.take(frame)
            elif lost := _fetch(decode(frame.head, Peer), request.secret, wants, receiver):
                wants = update.wants(receiver.missing)
                report(ReceiveEvent(wants=wants, lost=lost[:MAX_TEXT]))
            else:
                break
        update.start()
        receiver.done()
    except EOFError:
        raise SystemExit(ENDED) from None
    except ProtocolError as error:
        raise SystemExit(f"refused what this computer has sent: {error}") from None
    serve = functools.partial(serving.serve, secret=request.secret, folder=folder, files=update.files)
    server = Server(request.secret, PURPOSE, WIDTH, serve)
    report(ReceiveEvent(complete=True, port=_port(server, request.address)))
    report(ReceiveEvent(done=update.complete()))
    with contextlib.suppress(*REFUSED, EOFError):
        while True:
            laptop.read()
    server.close()


def _port(server: Server, address: str) -> int:
    """Return the port at which other nodes get files from this one, 0 where there is none."""
    try:
        return server.listen(address, 0) if address else 0
    except OSError as error:
        report(ReceiveEvent(note=f"{address} cannot serve other nodes: {error.strerror}"))
        return 0


def _fetch(peer: Peer, secret: str, wants: Wants, receiver: Receiver) -> str:
    """Get files from another node. Return why that was not possible, or ''."""
    what = f"cannot be reached at {peer.address}:{peer.port}"
    try:
        link = Link.within(CONNECT, peer, secret, PURPOSE, again=())
        with contextlib.closing(link):
            what = "does not send its files"
            serving.fetch(link, secret, wants, receiver)
        return ""
    except EOFError:
        why = "it has closed the connection"
    except REFUSED as error:
        if isinstance(error, OSError) and error.errno in OWN:
            raise  # this node's own: no other source would help
        timed_out = isinstance(error, (TimeoutError, socket.timeout))
        why = "timed out" if timed_out else getattr(error, "strerror", None) or str(error)
    receiver.close()
    return f"node {peer.node} {what}: {why}"
