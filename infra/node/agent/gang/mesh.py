"""Authenticated connections between the agents of one job, served by one thread.

Each node connects to every other one and sends on that connection; it receives on the connections of the
others. Both sides of a connection prove that they know the job's secret: each sends a random nonce, and the
HMAC of both nonces, both nodes and its role. Every message then carries the HMAC of its number and text under
a key made of them, so that none can be forged, repeated or left out. Messages are not encrypted: like the
traffic of the ranks, they stay within the cluster's security group, and hold no secret.
"""

from __future__ import annotations

import contextlib
import errno
import hmac
import json
import os
import secrets
import selectors
import socket
import time
from dataclasses import dataclass, field
from typing import Optional, Union

from agent.gang.events import ConnectionClosed, MessageReceived
from agent.node.shared_memory import mark_start
from cloudddp.agent.protocol.codec import ProtocolError, decode, encode
from cloudddp.agent.protocol.gang import LONGEST_MESSAGE, Gang, Message, Unreachable

# Seconds until a refused connection is tried again, doubled each time: the other agent may not have started.
# Once it has, it connects to this one, which then connects at once: of many nodes that start one by one,
# nobody has to ask all the others often.
RETRY, LONGEST_RETRY = 0.1, 1.6
HELLO_SECONDS = 10.0  # for a connection to prove that it belongs to the job
ANSWER_SECONDS = 5.0  # for the other side to answer, before its connection is opened again
OTHER_JOB = "it proves another secret: it belongs to another job"
ACCEPTED = 16  # new connections at a time: those that are open must be served, too
PIECE = 1 << 16  # bytes that are read of one connection at a time, likewise
MAX_STRANGERS = 64  # connections that have not proved it, at a time
HELLO_BYTES = 1024
BACKLOG = 1 << 26  # bytes that a peer may leave unread


@dataclass(eq=False)
class _Link:
    """One connection. `node` is the other side, None until it has proved who it is."""

    socket: socket.socket
    outgoing: bool
    node: Optional[int]
    opened: float
    nonce: str = field(default_factory=lambda: secrets.token_hex(16))
    connected: bool = False  # TCP
    key: bytes = b""  # once both sides have proved that they know the secret
    count: int = 0  # messages so far
    received: bytearray = field(default_factory=bytearray)
    unsent: bytearray = field(default_factory=bytearray)


