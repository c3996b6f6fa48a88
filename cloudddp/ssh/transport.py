"""paramiko's transport with limits for a hostile server, and without a thread of its own: it runs in the event loop, with all
other direct connections.

Streams that are not sockets (a jump host's channel, a proxy command) keep paramiko's threads.
"""

from __future__ import annotations

import threading
from collections import ChainMap, deque
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

import paramiko

from cloudddp.config import timing
from cloudddp.ssh.event_loop import Timer, event_loop
from cloudddp.ssh.loop_socket import LoopSocket
from cloudddp.ssh.packets import BoundedPacketizer

if TYPE_CHECKING:
    from cloudddp.ssh.routes.route import Stream

# AES-GCM first: with the AES instructions that every x86-64 and arm64 server has, it is faster than a cipher with a
# separate MAC.
_CIPHERS = ("aes128-gcm@openssh.com", "aes256-gcm@openssh.com")
# In group exchange the server chooses up to 8192 bits: Python computes for a second, and all connections wait. The fixed groups
# are slow, too, and every sshd has curve25519.
_SLOW_KEX = "diffie-hellman-"
_MOST_HELD = 1 << 20  # bytes that wait for the end of a key exchange
_MOST_EXTENSIONS = 64
_LARGEST_WINDOW = 2**32 - 1  # RFC 4254, section 5.2

# SSH_MSG_CHANNEL_...
_WINDOW_ADJUST, _DATA, _EXTENDED_DATA = 93, 94, 95


def _adjust_window(channel: paramiko.Channel, message: paramiko.Message) -> None:
    channel._window_adjust(message)
    if channel.out_window_size > _LARGEST_WINDOW:
        raise paramiko.SSHException("it increased a window beyond its limit")


def _accept_data(channel: paramiko.Channel, message: paramiko.Message) -> None:
    channel._feed(message)
    channel.transport.check_received(channel)


def _accept_extended_data(channel: paramiko.Channel, message: paramiko.Message) -> None:
    channel._feed_extended(message)
    channel.transport.check_received(channel)


class BoundedTransport(paramiko.Transport):  # type: ignore[misc]  # paramiko has no types
    """A transport whose server can use neither memory nor time without limit, nor cause any error but those of paramiko."""

    _channel_handler_table: ClassVar = ChainMap(
        {_WINDOW_ADJUST: _adjust_window, _DATA: _accept_data, _EXTENDED_DATA: _accept_extended_data},
        paramiko.Transport._channel_handler_table,
    )

    saved_exception: Exception | None
    sends_at_once = False  # whether a sender waits neither for the network nor for the end of a key exchange

    def __init__(self, stream: Stream, **more: Any) -> None:
        super().__init__(stream, packetizer_class=BoundedPacketizer, **more)
        self.packetizer.fail = self.fail
        self._failure: Exception | None = None  # why this side has ended the connection
        self._dead = timing.current().dead
        self._exchange = Timer(lambda: None)  # ends a key exchange that takes too long
        self._arrivals = 0  # packets of data

    def fail(self, reason: str) -> paramiko.SSHException:
        """End the connection, from any thread, and return the error for the caller to raise."""
        self._failure = self._failure or paramiko.SSHException(reason)
        self._close_stream()
        return paramiko.SSHException(reason)

    def _close_stream(self) -> None:
        # Closing a jump host's channel may wait, and this may be the loop's thread.
        threading.Thread(target=self.packetizer.close, daemon=True).start()

    def get_exception(self) -> Exception | None:
        """Return why the connection has ended, to everyone who asks; or once, why a login or a channel was refused."""
        with self.lock:
            error: Exception | None = self._failure or self.saved_exception
            if isinstance(error, (paramiko.AuthenticationException, paramiko.ChannelException)):
                self.saved_exception = None
        is_expected = error is None or isinstance(error, (OSError, EOFError, paramiko.SSHException))
        return (
            error
            if is_expected
            else paramiko.SSHException(f"it sent an invalid packet ({type(error).__name__})")
        )

    def run(self) -> None:
        try:
            super().run()
        finally:
            self._exchange.cancel()

    def check_received(self, channel: paramiko.Channel) -> None:
        """Count a packet of data. Raises SSHException if more is buffered than the channel's window allows."""
        self._arrivals += 1
        if len(channel.in_buffer) + len(channel.in_stderr_buffer) > channel.in_window_size:
            raise paramiko.SSHException("it sent more than the window of a channel allows")

    # -- key exchange ----------------------------------------------------------------------------------------------

    def _send_kex_init(self) -> None:
        super()._send_kex_init()
        self._limit_exchange()

    def _limit_exchange(self) -> None:
        self._exchange.cancel()
        self._exchange = event_loop().call_later(self._dead, partial(self._end_exchange, self._arrivals))

    def _end_exchange(self, arrivals: int) -> None:
        if not self.active:
            return
        if self._arrivals > arrivals:  # a slow link; the windows limit what may still be on its way
            self._limit_exchange()
        else:
            self.fail(f"its key exchange did not end within {self._dead:g} s")

    def _parse_newkeys(self, message: paramiko.Message) -> None:
        self._exchange.cancel()
        super()._parse_newkeys(message)

    # -- messages of the server ------------------------------------------------------------------------------------

    def _auth_trigger(self) -> None:
        super()._auth_trigger()
        self.packetizer.raise_limit()

    def _parse_ext_info(self, message: paramiko.Message) -> None:
        # paramiko believes the number: 4 billion turns for a packet of 5 bytes.
        if message.get_int() > _MOST_EXTENSIONS:
            raise paramiko.SSHException("it announced too many extensions")
        message.rewind()
        super()._parse_ext_info(message)


