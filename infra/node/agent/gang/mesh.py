"""Authenticated connections between the agents of one job, served by the thread that calls `poll`.

Each node connects to every other one and sends on that connection; it receives on the connections of the
others. A connection is opened in a thread of its own, in which both sides prove that they know the job's
secret (node/link.py). Every message carries the HMAC of its number and text, so that none can be forged,
repeated or left out. Messages are not encrypted: like the traffic of the ranks, they stay within the
cluster's security group, and hold no secret.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import queue
import selectors
import socket
import threading
import time
from dataclasses import dataclass, field
from typing import Optional, Union

from agent.gang.events import ConnectionClosed, MessageReceived
from agent.node.link import HELLO, REFUSED, Link, LinkError, Server, WrongSecret
from agent.node.shared_memory import mark_start
from cloudddp.agent.protocol.codec import ProtocolError, decode, encode
from cloudddp.agent.protocol.gang import LONGEST_MESSAGE, Gang, Message, Unreachable
from cloudddp.agent.protocol.phases import Peer

# Seconds until a refused connection is tried again, doubled each time: the other agent may not have started.
# Once it has, it connects to this one, which then connects at once: of many nodes that start one by one,
# nobody has to ask all the others often.
RETRY, LONGEST_RETRY = 0.1, 1.6
CONNECT_SECONDS = 120.0  # for TCP, which has no answer from a node whose security group drops packets
OTHER_JOB = "it proves another secret: it belongs to another job"
UNANSWERED = "it accepts connections, and does not answer"
PURPOSE = "gang"
PIECE = 1 << 16  # bytes that are read of one connection at a time: the others must be served, too
BACKLOG = 1 << 26  # bytes that a peer may leave unread


@dataclass(eq=False)
class _Connection:
    """A connection to or from another node of the job. Its `link` makes the HMACs of messages."""

    socket: socket.socket
    link: Link
    node: int
    outgoing: bool
    received: bytearray
    unsent: bytearray = field(default_factory=bytearray)
    count: int = 0  # messages so far


class Mesh:
    """The connections of this node. Messages are received and sent only in `poll`, `send` and `flush`."""

    def __init__(self, node: int, gang: Gang) -> None:
        """Listen, and begin to connect. Raises OSError if the port is taken."""
        self._node, self._secret = node, gang.secret
        peers = {peer.node: peer for peer in gang.peers}
        own = peers.pop(node)
        self._selector = selectors.DefaultSelector()
        self._out: dict[int, _Connection] = {}
        self._in: dict[int, _Connection] = {}
        self._new: queue.SimpleQueue[_Connection] = queue.SimpleQueue()  # opened by other threads
        self._listens = {peer: threading.Event() for peer in peers}  # by node: it has connected to this one
        self._refusals: dict[int, str] = {}
        self._events: list[Union[MessageReceived, ConnectionClosed]] = []
        self._proven: set[tuple[int, bool]] = set()  # the node, and whether the connection is an outgoing one
        self._ended: set[int] = set()  # nodes of which the end of a connection was reported
        self._is_closed = False
        self.heard = dict.fromkeys(peers, time.monotonic())  # when each node last sent something
        self._waker, self.wake = socket.socketpair()  # a byte to `wake` ends the wait of `poll`
        self._waker.setblocking(False)
        self.wake.setblocking(False)
        self._selector.register(self._waker, selectors.EVENT_READ, None)
        self._server = Server(gang.secret, PURPOSE, len(gang.peers), self._welcome)
        self._server.listen(own.address, own.port)
        for peer in peers.values():
            threading.Thread(target=self._connect, args=(peer,), daemon=True).start()

    @property
    def complete(self) -> bool:
        """Whether every other node is connected in both directions."""
        return len(self._in) == len(self._out) == len(self.heard)

    @property
    def missing(self) -> Unreachable:
        """The connections that this node never had. Those that have ended are of nodes that have given up."""
        to = {
            node: self._refusals.get(node, "it did not answer")
            for node in self.heard
            if (node, True) not in self._proven
        }
        return Unreachable(to, tuple(node for node in self.heard if (node, False) not in self._proven))

    def poll(self, seconds: float) -> list[Union[MessageReceived, ConnectionClosed]]:
        """Wait for up to `seconds`, and return what has happened."""
        for key, _ in self._selector.select(seconds):
            if key.data is None:
                with contextlib.suppress(BlockingIOError):
                    self._waker.recv(1 << 12)
            else:
                self._write(key.data)
                self._read(key.data)
        while not self._new.empty():
            self._take(self._new.get())
        events, self._events = self._events, []
        return events

    def send(self, message: Message) -> None:
        """Queue a message for every other node that is connected, and send what the network takes at once."""
        text = encode(message).decode()
        for one in list(self._out.values()):
            one.unsent += f"{one.link.seal(str(one.count), text)} {text}\n".encode()
            one.count += 1
            self._write(one)

    def flush(self, seconds: float) -> None:
        """Send what is queued, for up to `seconds`."""
        deadline = time.monotonic() + seconds
        while any(one.unsent for one in self._out.values()) and time.monotonic() < deadline:
            self._selector.select(0.02)
            for one in list(self._out.values()):
                self._write(one)

    def close(self) -> None:
        self._is_closed = True
        self._server.close()
        while not self._new.empty():
            self._new.get().socket.close()
        for one in [*self._out.values(), *self._in.values()]:
            one.socket.close()
        for end in (self._waker, self.wake):
            end.close()
        self._selector.close()

    # -- new connections, in threads of their own ------------------------------------------------------------

    def _connect(self, peer: Peer) -> None:
        """Connect to a node, again until it proves that it belongs to the job. One that was once connected is
        not replaced."""
        delay, node = RETRY, peer.node
        while not self._is_closed and (why := self._open(peer)) is not None:
            if why and self._refusals.get(node) != OTHER_JOB:  # which has given up since
                self._refusals[node] = why
            self._listens[node].wait(delay)
            self._listens[node].clear()
            delay = min(2 * delay, LONGEST_RETRY)

    def _open(self, peer: Peer) -> Optional[str]:
        """Connect to a node. Return None, or why that has failed, '' if there was no answer."""
        try:
            connection = socket.create_connection((peer.address, peer.port), CONNECT_SECONDS)
        except OSError as error:
            return error.strerror or ""
        with contextlib.closing(Link(connection, self._secret, PURPOSE)) as link:
            try:
                link.connect()
                link.write("nodes", json.dumps([self._node, peer.node]))
                self._add(peer.node, link, outgoing=True)
            except WrongSecret:
                return OTHER_JOB
            except REFUSED:
                return UNANSWERED
        return None

    def _welcome(self, link: Link) -> None:
        """Take the connection of a node of the job."""
        node, to = json.loads(link.read("nodes", HELLO))
        if to != self._node or node not in self.heard:
            raise LinkError("not a node of this job")
        self._add(node, link, outgoing=False)
        self._listens[node].set()

    def _add(self, node: int, link: Link, *, outgoing: bool) -> None:
        connection, received = link.detach()
        self._new.put(_Connection(connection, link, node, outgoing, bytearray(received)))
        with contextlib.suppress(OSError):  # there is a byte already, or it is closed
            self.wake.send(b"\0")

    # -- connections -----------------------------------------------------------------------------------------

    def _take(self, one: _Connection) -> None:
        """Serve a new connection, with what came with the proof."""
        table = self._out if one.outgoing else self._in
        if one.node in table:
            one.socket.close()  # a second connection of this node
            return
        table[one.node] = one
        self._selector.register(one.socket, selectors.EVENT_READ, one)
        self._proven.add((one.node, one.outgoing))
        if not one.outgoing:
            self.heard[one.node] = time.monotonic()
        if self.complete:
            mark_start("mesh")
        self._messages(one)

    def _lost(self, one: _Connection) -> None:
        """A connection has ended, since the agent of that node has.

        It ends both connections: what it has sent on the other one is read before its end is reported.
        """
        self._selector.unregister(one.socket)
        one.socket.close()
        del (self._out if one.outgoing else self._in)[one.node]
        if one.node not in self._ended and not (one.outgoing and one.node in self._in):
            self._ended.add(one.node)
            self._events.append(ConnectionClosed(one.node))

    def _read(self, one: _Connection) -> None:
        if one.socket.fileno() < 0:  # it was lost meanwhile
            return
        try:
            data = one.socket.recv(PIECE)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        one.received += data
        self._messages(one, is_last=not data)

    def _messages(self, one: _Connection, *, is_last: bool = False) -> None:
        """Take the messages that are complete. Nothing is received on an outgoing connection."""
        *lines, one.received = one.received.split(b"\n")
        try:
            for line in () if one.outgoing else lines:
                self._message(one, bytes(line))
        except (ProtocolError, ValueError, RecursionError):
            is_last = True
        if is_last or len(one.received) > LONGEST_MESSAGE:
            self._lost(one)

    def _message(self, one: _Connection, line: bytes) -> None:
        seal, _, text = line.partition(b" ")
        if not hmac.compare_digest(seal, one.link.seal(str(one.count), text.decode()).encode()):
            raise ProtocolError("the seal is wrong")
        one.count += 1
        self.heard[one.node] = time.monotonic()
        self._events.append(MessageReceived(one.node, decode(text, Message, limit=LONGEST_MESSAGE)))

    def _write(self, one: _Connection) -> None:
        if one.socket.fileno() < 0:
            return
        try:
            while one.unsent:
                del one.unsent[: one.socket.send(one.unsent)]
        except BlockingIOError:
            pass
        except OSError:
            self._lost(one)
            return
        if len(one.unsent) > BACKLOG:
            self._lost(one)
            return
        wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if one.unsent else 0)
        if self._selector.get_key(one.socket).events != wanted:
            self._selector.modify(one.socket, wanted, one)
