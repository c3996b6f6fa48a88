"""A connection between two agents.

Both sides prove that they know the secret of the job, or of the sync, and for what they have connected. Their
messages carry an HMAC under it, and files come as frames (protocol/transfer.py).
"""

from __future__ import annotations

import contextlib
import hmac
import json
import secrets
import socket
import threading
import time
from io import BufferedReader
from typing import Any, Callable, Optional

from cloudddp.agent.protocol.phases import Peer

ANSWER = 5.0  # seconds for the side that has listened to prove who it is
HELLO = 10.0  # seconds for the one that has connected
STALLED = 120.0  # seconds in which nothing more is taken, or comes
LONGEST_LINE = 1 << 16  # bytes
RETRY, LONGEST_RETRY = 0.002, 0.05  # seconds until a connection is tried again, doubled each time
MAX_STRANGERS = 64  # connections that a node accepts, besides those of the nodes
# What an unauthenticated peer may cause.
REFUSED = (OSError, ValueError, KeyError, TypeError, RecursionError)


class LinkError(OSError):
    """The other side has not kept to what was agreed; the text says how."""


class WrongSecret(LinkError):
    """The other side does not know the secret."""


class Link:
    """A connection, and what both sides have said first."""

    def __init__(self, connection: socket.socket, secret: str, purpose: str) -> None:
        connection.settimeout(ANSWER)
        with contextlib.suppress(OSError):
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._socket = connection
        self._input: BufferedReader = connection.makefile("rb")
        self.patience = STALLED  # seconds of `read_all`
        self._secret = secret.encode()
        self._names: tuple[str, str, str] = (purpose, "", "")

    @classmethod
    def within(
        cls,
        seconds: float,
        peer: Peer,
        secret: str,
        purpose: str,
        *,
        again: tuple[type[Exception], ...] = REFUSED,
        ended: Callable[[], bool] = lambda: False,
    ) -> Link:
        """Connect to another agent, which may not yet listen, and prove who this side is. The errors `again`
        are tried again for so many seconds, unless it `ended`. Raises what REFUSED names."""
        deadline, delay = time.monotonic() + seconds, RETRY
        while True:
            try:
                link = cls(socket.create_connection((peer.address, peer.port), seconds), secret, purpose)
                try:
                    link.connect()
                    return link
                except BaseException:
                    link.close()
                    raise
            except REFUSED as error:
                if not isinstance(error, again) or time.monotonic() > deadline or ended():
                    raise
            time.sleep(delay)
            delay = min(2 * delay, LONGEST_RETRY)

    def connect(self) -> None:
        """Prove who this side is, which has connected, and check the other one. Raises what REFUSED names."""
        own = secrets.token_hex(16)
        self._write({"nonce": own})
        found = self._read(time.monotonic() + ANSWER)
        self._names = (self._names[0], own, str(found["nonce"]))
        self._check(found, "accept")
        self._write({"seal": self._seal("connect")})

    def accept(self, seconds: float = HELLO) -> None:
        """The same, for the side that has listened."""
        until = time.monotonic() + seconds
        own, theirs = secrets.token_hex(16), str(self._read(until)["nonce"])
        self._names = (self._names[0], theirs, own)
        self._write({"nonce": own, "seal": self._seal("accept")})
        self._check(self._read(until), "connect")

    def write(self, name: str, text: str) -> None:
        self._write({"text": text, "seal": self._seal(name, text)})

    def read(self, name: str, seconds: Optional[float], longest: int = LONGEST_LINE) -> str:
        """`seconds`: None for any time, of a node that is watched otherwise."""
        found = self._read(None if seconds is None else time.monotonic() + seconds, longest)
        text = str(found["text"])
        self._check(found, name, text)
        return text

    def read_all(self, size: int) -> bytes:
        """Return so many bytes, fewer only at the end. Raises TimeoutError where they take longer than
        `patience`: a node that sends byte by byte is no source."""
        data, until = bytearray(), time.monotonic() + self.patience
        while len(data) < size:
            self._socket.settimeout(max(until - time.monotonic(), 0.001))
            if not (piece := self._input.read1(size - len(data))):
                break
            data += piece
        return bytes(data)

    def write_all(self, data: bytes) -> None:
        self._socket.settimeout(STALLED)  # not what was left of the time of a read
        self._socket.sendall(data)

    def end(self) -> None:
        """Wake the thread that uses the connection; it has to close it."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._input.close()
        self._socket.close()

    def _write(self, value: dict[str, Any]) -> None:
        self.write_all(json.dumps(value).encode() + b"\n")

    def _read(self, until: Optional[float], longest: int = LONGEST_LINE) -> dict[str, Any]:
        """Return a message, which the other side may send byte by byte, but not beyond `until`, by the
        monotonic clock."""
        line = b""
        while not line.endswith(b"\n"):
            self._socket.settimeout(until and max(until - time.monotonic(), 0.001))
            here = self._input.peek(1)
            if not here or len(line) > longest or (until and time.monotonic() > until):
                raise LinkError("the connection has ended")
            line += self._input.read(here.find(b"\n") + 1 or len(here))
        return dict(json.loads(line))

    def _seal(self, name: str, text: str = "") -> str:
        """Return the HMAC of a text that is sent as `name` on this connection."""
        return hmac.new(self._secret, json.dumps([name, *self._names, text]).encode(), "sha256").hexdigest()

    def _check(self, found: dict[str, Any], name: str, text: str = "") -> None:
        if not hmac.compare_digest(str(found["seal"]).encode(), self._seal(name, text).encode()):
            raise WrongSecret("the other side does not know the secret of the job")


class Server:
    """Serves other agents, each in a thread, at most `nodes` and some strangers, the oldest of which makes
    room: a node proves at once who it is. `serve` may raise what REFUSED names, and EOFError."""

    def __init__(self, secret: str, purpose: str, nodes: int, serve: Callable[[Link], None]) -> None:
        self._secret, self._purpose, self._serve = secret, purpose, serve
        self._most = nodes + MAX_STRANGERS
        self._lock = threading.Lock()  # of what follows
        self._links: dict[Link, bool] = {}  # the oldest first, and whether it has proved itself
        self._closed = False
        self._listener = socket.socket()

    def listen(self, address: str, port: int) -> int:
        """Return the port. Raises OSError."""
        self._listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._listener.bind((address, port))
        self._listener.listen(self._most)
        threading.Thread(target=self._accept, daemon=True).start()
        return int(self._listener.getsockname()[1])

    def close(self) -> None:
        with self._lock:
            self._closed = True
            links = list(self._links)
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes the thread that accepts
        for link in links:
            link.end()

    def _accept(self) -> None:
        with self._listener:
            while not self._closed:
                try:
                    link = Link(self._listener.accept()[0], self._secret, self._purpose)
                except OSError:  # it is closed, or too many files are open
                    time.sleep(LONGEST_RETRY)
                    continue
                with self._lock:
                    if len(self._links) >= self._most:
                        for stranger in [one for one, proven in self._links.items() if not proven][:1]:
                            stranger.end()
                            del self._links[stranger]
                    if is_wanted := not self._closed and len(self._links) < self._most:
                        self._links[link] = False
                with contextlib.suppress(RuntimeError):  # too many processes of this user
                    if is_wanted:
                        threading.Thread(target=self._run, args=(link,), daemon=True).start()
                        continue
                self._drop(link)

    def _run(self, link: Link) -> None:
        try:
            link.accept()
            with self._lock:
                if self._closed or link not in self._links:
                    return
                self._links[link] = True
            self._serve(link)
        except (*REFUSED, EOFError):
            pass
        finally:
            self._drop(link)

    def _drop(self, link: Link) -> None:
        with self._lock:
            self._links.pop(link, None)
        link.close()