class LoopTransport(BoundedTransport):
    """A transport whose `run`, which paramiko starts as a thread, is a greenlet of the event loop."""

    sends_at_once = True

    def __init__(self, stream: LoopSocket, **more: Any) -> None:
        super().__init__(stream, **more)
        self._loop = stream.loop
        self._is_started, self._ended = False, threading.Event()
        self._held: deque[paramiko.Message] = deque()  # until a key exchange has ended
        self._held_size = 0
        # paramiko starts a thread per connection for this limit.
        self.packetizer.start_handshake = self._limit_handshake

    def _limit_handshake(self, seconds: float) -> None:
        def expire() -> None:
            if not self.initial_kex_done:
                self.packetizer.close()

        self._loop.call_later(seconds, expire)

    def _close_stream(self) -> None:
        self.packetizer.close()

    def _send_user_message(self, data: paramiko.Message) -> None:
        """Send a message, after a key exchange that is in progress.

        paramiko waits up to 30 s for its end, in a thread that other connections need: a node may begin one and fall silent.
        """
        with self.clear_to_send_lock:
            if not self.active:
                return
            if self.clear_to_send.is_set() and not self._held:
                self._send_message(data)
                return
            self._held_size += len(data.asbytes())
            if self._held_size > _MOST_HELD:
                raise self.fail("it does not end a key exchange")
            self._held.append(data)

    def _parse_newkeys(self, message: paramiko.Message) -> None:
        super()._parse_newkeys(message)
        with self.clear_to_send_lock:
            while self._held:
                self._send_message(self._held.popleft())
            self._held_size = 0

    def start(self) -> None:
        self._is_started = True
        self._loop.spawn(self._run_to_end)

    def _run_to_end(self) -> None:
        try:
            self.run()
        except Exception as error:  # in paramiko's own handling of an error, before those who wait were woken
            self.saved_exception = error
            self.active = False
            self.packetizer.close()
            for event in list(self.channel_events.values()):
                event.set()
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
    kind = LoopTransport if isinstance(stream, LoopSocket) else BoundedTransport
    transport = kind(stream, **more)
    options = transport.get_security_options()
    preferred = [one for one in _CIPHERS if one in options.ciphers]
    options.ciphers = (*preferred, *(one for one in options.ciphers if one not in preferred))
    options.kex = tuple(one for one in options.kex if not one.startswith(_SLOW_KEX))
    return transport