class Mesh:
    """The connections of this node. Nothing happens outside of `poll` and `send`."""

    def __init__(self, node: int, gang: Gang) -> None:
        """Listen. Raises OSError if the port is taken."""
        self._node = node
        self._secret = gang.secret.encode()
        self._peers = {peer.node: peer for peer in gang.peers if peer.node != node}
        own = next(peer for peer in gang.peers if peer.node == node)
        self._selector = selectors.DefaultSelector()
        self._out: dict[int, _Link] = {}
        self._in: dict[int, _Link] = {}
        self._strangers: list[_Link] = []
        self._retry_at = dict.fromkeys(self._peers, 0.0)
        self._delay = dict.fromkeys(self._peers, RETRY)
        self._refusals: dict[int, str] = {}
        self._events: list[Union[MessageReceived, ConnectionClosed]] = []
        self._proven: set[tuple[int, bool]] = set()  # the node, and whether the connection is an outgoing one
        self._ended: set[int] = set()  # nodes of which a connection has ended, which is not opened again
        self._closed: set[int] = set()  # those of which the end was reported
        self.heard = dict.fromkeys(self._peers, time.monotonic())  # when each node last sent something
        self._listener = socket.socket()
        self._listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._listener.bind((own.address, own.port))
        self._listener.listen(len(gang.peers) + MAX_STRANGERS)
        self._listener.setblocking(False)
        self._selector.register(self._listener, selectors.EVENT_READ, None)
        self._waker, self.wake = socket.socketpair()  # a byte to `wake` ends the wait of `poll`
        self._waker.setblocking(False)
        self.wake.setblocking(False)
        self._selector.register(self._waker, selectors.EVENT_READ, None)

    @property
    def complete(self) -> bool:
        """Whether every other node is connected in both directions."""
        count = len(self._peers)
        return len(self._in) == len(self._out) == count and all(link.key for link in self._out.values())

    @property
    def missing(self) -> Unreachable:
        """The connections that this node never had. Those that have ended are of nodes that have given up."""
        to = {
            node: self._refusals.get(node, "it did not answer")
            for node in self._peers
            if (node, True) not in self._proven
        }
        return Unreachable(to, tuple(node for node in self._peers if (node, False) not in self._proven))

    def poll(self, seconds: float) -> list[Union[MessageReceived, ConnectionClosed]]:
        """Wait for up to `seconds`, and return what has happened."""
        self._connect()
        for key, _ in self._selector.select(seconds):
            if key.fileobj is self._waker:
                with contextlib.suppress(BlockingIOError):
                    self._waker.recv(1 << 12)
            elif key.data is None:
                self._accept()
            elif key.data.socket.fileno() >= 0:  # not closed by an earlier event
                self._serve(key.data)
        self._drop_strangers()
        events, self._events = self._events, []
        return events

    def send(self, message: Message) -> None:
        """Queue a message for every other node that is connected, and send what the network takes at once."""
        text = encode(message, omit_defaults=True)
        for link in list(self._out.values()):
            if link.key:
                self._queue(link, text)

    def flush(self, seconds: float) -> None:
        """Send what is queued, for up to `seconds`."""
        deadline = time.monotonic() + seconds
        while any(link.unsent for link in self._out.values()) and time.monotonic() < deadline:
            self._selector.select(0.02)
            for link in list(self._out.values()):
                self._write(link)

    def close(self) -> None:
        for link in [*self._out.values(), *self._in.values(), *self._strangers]:
            link.socket.close()
        for one in (self._listener, self._waker, self.wake):
            one.close()
        self._selector.close()

    # -- connections -----------------------------------------------------------------------------------------

    def _connect(self) -> None:
        """Open the connections that are missing; those that were once open are not replaced."""
        now = time.monotonic()
        for node, peer in self._peers.items():
            if node in self._out or node in self._ended or now < self._retry_at[node]:
                continue
            link = _Link(socket.socket(), True, node, now)
            link.socket.setblocking(False)
            code = link.socket.connect_ex((peer.address, peer.port))
            self._out[node] = link
            if code not in (0, errno.EINPROGRESS):
                self._refused(link, code)
                continue
            self._selector.register(link.socket, selectors.EVENT_READ | selectors.EVENT_WRITE, link)

    def _refused(self, link: _Link, code: int) -> None:
        node = link.node
        if node is None:
            return
        if self._refusals.get(node) != OTHER_JOB:  # which has given up since
            self._refusals[node] = os.strerror(code)
        self._retry_later(node)
        self._forget(link)

    def _retry_later(self, node: int) -> None:
        self._retry_at[node] = time.monotonic() + self._delay[node]
        self._delay[node] = min(2 * self._delay[node], LONGEST_RETRY)

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            for _ in range(ACCEPTED):
                accepted, _ = self._listener.accept()
                if len(self._strangers) >= MAX_STRANGERS + len(self._peers):
                    self._forget(self._strangers[0])  # the oldest: a node of the job proves itself at once
                accepted.setblocking(False)
                link = _Link(accepted, False, None, time.monotonic(), connected=True)
                self._strangers.append(link)
                self._selector.register(accepted, selectors.EVENT_READ, link)

    def _drop_strangers(self) -> None:
        now = time.monotonic()
        for link in [one for one in self._strangers if now - one.opened > HELLO_SECONDS]:
            self._forget(link)
        for node, link in list(self._out.items()):
            if link.connected and not link.key and now - link.opened > ANSWER_SECONDS:
                self._refusals[node] = "it accepts connections, and does not answer"
                self._forget(link)

    def _forget(self, link: _Link) -> None:
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(link.socket)
        link.socket.close()
        if link in self._strangers:
            self._strangers.remove(link)
        for table in (self._out, self._in):
            if link.node is not None and table.get(link.node) is link:
                del table[link.node]

    def _lost(self, link: _Link) -> None:
        """A connection has ended. That of a proven peer means that its agent has.

        The peer ends both connections: what it has sent on the other one is read before its end is reported.
        """
        proven, node = bool(link.key), link.node
        self._forget(link)
        if node is not None and proven:
            self._ended.add(node)
            if node not in self._closed and not (link.outgoing and node in self._in):
                self._closed.add(node)
                self._events.append(ConnectionClosed(node))
        elif node is not None and link.outgoing:
            self._retry_later(node)

    # -- reading and writing ---------------------------------------------------------------------------------

    def _serve(self, link: _Link) -> None:
        if not link.connected:
            code = link.socket.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
            if code:
                self._refused(link, code)
                return
            with contextlib.suppress(OSError):
                link.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                link.socket.getpeername()
                link.connected = True
                link.opened = time.monotonic()
            if not link.connected:
                return
            self._write_line(link, {"from": self._node, "to": link.node, "nonce": link.nonce})
        self._write(link)
        if link.socket.fileno() >= 0:
            self._read(link)

    def _read(self, link: _Link) -> None:
        ended = False
        try:
            data = link.socket.recv(PIECE)
            ended = not data
            link.received += data
        except BlockingIOError:
            pass
        except OSError:
            ended = True
        try:
            self._lines(link)
        except (ProtocolError, ValueError, KeyError, TypeError, RecursionError):
            ended = True  # not of this job, or of another version
        if ended or len(link.received) > LONGEST_MESSAGE:
            self._lost(link)

    def _lines(self, link: _Link) -> None:
        *lines, link.received = link.received.split(b"\n")
        for line in map(bytes, lines):
            if not link.key:
                self._hello(link, line)
            elif not link.outgoing:
                self._message(link, line)
        if not link.key and len(link.received) > HELLO_BYTES:
            raise ProtocolError("the first line is too long")

    def _write_line(self, link: _Link, value: dict[str, Union[int, str, None]]) -> None:
        link.unsent += json.dumps(value).encode() + b"\n"
        self._write(link)

    def _write(self, link: _Link) -> None:
        try:
            while link.unsent and link.connected:
                del link.unsent[: link.socket.send(link.unsent)]
        except BlockingIOError:
            pass
        except OSError:
            self._lost(link)
            return
        if len(link.unsent) > BACKLOG:
            self._lost(link)
            return
        wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if link.unsent else 0)
        with contextlib.suppress(KeyError, ValueError):
            if self._selector.get_key(link.socket).events != wanted:
                self._selector.modify(link.socket, wanted, link)

    # -- authentication --------------------------------------------------------------------------------------

    def _hello(self, link: _Link, line: bytes) -> None:
        """The connecting side sends its nonce, gets a nonce and a proof, and sends its own proof."""
        found = json.loads(line)
        if link.outgoing:
            theirs = str(found["nonce"])[:64]
            names = (link.nonce, theirs, self._node, link.node)
            try:
                self._check(str(found["proof"]), "accept", *names)
            except ProtocolError:
                self._refusals[link.node or 0] = OTHER_JOB
                raise
            self._write_line(link, {"proof": self._proof("connect", *names)})
            link.key = bytes.fromhex(self._proof("key", *names))
            self._note_proof(link)
        elif link.node is None:
            node, to, theirs = found["from"], found["to"], str(found["nonce"])[:64]
            if to != self._node or type(node) is not int or node not in self._peers:
                raise ProtocolError("not a node of this job")
            link.node = node
            link.nonce = f"{theirs}:{link.nonce}"
            proof = self._proof("accept", theirs, link.nonce.partition(":")[2], node, to)
            self._write_line(link, {"nonce": link.nonce.partition(":")[2], "proof": proof})
        else:
            theirs, _, ours = link.nonce.partition(":")
            names = (theirs, ours, link.node, self._node)
            self._check(str(found["proof"]), "connect", *names)
            if link.node in self._in:
                raise ProtocolError("a second connection of this node")
            link.key = bytes.fromhex(self._proof("key", *names))
            self._in[link.node] = link
            self._retry_at[link.node] = 0.0  # it listens by now
            self._note_proof(link)
            self._strangers.remove(link)
            self.heard[link.node] = time.monotonic()

    def _note_proof(self, link: _Link) -> None:
        self._proven.add((link.node or 0, link.outgoing))
        if self.complete:
            mark_start("mesh")

    def _proof(self, role: str, *names: Union[int, str, None]) -> str:
        text = json.dumps([role, *names]).encode()
        return hmac.digest(self._secret, text, "sha256").hex()

    def _check(self, proof: str, role: str, *names: Union[int, str, None]) -> None:
        if not hmac.compare_digest(proof.encode(), self._proof(role, *names).encode()):
            raise ProtocolError("the proof is wrong")

    # -- messages --------------------------------------------------------------------------------------------

    def _queue(self, link: _Link, text: bytes) -> None:
        link.unsent += _seal(link, text).encode() + b" " + text + b"\n"
        link.count += 1
        self._write(link)

    def _message(self, link: _Link, line: bytes) -> None:
        seal, _, text = line.partition(b" ")
        if not hmac.compare_digest(seal, _seal(link, text).encode()):
            raise ProtocolError("the seal is wrong")
        link.count += 1
        message = decode(text, Message, limit=LONGEST_MESSAGE)
        if link.node is not None:
            self.heard[link.node] = time.monotonic()
            self._events.append(MessageReceived(link.node, message))


def _seal(link: _Link, text: bytes) -> str:
    return hmac.digest(link.key, b"%d " % link.count + text, "sha256").hex()
