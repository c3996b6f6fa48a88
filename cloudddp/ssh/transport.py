"""paramiko's transport as cloudddp uses it: sizes are limited, slow ciphers and key exchanges come last or
are left out, and two defects are avoided that end a connection which other commands share. Independent of
commands and nodes.

1. Data or EOF after CLOSE (https://github.com/paramiko/paramiko/issues/1584 and /1705, open; the fix offered
   in https://github.com/paramiko/paramiko/pull/1131 was not merged). paramiko decides to send (data, EOF, a
   window adjustment) under the channel's lock and sends after releasing it, so its transport thread can
   answer the server's CLOSE, by EOF and CLOSE, in between. RFC 4254, section 5.3 forbids what follows, and
   OpenSSH ends the connection ("Received ieof for nonexistent channel"). Here such a packet is dropped, until
   the server uses the channel's number again.
2. A CLOSE during a key re-exchange (https://github.com/paramiko/paramiko/issues/822, open). paramiko's
   transport thread, which carries the exchange out, also answers CLOSE; then it waits for the end of the
   exchange, and the connection fails after 30 s. paramiko begins an exchange every 512 MiB; here it does so
   as rarely as OpenSSH.
"""

from __future__ import annotations

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
_CONFIRMATION, _WINDOW_ADJUST, _DATA, _EXTENDED_DATA, _EOF, _CLOSE, _FAILURE = 91, 93, 94, 95, 96, 97, 100
_NOT_AFTER_EOF = (_DATA, _EXTENDED_DATA, _EOF)


class BoundedPacketizer(Packetizer):  # type: ignore[misc]  # paramiko has no types
    """paramiko's reader and writer of packets, which accepts a packet of 4 GiB and a first line without an
    end. Here either raises SSHException, which ends the connection. What comes too late is not sent."""

    # The limit of a cipher with blocks of 128 bits (RFC 4344, section 3.2: 2**32 blocks).
    REKEY_BYTES = 1 << 36

    def __init__(self, stream: Stream) -> None:
        super().__init__(stream)
        self._ended: dict[bytes, int] = {}  # channel numbers of the server: EOF or CLOSE, sent last
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

    def read_message(self) -> tuple[int, paramiko.Message]:
        kind, message = super().read_message()
        if kind == _CONFIRMATION:  # of our number for a new channel and the server's
            self._ended.pop(message.asbytes()[4:8], None)
        return kind, message

    def send_message(self, message: paramiko.Message) -> None:
        # paramiko sends one packet of a channel at a time: it holds `clear_to_send_lock`.
        data = message.asbytes()
        kind, number = data[0], data[1:5]
        if _WINDOW_ADJUST <= kind <= _FAILURE:
            ended = self._ended.get(number)
            if ended == _CLOSE or (ended == _EOF and kind in _NOT_AFTER_EOF):
                return
            if kind in (_EOF, _CLOSE):
                self._ended[number] = kind
        super().send_message(message)

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
