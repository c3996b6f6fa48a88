"""Who is at the other end of a loopback connection: loopback is open to every user of the machine.

A node runs commands as the user who started the simulator, so nobody else may make one or log in to one.
"""

from __future__ import annotations

import ipaddress
import os
from collections.abc import Iterator
from pathlib import Path

_TABLES = (Path("/proc/net/tcp"), Path("/proc/net/tcp6"))
_MAPPED = "0000000000000000FFFF0000"  # an IPv4 address as an IPv6 socket shows it


def is_ours(address: str, port: int) -> bool:
    """Whether the socket bound to this loopback address and port belongs to our user, or to root."""
    owners = set(_owners(address, port))
    return bool(owners) and owners <= {0, os.getuid()}


def _owners(address: str, port: int) -> Iterator[int]:
    # The kernel prints the address as one number in the machine's byte order: little-endian where we run.
    number = f"{int.from_bytes(ipaddress.IPv4Address(address).packed, 'little'):08X}"
    wanted = {f"{prefix}{number}:{port:04X}" for prefix in ("", _MAPPED)}
    for table in _TABLES:
        try:
            lines = table.read_text().splitlines()[1:]
        except OSError:
            continue
        for fields in map(str.split, lines):
            # A socket that nobody holds any more (TIME_WAIT) has no inode, and shows root for its owner.
            if fields[1] in wanted and fields[9] != "0":
                yield int(fields[7])
