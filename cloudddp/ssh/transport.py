"""paramiko's transport, with sizes that are limited and the ciphers and key exchanges that are fast."""

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
