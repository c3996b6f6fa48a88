"""Before a node ends: its newest snapshot is copied to a node that stays, the first one, also with nobody
connected.

The connections of the agents have ended by then. So the node that stays makes one of its own (node/link.py),
to the port of the agent there, which is free. It accepts a path that is a snapshot by the patterns of the job
only, and says what has become of it, for the logs of both nodes.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from typing import Optional

from agent.jobs import job_record, phases, poweroff
from agent.node import store
from agent.node.link import ANSWER, REFUSED, Link, LinkError, Server
from agent.share import offers
from agent.share.copying import Exchange
from cloudddp.agent.protocol.codec import decode, encode
from cloudddp.agent.protocol.jobs import MAX_LINE, Cause
from cloudddp.agent.protocol.phases import Peer
from cloudddp.agent.protocol.sharing import LATEST, SharedFiles, SnapshotSearch, copies, refusal
from cloudddp.agent.protocol.start import StartRequest

CONNECT = 15.0  # seconds for the other node to listen, or to connect
PREPARE = 120.0  # seconds for it to find and verify its newest snapshot: a spot notice is two minutes
PURPOSE = "handover"


def start(request: StartRequest, began: float) -> Optional[threading.Thread]:
    """Hand a snapshot over if this node is about to end, or take it if this is the first node that stays;
    return the thread that does it, or None. `began`: when the job began here, by the monotonic clock."""
    first = phases.first_failure(store.job_folder(request.job))
    ends, _ = poweroff.deadline(request.end.deadline, began)
    all_end = ends - time.monotonic() <= request.end.save + ANSWER  # the notice is that of the deadline
    if request.snapshots is None or first is None or first.cause is not Cause.NOTICE or all_end:
        return None
    staying = [peer.node for peer in request.gang.peers if peer.node != first.node]
    nodes = first.node, min(staying, default=first.node)
    if not staying or request.node not in nodes:
        return None
    thread = threading.Thread(target=_run, args=(request, request.snapshots, *nodes), daemon=True)
    thread.start()
    return thread


def _run(request: StartRequest, search: SnapshotSearch, ending: int, keeper: int) -> None:
    """Send or take, and note what has become of it in the logs of this node."""
    peer = next(peer for peer in request.gang.peers if peer.node == ending)
    failed = f"the newest snapshot of node {ending} was not copied to node {keeper}"
    act = _give if request.node == ending else _keep
    try:
        text = act(request, search, peer, failed)
    except (*REFUSED, EOFError) as error:
        text = f"{failed}: {error}"
    if text:
        job_record.note(store.job_folder(request.job), text[:MAX_LINE])


def _exchange(request: StartRequest) -> Exchange:
    project, begun = store.project_folder(request.project), f"begun-handover-{request.project}"
    return Exchange(request.gang.secret, project, begun, durable=True)


# -- the node that ends --------------------------------------------------------------------------------------


def _give(request: StartRequest, search: SnapshotSearch, own: Peer, failed: str) -> str:
    """Offer the newest snapshot, and send it if it is wanted; return what the other node says of it. Raises
    what REFUSED names, and EOFError."""
    answers: queue.SimpleQueue[str] = queue.SimpleQueue()

    def give(link: Link) -> None:
        answers.put("it is connected")
        try:
            found, _ = offers.newest(search)
            link.write("offer", encode(SharedFiles(tuple(found))).decode())
            _exchange(request).give(link, found)
            answers.put(link.read("end", PREPARE))
        except Exception as error:  # whatever it is: the other thread waits
            answers.put(f"{failed}: {error}")

    server = Server(request.gang.secret, PURPOSE, 1, give)
    server.listen(own.address, own.port)
    try:
        answers.get(timeout=CONNECT)
        return answers.get()
    except queue.Empty:
        raise LinkError("that node did not connect") from None
    finally:
        server.close()


# -- the node that stays -------------------------------------------------------------------------------------


def _keep(request: StartRequest, search: SnapshotSearch, ending: Peer, failed: str) -> str:
    """Get the snapshot if it is newer than that of this node; say what to note, and return it. Raises what
    REFUSED names."""
    # While that agent is busy with the end of the job, connections are refused, or accepted by its mesh and
    # closed: both are tried again.
    link = Link.within(CONNECT, ending, request.gang.secret, PURPOSE)
    with contextlib.closing(link):
        try:
            text = _take(link, request, search, ending.node)
        except (*REFUSED, EOFError) as error:
            text = f"{failed}: {error}"
        link.write("end", text[:MAX_LINE])
        return text


def _take(link: Link, request: StartRequest, search: SnapshotSearch, ending: int) -> str:
    """Return what to note. Raises what REFUSED names, and EOFError."""
    offer = decode(link.read("offer", PREPARE).encode(), SharedFiles)
    latest = (time.time() + LATEST) * 1e9
    why = next(filter(None, (refusal(one, search, latest) for one in offer.files)), "")
    both = {ending: offer, request.node: SharedFiles(tuple(offers.newest(search)[0]))}
    ids = {peer.node: peer.id for peer in request.gang.peers}
    planned = [] if why else copies(both, ids, every=False, replaces=True)
    wanted, taken = {one.file.path for one in planned if request.node in one.lacking}, set[str]()
    exchange = _exchange(request)
    exchange.get(link, offer.files, wanted, taken)
    if why or taken != wanted:
        raise LinkError(why or f"{wanted.pop()!r} no longer exists")
    exchange.forget_begun()
    where = f"the newest snapshot of node {ending}, was copied to node {request.node}"
    return f"{taken.pop()}, {where}" if taken else ""
