"""Before a node ends: its newest snapshot is sent to a node that stays, the first one, also with nobody
connected.

The connections of the agents have ended by then. So there is one of its own (node/link.py), to the port of
the agent there, which is free. A node accepts a path that is a snapshot by the patterns of the job only.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Iterator
from typing import Optional

from agent.jobs import job_record, phases
from agent.node import deadline, store
from agent.node.link import ANSWER, REFUSED, Link, LinkError
from agent.share import snapshot
from cloudddp.agent.protocol.codec import decode, encode
from cloudddp.agent.protocol.jobs import MAX_LINE, Cause
from cloudddp.agent.protocol.phases import Peer
from cloudddp.agent.protocol.snapshots import LATEST, Snapshot, SnapshotSearch, refusal
from cloudddp.agent.protocol.start import StartRequest

CONNECT = 15.0  # seconds for the other node to listen, or to connect
PREPARE = 120.0  # seconds for it to find, verify and hash its newest snapshot: a spot notice is two minutes
PURPOSE = "handover"


def start(request: StartRequest, began: float) -> Optional[threading.Thread]:
    """Hand a snapshot over if this node is about to end, or take it if this is the first node that stays;
    return the thread that does it, or None. `began`: when the job began here, by the monotonic clock."""
    folder = store.job_folder(request.job)
    verdict = phases.verdict(folder)
    first = verdict.first if verdict is not None else None
    if request.snapshots is None or first is None or first.cause is not Cause.NOTICE:
        return None
    staying = [peer for peer in request.gang.peers if peer.node != first.node]
    if not staying or _all_end(request, began):
        return None
    keeper = min(staying, key=lambda peer: peer.node)
    if request.node not in (first.node, keeper.node):
        return None
    thread = threading.Thread(target=_run, args=(request, request.snapshots, first.node, keeper), daemon=True)
    thread.start()
    return thread


def _run(request: StartRequest, wanted: SnapshotSearch, ending: int, keeper: Peer) -> None:
    """Send or take, and note what has become of it in the logs of this node."""
    act = _send if request.node == ending else _keep
    try:
        found = act(request, wanted, keeper)
        text = (
            f"{found.path}, the newest snapshot of node {ending}, was copied to node {keeper.node}"
            if found
            else ""
        )
    except (*REFUSED, SystemExit) as error:
        text = f"the newest snapshot of node {ending} was not copied to node {keeper.node}: {error}"
    if text:
        job_record.note(store.job_folder(request.job), text[:MAX_LINE])


def _all_end(request: StartRequest, began: float) -> bool:
    """Whether the notice is that of the deadline, at which all nodes end."""
    ends, _ = deadline.current(request.deadline, began)
    return ends - time.monotonic() <= request.save + ANSWER


# -- the node that ends --------------------------------------------------------------------------------------


def _send(request: StartRequest, wanted: SnapshotSearch, keeper: Peer) -> Optional[Snapshot]:
    """Send the newest snapshot to that node, and return it; None if there is nothing to send."""
    # While its agent is busy with the end of the job, connections are refused, or accepted by its mesh and
    # closed: both are tried again.
    link = Link.within(CONNECT, keeper, request.gang.secret, PURPOSE, connect=ANSWER)
    with contextlib.closing(link):
        found = snapshot.newest(wanted)
        link.write("snapshot", encode(found).decode())
        sent = link.read("answer", PREPARE) == "send"
        if sent:
            snapshot.send(link, request.gang.secret, store.project_folder(request.project), found.path)
        why = link.read("end", CONNECT)
    if why:
        raise LinkError(why)
    return found if sent else None


# -- the node that stays -------------------------------------------------------------------------------------


def _keep(request: StartRequest, wanted: SnapshotSearch, keeper: Peer) -> Optional[Snapshot]:
    """Take a snapshot that is newer than that of this node, and return it; None if there is none."""
    for link in _links(keeper, request.gang.secret):
        found = decode(link.read("snapshot", PREPARE).encode(), Snapshot)
        try:
            taken = _take(link, request, found, wanted)
        except (*REFUSED, SystemExit) as error:
            link.write("end", str(error)[:MAX_LINE])
            raise
        link.write("end", "")
        return found if taken else None
    raise LinkError("that node did not connect")


def _links(keeper: Peer, secret: str) -> Iterator[Link]:
    """Yield a connection that has proved who it is."""
    deadline = time.monotonic() + CONNECT
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((keeper.address, keeper.port))
        listener.listen()
        while (left := deadline - time.monotonic()) > 0:
            listener.settimeout(left)
            with contextlib.suppress(TimeoutError, socket.timeout):
                accepted, _ = listener.accept()
                with contextlib.closing(Link(accepted, secret, PURPOSE)) as link:
                    try:
                        link.accept(ANSWER)
                    except REFUSED:
                        continue  # a stranger
                    yield link
                    return


def _take(link: Link, request: StartRequest, found: Snapshot, wanted: SnapshotSearch) -> bool:
    """Return whether the snapshot was taken. Raises OSError, and SystemExit for a stream that ends early."""
    if why := refusal(found, wanted, (time.time() + LATEST) * 1e9):
        raise LinkError(why)
    own = snapshot.newest(wanted) if found.path else found
    if own.digest == found.digest or (own.path and own.mtime_ns >= found.mtime_ns):
        link.write("answer", "no")
        return False
    link.write("answer", "send")
    if not snapshot.receive(link, request.gang.secret, store.project_folder(request.project), found):
        raise LinkError(f"{found.path!r} has gone")
    return True
