"""Which user owns the other end of a loopback connection: every user of the computer can open one.

A node runs commands as the user who started the simulator, so other users may neither launch nor log in to one.
"""

from __future__ import annotations

import contextlib
import ipaddress
import os
import threading
from collections.abc import Iterator
from pathlib import Path

Address = tuple[str, int]  # IPv4 address, port

_MAPPED = "0000000000000000FFFF0000"  # prefix of an IPv4-mapped address in /proc/net/tcp6


class SocketOwners:
    """The connection tables of the network namespace that this process is in now, also after it has left it."""

    def __init__(self) -> None:
        self._user = (
            os.getuid()
        )  # the tables show uids as seen from the user namespace in which they are opened
        self._lock = threading.Lock()
        self._tables = []
        for name in ("tcp", "tcp6"):
            with contextlib.suppress(OSError):  # no IPv6 on this computer
                self._tables.append(Path(f"/proc/self/net/{name}").open())  # noqa: SIM115  stays open

    def is_own(self, peer: Address, *, server: Address) -> bool:
        """Return whether `peer` of a loopback connection to `server` belongs to this user or to root."""
        owners = list(self._owners(peer, server))
        return bool(owners) and set(owners) <= {0, self._user}

    def _owners(self, peer: Address, server: Address) -> Iterator[int]:
        for table in self._tables:
            with self._lock:
                table.seek(0)
                text = table.read()
            for prefix in ("", _MAPPED):
                # Not line by line: a busy computer has thousands of lines, and every connection is looked up.
                pattern = f": {_hexadecimal(peer, prefix)} {_hexadecimal(server, prefix)} "
                at = text.find(pattern)
                while at >= 0:
                    fields = text[at : text.index("\n", at)].split()
                    # A socket in TIME_WAIT belongs to no process; it has no inode, and root as its owner.
                    if fields[9] != "0":
                        yield int(fields[7])
                    at = text.find(pattern, at + 1)


def _hexadecimal(address: Address, prefix: str) -> str:
    # The kernel prints the address as a number in the byte order of the machine: little-endian where this runs.
    number = int.from_bytes(ipaddress.IPv4Address(address[0]).packed, "little")
    return f"{prefix}{number:08X}:{address[1]:04X}"
