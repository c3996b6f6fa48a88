"""paramiko's transport as cloudddp uses it: sizes are limited, slow ciphers and key exchanges come last or
are left out, and two defects are fixed that end a connection which other commands share. Independent of
commands and nodes.

1. Data or EOF after CLOSE (https://github.com/paramiko/paramiko/issues/1584 and /1705, open; the fix offered
   in https://github.com/paramiko/paramiko/pull/1131 was not merged). paramiko decides to send (data, EOF, a
   window adjustment) under the channel's lock and sends after releasing it, so its transport thread can
   answer the server's CLOSE, by EOF and CLOSE, in between. RFC 4254, section 5.3 forbids what follows, and
   OpenSSH ends the connection ("Received ieof for nonexistent channel"). Here every packet of a channel
   carries that channel, and is dropped if it comes too late. The channel number is not enough: sshd reuses it
   for the next channel at once.
2. A CLOSE during a key re-exchange (https://github.com/paramiko/paramiko/issues/822, open). paramiko
   re-exchanges keys every 512 MiB. Its transport thread, which carries the exchange out, also answers CLOSE;
   then it waits for the end of the exchange, and the connection fails after 30 s. With an exchange every 256
   packets, 3 of 149 commands at OpenSSH 9.2 lost the connection without this fix, and 0 of 160 with it. Here
   what that thread sends during an exchange is handed to another thread.
"""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from typing import Any

import paramiko
from paramiko.packet import Packetizer

from cloudddp.config import timing
from cloudddp.ssh.target import Stream, early_close

LONGEST_LINE = 255  # bytes, with its end (RFC 4253, section 4.2); paramiko limits the number of lines to 100
LARGEST_PACKET = 256 << 10  # bytes, as in OpenSSH; channels ask for at most 128 KiB of data per packet

# AES-GCM first: with the AES instructions that every x86-64 and arm64 server has, it is faster than a cipher
# with a separate MAC.
_CIPHERS = ("aes128-gcm@openssh.com", "aes256-gcm@openssh.com")
# In group exchange the server chooses up to 8192 bits: Python computes for a second. The fixed groups are
# slow, too, and every sshd has curve25519.
_SLOW_KEX = "diffie-hellman-"
# SSH_MSG_CHANNEL_...
_DATA, _EXTENDED_DATA, _EOF, _CLOSE = 94, 95, 96, 97
_NOT_AFTER_EOF = (_DATA, _EXTENDED_DATA, _EOF)


class BoundedPacketizer(Packetizer):  # type: ignore[misc]  # paramiko has no types
    """paramiko's reader of packets, which accepts a packet of 4 GiB and a first line without an end. Here
    either raises SSHException, which ends the connection."""

    def __init__(self, stream: Stream) -> None:
        super().__init__(stream)
        self._unended = 0  # bytes since the last end of a line
        self._line = ""  # the last one, up to the identification

    def readline(self, timeout: float) -> str:
        try:
            line: str = super().readline(timeout)
        except (EOFError, ConnectionError) as error:
            raise self._early(error) from None
        if len(line) >= LONGEST_LINE:
            raise paramiko.SSHException(f"a line is longer than {LONGEST_LINE} bytes")
        self._line = line
        return line

    def _early(self, error: Exception) -> Exception:
        """Return the error for a connection that has ended, which may be before the server's
        identification."""
        if self.closed or self._line.startswith("SSH-"):
            return error
        early: Exception = paramiko.SSHException(early_close(self._line))
        return early

    def _read_timeout(self, timeout: float) -> bytes:
        data: bytes = super()._read_timeout(timeout)
        end = data.rfind(b"\n")
        self._unended = len(data) - end - 1 if end >= 0 else self._unended + len(data)
        if self._unended > LONGEST_LINE:
            raise paramiko.SSHException(f"a line is longer than {LONGEST_LINE} bytes")
        return data

    def read_all(self, n: int, check_rekey: bool = False) -> bytes:
        if n < 0:
            raise paramiko.SSHException("it sent a packet of invalid length")
        if n > LARGEST_PACKET:
            raise paramiko.SSHException(
                f"it announced a packet of {n} bytes, and at most {LARGEST_PACKET} are accepted"
            )
        data: bytes = super().read_all(n, check_rekey)
        return data

    def write_all(self, out: bytes) -> None:
        try:
            super().write_all(out)
        except EOFError as error:
            raise self._early(error) from None


