"""Who is at the other end of a loopback connection: loopback is open to every user of the machine.

A node runs commands as the user who started the simulator, so nobody else may make one or log in to one.
"""

from __future__ import annotations

import contextlib
import ipaddress
import os
import threading
from collections.abc import Iterator
from pathlib import Path

Socket = tuple[str, int]  # IPv4 address, port

_MAPPED = "0000000000000000FFFF0000"  # an IPv4 address as an IPv6 socket shows it


class Network:
    """The connections of the network that this process is on now, also after it has moved to another one."""

    def __init__(self) -> None:
        self._us = os.getuid()  # as a table shows us, which is decided when it is opened
        self._lock = threading.Lock()
        self._tables = []
        for name in ("tcp", "tcp6"):
            with contextlib.suppress(OSError):  # a machine without IPv6
                self._tables.append(Path(f"/proc/self/net/{name}").open())  # noqa: SIM115  kept

    def is_ours(self, peer: Socket, *, door: Socket) -> bool:
        """Whether the connection from `peer` to `door`, both loopback, is held by our user or by root."""
        owners = list(self._owners(peer, door))
        return bool(owners) and set(owners) <= {0, self._us}

    def _owners(self, peer: Socket, door: Socket) -> Iterator[int]:
        for table in self._tables:
            with self._lock:
                table.seek(0)
                text = table.read()
            for form in ("", _MAPPED):
                # Not line by line: a busy computer has thousands, and this is asked for every connection.
                place = f": {_shown(peer, form)} {_shown(door, form)} "
                at = text.find(place)
                while at >= 0:
                    fields = text[at : text.index("\n", at)].split()
                    # A socket that nobody holds any more (TIME_WAIT) has no inode, and shows root for its owner.
                    if fields[9] != "0":
                        yield int(fields[7])
                    at = text.find(place, at + 1)


def _shown(socket: Socket, form: str) -> str:
    # The kernel prints the address as one number in the machine's byte order: little-endian where we run.
    number = int.from_bytes(ipaddress.IPv4Address(socket[0]).packed, "little")
    return f"{form}{number:08X}:{socket[1]:04X}"
