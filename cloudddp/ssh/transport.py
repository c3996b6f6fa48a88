"""paramiko's transport without a thread of its own: it runs in the event loop, with all other direct connections.

Streams that are not sockets (a jump host's channel, a proxy command) keep paramiko's threads.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import paramiko

from cloudddp.ssh.event_loop import LoopSocket

if TYPE_CHECKING:
    from cloudddp.ssh.routes.route import Stream

# AES-GCM first: with the AES instructions that every x86-64 and arm64 server has, it is faster than a cipher with a separate MAC.
_CIPHERS = ("aes128-gcm@openssh.com", "aes256-gcm@openssh.com")


class LoopTransport(paramiko.Transport):  # type: ignore[misc]  # paramiko has no types
    """A transport whose `run`, which paramiko starts as a thread, is a greenlet of the event loop."""

    def __init__(self, stream: LoopSocket, **more: Any) -> None:
        super().__init__(stream, **more)
        self._loop = stream.loop
        self._is_started, self._ended = False, threading.Event()
        # paramiko starts a thread per connection for this limit.
        self.packetizer.start_handshake = self._limit_handshake

    def _limit_handshake(self, seconds: float) -> None:
        def expire() -> None:
            if not self.initial_kex_done:
                self.packetizer.close()

        self._loop.call_later(seconds, expire)

    def _send_user_message(self, data: paramiko.Message) -> None:
        """Drop a keepalive during a key exchange: paramiko would wait up to 30 s for its end, in the thread that every connection
        needs, and a node may begin an exchange and fall silent."""
        if self._loop.is_current and not self.clear_to_send.is_set():
            return
        super()._send_user_message(data)

    def start(self) -> None:
        self._is_started = True
        self._loop.spawn(self._run_to_end)

    def _run_to_end(self) -> None:
        try:
            self.run()
        finally:
            self._ended.set()

    def is_alive(self) -> bool:
        return self._is_started and not self._ended.is_set()

    def join(self, timeout: float | None = None) -> None:
        if not self._loop.is_current:
            self._ended.wait(timeout)

    @property
    def ident(self) -> int | None:
        return self._loop.ident


def make_transport(stream: Stream, **more: Any) -> paramiko.Transport:
    """Return the transport for a stream: the `transport_factory` of paramiko.SSHClient.connect."""
    kind = LoopTransport if isinstance(stream, LoopSocket) else paramiko.Transport
    transport: paramiko.Transport = kind(stream, **more)
    options = transport.get_security_options()
    preferred = [one for one in _CIPHERS if one in options.ciphers]
    options.ciphers = (*preferred, *(one for one in options.ciphers if one not in preferred))
    return transport
