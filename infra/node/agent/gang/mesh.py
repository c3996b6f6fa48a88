"""Authenticated connections between the agents of one job.

Each node connects to every other one and sends on that connection; it receives on the connections of the
others. Each connection has a thread, in which both sides first prove that they know the job's secret
(node/link.py). Every message carries the HMAC of its number and text, so that none can be forged, repeated or
left out. Messages are not encrypted: like the traffic of the ranks, they stay within the cluster's security
group, and hold no secret.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import queue
import socket
import threading
import time
from collections.abc import Iterator
from typing import Optional

from agent.gang.events import ConnectionClosed, Event, MessageReceived
from agent.node.link import HELLO, REFUSED, Link, LinkError, Server, WrongSecret
from agent.node.shared_memory import mark_start
from cloudddp.agent.protocol.codec import decode, encode
from cloudddp.agent.protocol.gang import LONGEST_MESSAGE, Gang, PeerMessage, Unreachable
from cloudddp.agent.protocol.phases import Peer

# Seconds until a refused connection is tried again, doubled each time: the other agent may not have started.
# Once it has, it connects to this one, which then connects at once: of many nodes that start one by one,
# nobody has to ask all the others often.
RETRY, LONGEST_RETRY = 0.1, 1.6
CONNECT_SECONDS = 120.0  # for TCP, which has no answer from a node whose security group drops packets
OTHER_JOB = "it proves another secret: it belongs to another job"
UNANSWERED = "it accepts connections, and does not answer"
PURPOSE = "gang"
LONGEST_LINE = 2 * LONGEST_MESSAGE + (1 << 10)  # as a text in JSON, ASCII is at most twice as long
UNSENT = 1000  # messages that a peer may leave unread
UNREAD, PAUSE = 20, 0.01  # messages that wait for `poll`, beyond which peers have to wait; seconds


class Mesh:
    """The connections of this node. What their threads receive waits for `poll`."""

    def __init__(self, node: int, gang: Gang) -> None:
        """Listen, and begin to connect. Raises OSError if the port is taken."""
        self._node, self._secret = node, gang.secret
        peers = {peer.node: peer for peer in gang.peers}
        own = peers.pop(node)
        self._lock = threading.Lock()  # of the next three; the node, and whether the connection is outgoing
        self._links: dict[tuple[int, bool], Link] = {}
        self._proven: set[tuple[int, bool]] = set()
        self._ended: set[int] = set()  # nodes of which the end of a connection was reported
        self._unsent: dict[int, queue.Queue[str]] = {peer: queue.Queue(UNSENT) for peer in peers}
        self._listens = {peer: threading.Event() for peer in peers}  # by node: it has connected to this one
        self._refusals: dict[int, str] = {}
        self._events: queue.SimpleQueue[Optional[Event]] = queue.SimpleQueue()
        self._is_closed = False
        self.heard = dict.fromkeys(peers, time.monotonic())  # when each node last sent something
        self._server = Server(gang.secret, PURPOSE, len(gang.peers), self._welcome)
        self._server.listen(own.address, own.port)
        for peer in peers.values():
            threading.Thread(target=self._connect, args=(peer,), daemon=True).start()

    @property
    def complete(self) -> bool:
        """Whether every other node is connected in both directions."""
        return len(self._links) == 2 * len(self.heard)

    @property
    def missing(self) -> Unreachable:
        """The connections that this node never had. Those that have ended are of nodes that have given up."""
        to = {
            node: self._refusals.get(node, "it did not answer")
            for node in self.heard
            if (node, True) not in self._proven
        }
        return Unreachable(to, tuple(node for node in self.heard if (node, False) not in self._proven))

    def post(self, event: Optional[Event] = None) -> None:
        """End the wait of `poll`, which returns the event. Also a signal handler may call this."""
        self._events.put(event)

    def poll(self, seconds: float) -> list[Event]:
        """Wait for up to `seconds`, and return what has happened."""
        with contextlib.suppress(queue.Empty):
            found = [self._events.get(timeout=seconds)]
            found += [self._events.get_nowait() for _ in range(self._events.qsize())]
            return [one for one in found if one is not None]
        return []

    def send(self, message: PeerMessage) -> None:
        """Queue a message for every other node that is connected."""
        text = encode(message).decode()
        for (node, outgoing), link in list(self._links.items()):
            if outgoing:
                try:
                    self._unsent[node].put_nowait(text)
                except queue.Full:
                    link.end()

    def flush(self, seconds: float) -> None:
        """Wait until what is queued was sent, for up to `seconds`."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline and any(
            self._unsent[node].unfinished_tasks for node, outgoing in list(self._links) if outgoing
        ):
            time.sleep(PAUSE)

    def close(self) -> None:
        self._is_closed = True
        self._server.close()
        for link in list(self._links.values()):
            link.end()

    # -- the threads of connections --------------------------------------------------------------------------

    def _connect(self, peer: Peer) -> None:
        """Connect to a node until it proves that it belongs to the job, and not once more after that."""
        delay, node = RETRY, peer.node
        while not self._is_closed and (why := self._open(peer)) is not None:
            if why and self._refusals.get(node) != OTHER_JOB:  # which has given up since
                self._refusals[node] = why
            self._listens[node].wait(delay)
            self._listens[node].clear()
            delay = min(2 * delay, LONGEST_RETRY)

    def _open(self, peer: Peer) -> Optional[str]:
        """Connect to a node, and send until that ends. Return None, or why it failed, '' for no answer."""
        try:
            connection = socket.create_connection((peer.address, peer.port), CONNECT_SECONDS)
        except OSError as error:
            return error.strerror or ""
        with contextlib.closing(Link(connection, self._secret, PURPOSE)) as link:
            try:
                link.connect()
                link.write("nodes", json.dumps([self._node, peer.node]))
            except WrongSecret:
                return OTHER_JOB
            except REFUSED:
                return UNANSWERED
            unsent = self._unsent[peer.node]
            with contextlib.suppress(*REFUSED), self._connected(peer.node, link, outgoing=True):
                for number in itertools.count():
                    link.write(str(number), unsent.get())
                    unsent.task_done()
        return None

    def _welcome(self, link: Link) -> None:
        """Receive what a node of the job sends."""
        node, to = json.loads(link.read("nodes", HELLO))
        if to != self._node or node not in self.heard:
            raise LinkError("not a node of this job")
        with self._connected(node, link, outgoing=False):
            self._listens[node].set()
            for number in itertools.count():
                self.heard[node] = time.monotonic()
                while self._events.qsize() > UNREAD:
                    time.sleep(PAUSE)
                text = link.read(str(number), None, LONGEST_LINE)
                self.post(MessageReceived(node, decode(text.encode(), PeerMessage, limit=LONGEST_MESSAGE)))

    @contextlib.contextmanager
    def _connected(self, node: int, link: Link, *, outgoing: bool) -> Iterator[None]:
        """Keep a connection that is open. It ends since the agent of that node has ended, and with it the
        other one: what was sent there is received before the end is reported."""
        key = (node, outgoing)
        with self._lock:
            if key in self._links:
                raise LinkError("a second connection of this node")
            self._links[key] = link
            self._proven.add(key)
            if self.complete:
                mark_start("mesh")
        try:
            yield
        finally:
            with self._lock:
                del self._links[key]
                if node not in self._ended and not (outgoing and (node, False) in self._links):
                    self._ended.add(node)
                    self.post(ConnectionClosed(node))