def make_transport(stream: Stream, **more: Any) -> paramiko.Transport:
    """Return the transport for a stream: the `transport_factory` of paramiko.SSHClient.connect."""
    transport = paramiko.Transport(stream, packetizer_class=BoundedPacketizer, **more)
    # Seconds for which a key exchange may hold up a sender.
    transport.clear_to_send_timeout = timing.current().dead
    options = transport.get_security_options()
    preferred = [one for one in _CIPHERS if one in options.ciphers]
    options.ciphers = (*preferred, *(one for one in options.ciphers if one not in preferred))
    options.kex = tuple(one for one in options.kex if not one.startswith(_SLOW_KEX))
    return transport


def fix_channels(transport: paramiko.Transport) -> None:
    """Fix every channel that this side opens on the connection from now on."""
    send = transport.packetizer.send_message
    open_channel = transport.open_channel

    def send_unless_late(message: paramiko.Message) -> None:
        # One packet at a time arrives here, in its final order: paramiko holds `clear_to_send_lock`.
        sender: _Sender | None = getattr(message, "sender", None)
        if sender is None or sender.may_send(message):
            send(message)

    def open_fixed(*args: Any, **kwargs: Any) -> paramiko.Channel:
        channel = open_channel(*args, **kwargs)
        channel.transport = _Sender(transport, deferred)
        return channel

    deferred = _DeferredSender(transport)
    transport.packetizer.send_message = send_unless_late
    transport.open_channel = open_fixed


class _Sender:
    """The transport of one channel: marks the packets that the channel sends."""

    def __init__(self, transport: paramiko.Transport, deferred: _DeferredSender) -> None:
        self._transport = transport
        self._deferred = deferred
        self._sent: set[int] = set()  # which of EOF and CLOSE

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def _send_user_message(self, message: paramiko.Message) -> None:
        try:
            self._send(message)
        except (OSError, EOFError, paramiko.SSHException):
            # Closing a channel on a broken connection must not raise: the error would take the place of the
            # one that the user needs.
            if message.asbytes()[0] not in (_EOF, _CLOSE):
                raise

    def _send(self, message: paramiko.Message) -> None:
        message.sender = self
        # Only this thread starts a key exchange, so none can start between this check and the sending.
        is_own_thread = threading.get_ident() == self._transport.ident
        if is_own_thread and not self._transport.clear_to_send.is_set():
            self._deferred.send(message)
        else:
            self._transport._send_user_message(message)

    def may_send(self, message: paramiko.Message) -> bool:
        """Return whether a packet is still allowed on the channel; remembers EOF and CLOSE."""
        kind = message.asbytes()[0]
        if _CLOSE in self._sent or (_EOF in self._sent and kind in _NOT_AFTER_EOF):
            return False
        if kind in (_EOF, _CLOSE):
            self._sent.add(kind)
        return True


class _DeferredSender:
    """Sends, in order, what has to wait for the end of a key exchange."""

    def __init__(self, transport: paramiko.Transport) -> None:
        self._transport = transport
        self._waiting: deque[paramiko.Message] = deque()
        self._lock = threading.Lock()

    def send(self, message: paramiko.Message) -> None:
        self._waiting.append(message)
        threading.Thread(target=self._send_next, daemon=True).start()

    def _send_next(self) -> None:
        # If the connection ends meanwhile, the thread that waits for an answer gets the error.
        with self._lock, contextlib.suppress(OSError, EOFError, paramiko.SSHException):
            self._transport._send_user_message(self._waiting.popleft())
