"""Limits for what a server may send before paramiko has interpreted it, and for what it makes this side keep.

A compromised node speaks SSH as it likes. paramiko accepts a packet of 4 GiB, a first line without an end, and keeps what it
cannot send for as long as the server does not read.
"""

from __future__ import annotations

from collections.abc import Callable

import paramiko
from paramiko.packet import Packetizer

from cloudddp.ssh import early_close

LONGEST_LINE = 255  # bytes, with its end (RFC 4253, section 4.2); paramiko limits the number of lines to 100
EARLY_PACKET = 35_000  # bytes before the login and of a key exchange: what RFC 4253, section 6.1 asks for
LARGEST_PACKET = 256 << 10  # bytes, as in OpenSSH; channels ask for at most 128 KiB of data per packet
MOST_UNSENT = 8 << 20  # bytes that wait until the server reads

_KEXINIT = 20
_EXCHANGE = range(30, 50)  # the messages of the key exchange methods


class BoundedPacketizer(Packetizer):  # type: ignore[misc]  # paramiko has no types
    """paramiko's reader and writer of packets. It raises SSHException beyond a limit, which ends the connection."""

    fail: Callable[[str], paramiko.SSHException]  # ends the connection, from any thread

    def __init__(self, stream: object) -> None:
        super().__init__(stream)
        self._stream = stream
        self._unended = 0  # bytes since the last end of a line
        self._largest = EARLY_PACKET
        self._line = ""  # the last one, up to the identification

    def raise_limit(self) -> None:
        """Accept packets of every size that SSH allows: the server is the expected one, and the user is logged in."""
        self._largest = LARGEST_PACKET

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
        """Return the error for a connection that has ended: another one if the server has ended it before its identification."""
        if self.closed or self._line.startswith("SSH-"):
            return error
        early: Exception = paramiko.SSHException(early_close.text(self._line))
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
        if n > self._largest:
            raise paramiko.SSHException(
                f"it announced a packet of {n} bytes, and at most {self._largest} are accepted"
            )
        data: bytes = super().read_all(n, check_rekey)
        return data

    def read_message(self) -> tuple[int, paramiko.Message]:
        kind, message = super().read_message()
        # paramiko's work on lists and numbers grows with the square of their length.
        if (kind == _KEXINIT or kind in _EXCHANGE) and len(message.asbytes()) > EARLY_PACKET:
            raise paramiko.SSHException(f"a packet of its key exchange is longer than {EARLY_PACKET} bytes")
        return kind, message

    def write_all(self, out: bytes) -> None:
        if getattr(self._stream, "backlog", 0) + len(out) > MOST_UNSENT:
            raise self.fail(f"it does not read: more than {MOST_UNSENT >> 10} KiB wait to be sent to it")
        try:
            super().write_all(out)
        except EOFError as error:
            raise self._early(error) from None
