"""Before a node ends: its newest snapshot is sent to a node that stays, the first one, also with nobody connected.

The connections of the agents carry short messages, and end with the job. So the snapshot has one of its own, to the port of the
agent there, which is free by then. Both sides prove that they know the secret of the job, what is said about the file carries an
HMAC under it, and the file is verified by its SHA-256. A node accepts a path that is a snapshot by the patterns of the job only.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import secrets
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any, BinaryIO, Optional

from agent import job_record, phases, restore, snapshot, store
from cloudddp.agent.protocol.codec import decode, encode
from cloudddp.agent.protocol.gang import Peer
from cloudddp.agent.protocol.snapshots import RestoreRequest, SnapshotReply, SnapshotRequest, matches
from cloudddp.agent.protocol.start import StartRequest
from cloudddp.agent.protocol.verdict import MAX_LINE, Cause

CONNECT = 15.0  # seconds for the other node to listen, or to connect
ANSWER = 5.0  # seconds for it to prove who it is, and without which nothing more of the file comes
PREPARE = 120.0  # seconds for it to find, verify and hash its newest snapshot: a spot notice is two minutes
PAUSE = 0.2
PIECE = 1 << 20  # bytes
LONGEST_LINE = 1 << 16  # bytes
LATEST = 86400.0  # seconds by which the other clock may be ahead


class _Failed(Exception):
    """The snapshot was not handed over; the text says why."""


def start(request: StartRequest, began: float) -> Optional[threading.Thread]:
    """Hand a snapshot over if this node is about to end, or take it if this is the first node that stays; return the thread
    that does it, or None. `began`: when the job began here, by the monotonic clock."""
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


def _run(request: StartRequest, wanted: SnapshotRequest, ending: int, keeper: Peer) -> None:
    """Send or take, and note what has become of it in the logs of this node."""
    act = _send if request.node == ending else _keep
    try:
        found = act(request, wanted, keeper)
        text = (
            f"{found.path}, the newest snapshot of node {ending}, was copied to node {keeper.node}"
            if found
            else ""
        )
    except (_Failed, OSError, ValueError, KeyError, TypeError, RecursionError, SystemExit) as error:
        text = f"the newest snapshot of node {ending} was not copied to node {keeper.node}: {error}"
    if text:
        job_record.note(store.job_folder(request.job), text[:MAX_LINE])


def _all_end(request: StartRequest, began: float) -> bool:
    """Whether the notice is that of the deadline, at which all nodes end."""
    if request.deadline is None:
        return False
    return request.deadline.left - (time.monotonic() - began) <= request.save + ANSWER


class _Link:
    """A connection, and what both sides have said first."""

    def __init__(self, connection: socket.socket, secret: str) -> None:
        connection.settimeout(ANSWER)
        self.socket = connection
        self.input: BinaryIO = connection.makefile("rb")
        self._secret = secret.encode()
        self._nonces: tuple[str, str] = ("", "")

    def offer(self) -> None:
        """Prove who this side is, which has connected, and check the other one."""
        own = secrets.token_hex(16)
        self.write({"nonce": own})
        found = self.read(ANSWER)
        self._nonces = (own, str(found["nonce"]))
        self._check(found, "keep")
        self.write({"seal": self._seal("offer")})

    def accept(self) -> None:
        own, theirs = secrets.token_hex(16), str(self.read(ANSWER)["nonce"])
        self._nonces = (theirs, own)
        self.write({"nonce": own, "seal": self._seal("keep")})
        self._check(self.read(ANSWER), "offer")

    def write_sealed(self, name: str, text: str) -> None:
        self.write({"text": text, "seal": self._seal(name, text)})

    def read_sealed(self, name: str, seconds: float) -> str:
        found = self.read(seconds)
        text = str(found["text"])
        self._check(found, name, text)
        return text

    def write(self, value: dict[str, Any]) -> None:
        self.socket.sendall(json.dumps(value).encode() + b"\n")

    def read(self, seconds: float) -> dict[str, Any]:
        self.socket.settimeout(seconds)
        line = self.input.readline(LONGEST_LINE)
        if not line.endswith(b"\n"):
            raise _Failed("the connection has ended")
        found = json.loads(line)
        return dict(found)

    def _seal(self, name: str, text: str = "") -> str:
        return hmac.new(self._secret, json.dumps([name, *self._nonces, text]).encode(), "sha256").hexdigest()

    def _check(self, found: dict[str, Any], name: str, text: str = "") -> None:
        if not hmac.compare_digest(str(found["seal"]).encode(), self._seal(name, text).encode()):
            raise _Failed("the other side does not know the secret of the job")


# -- the node that ends ------------------------------------------------------------------------------------------


def _send(request: StartRequest, wanted: SnapshotRequest, keeper: Peer) -> Optional[SnapshotReply]:
    """Send the newest snapshot to that node, and return it; None if there is nothing to send."""
    with contextlib.closing(_connected(keeper)) as connection:
        link = _Link(connection, request.gang.secret)
        link.offer()
        found = snapshot.step(wanted)
        link.write_sealed("snapshot", encode(found).decode())
        sent = link.read_sealed("answer", PREPARE) == "send"
        if sent:
            with open(store.project_folder(request.project) / found.path, "rb") as file:
                connection.settimeout(CONNECT)
                left = found.size
                while left and (piece := file.read(min(left, PIECE))):
                    connection.sendall(piece)
                    left -= len(piece)
        why = link.read_sealed("end", CONNECT)
    if why:
        raise _Failed(why)
    return found if sent else None


def _connected(keeper: Peer) -> socket.socket:
    """Connect to the node that stays: its agent may still be busy with the end of the job. Raises OSError."""
    deadline = time.monotonic() + CONNECT
    while time.monotonic() < deadline:
        with contextlib.suppress(OSError):
            return socket.create_connection((keeper.address, keeper.port), ANSWER)
        time.sleep(PAUSE)
    return socket.create_connection((keeper.address, keeper.port), ANSWER)


# -- the node that stays -----------------------------------------------------------------------------------------


def _keep(request: StartRequest, wanted: SnapshotRequest, keeper: Peer) -> Optional[SnapshotReply]:
    """Take a snapshot that is newer than that of this node, and return it; None if there is none."""
    for link in _links(keeper, request.gang.secret):
        found = decode(link.read_sealed("snapshot", PREPARE).encode(), SnapshotReply)
        try:
            taken = _take(link, request, found, wanted)
        except (_Failed, OSError, SystemExit) as error:
            link.write_sealed("end", str(error)[:MAX_LINE])
            raise
        link.write_sealed("end", "")
        return found if taken else None
    raise _Failed("that node did not connect")


def _links(keeper: Peer, secret: str) -> Iterator[_Link]:
    """Yield a connection that has proved who it is."""
    deadline = time.monotonic() + CONNECT
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((keeper.address, keeper.port))
        listener.listen()
        while (left := deadline - time.monotonic()) > 0:
            listener.settimeout(left)
            with contextlib.suppress(TimeoutError, socket.timeout), listener.accept()[0] as connection:
                link = _Link(connection, secret)
                try:
                    link.accept()
                except (_Failed, OSError, ValueError, KeyError, TypeError, RecursionError):
                    continue  # a stranger
                yield link
                return


def _take(link: _Link, request: StartRequest, found: SnapshotReply, wanted: SnapshotRequest) -> bool:
    """Return whether the snapshot was taken. Raises _Failed, OSError, and SystemExit for a stream that ends early."""
    if not found.path:
        link.write_sealed("answer", "no")
        return False
    if not matches(found.path, wanted.patterns) or found.path in wanted.exclude:
        raise _Failed(f"{found.path!r} is no snapshot of this job")
    if found.mtime_ns > (time.time() + LATEST) * 1e9:
        raise _Failed(f"the time of {found.path!r} is more than a day in the future")
    own = snapshot.step(wanted)
    if own.path and (own.digest == found.digest or own.mtime_ns >= found.mtime_ns):
        link.write_sealed("answer", "no")
        return False
    link.write_sealed("answer", "send")
    link.socket.settimeout(ANSWER)
    asked = RestoreRequest(request.project, found.path, found.mtime_ns, found.size)
    restore.write(asked, link.input.read, digest=found.digest)
    return True
