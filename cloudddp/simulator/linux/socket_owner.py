"""Which user owns the other end of a loopback connection: every user of the computer can open one.

A node runs commands as the user who started the simulator, so other users may neither launch nor log in to
one.
"""

from __future__ import annotations

import contextlib
import ipaddress
import os
import socket
import struct
import threading
from collections.abc import Iterator
from pathlib import Path

Address = tuple[str, int]  # IPv4 address, port

_MAPPED = "0000000000000000FFFF0000"  # prefix of an IPv4-mapped address in /proc/net/tcp6

# Netlink, sock_diag(7): nlmsghdr; inet_diag_req_v2 and inet_diag_msg around an inet_diag_sockid.
_NETLINK_SOCK_DIAG, _SOCK_DIAG_BY_FAMILY, _NLM_F_REQUEST = 4, 20, 1
_HEADER = struct.Struct("=IHHII")  # length, type, flags, sequence number, port
_REQUEST = struct.Struct("=BBBxI")  # family, protocol, extensions, states
_SOCKET = struct.Struct("!HH4s12x4s12xI8s")  # ports, addresses, interface, cookie
_REPLY = struct.Struct("=BBBB48sIIIII")  # family, state, -, -, socket, -, -, -, uid, inode
_ANY_STATE, _ANY_COOKIE, _LISTEN = 0xFFFFFFFF, b"\xff" * 8, 10
_SECONDS = 5.0  # a hang guard: the kernel replies at once


class SocketOwners:
    """The connections of the network namespace that this process is in now, also after it has left it.

    A connection is looked up through netlink. The tables in /proc are read only where that finds nothing (a
    kernel without inet_diag replies as for a socket that does not exist): the kernel walks all of its hash
    table for each read, which takes milliseconds.
    """

    def __init__(self) -> None:
        # Both show uids as seen from the user namespace in which they are opened.
        self._user = os.getuid()
        self._lock = threading.Lock()
        self._sequence = 0
        self._netlink: socket.socket | None = None
        with contextlib.suppress(OSError):
            self._netlink = socket.socket(socket.AF_NETLINK, socket.SOCK_DGRAM, _NETLINK_SOCK_DIAG)
            self._netlink.settimeout(_SECONDS)
        self._tables = []
        for name in ("tcp", "tcp6"):
            with contextlib.suppress(OSError):  # no IPv6 on this computer
                self._tables.append(Path(f"/proc/self/net/{name}").open())  # noqa: SIM115  stays open

    def is_own(self, peer: Address, *, server: Address) -> bool:
        """Return whether `peer` of a loopback connection to `server` belongs to this user or to root."""
        owner = self.ask_kernel(peer, server)
        owners = [owner] if owner is not None else list(self.search_tables(peer, server))
        return bool(owners) and set(owners) <= {0, self._user}

    def ask_kernel(self, peer: Address, server: Address) -> int | None:
        """Return the uid of the socket that is connected from `peer` to `server`; None if netlink does not
        find one."""
        if self._netlink is None:
            return None
        wanted = _SOCKET.pack(peer[1], server[1], _packed(peer), _packed(server), 0, _ANY_COOKIE)
        body = _REQUEST.pack(socket.AF_INET, socket.IPPROTO_TCP, 0, _ANY_STATE) + wanted
        try:
            reply = self._exchange(self._netlink, body)
        except OSError:
            return None
        if len(reply) < _HEADER.size + _REPLY.size or _HEADER.unpack_from(reply)[1] != _SOCK_DIAG_BY_FAMILY:
            return None  # an error: no such socket
        _, state, _, _, found, _, _, _, uid, inode = _REPLY.unpack_from(reply, _HEADER.size)
        # Without a connected socket the kernel replies with one that listens on the peer's port.
        same = _SOCKET.unpack(found)[:2] == (peer[1], server[1])
        return int(uid) if same and state != _LISTEN and inode else None

    def _exchange(self, netlink: socket.socket, body: bytes) -> bytes:
        """Send a request; return the reply with its sequence number, not a late one to an earlier request."""
        with self._lock:
            self._sequence += 1
            size = _HEADER.size + len(body)
            netlink.send(
                _HEADER.pack(size, _SOCK_DIAG_BY_FAMILY, _NLM_F_REQUEST, self._sequence & 0xFFFFFFFF, 0)
                + body
            )
            while True:
                reply = netlink.recv(4096)
                if _HEADER.unpack_from(reply)[3] == self._sequence & 0xFFFFFFFF:
                    return reply

    def search_tables(self, peer: Address, server: Address) -> Iterator[int]:
        """Yield the same, of every matching line in /proc/net/tcp and tcp6."""
        for table in self._tables:
            with self._lock:
                table.seek(0)
                text = table.read()
            for prefix in ("", _MAPPED):
                # Not line by line: a busy computer has thousands of lines.
                pattern = f": {_hexadecimal(peer, prefix)} {_hexadecimal(server, prefix)} "
                at = text.find(pattern)
                while at >= 0:
                    fields = text[at : text.index("\n", at)].split()
                    # A socket in TIME_WAIT belongs to no process; it has no inode, and root as its owner.
                    if fields[9] != "0":
                        yield int(fields[7])
                    at = text.find(pattern, at + 1)


def _packed(address: Address) -> bytes:
    return ipaddress.IPv4Address(address[0]).packed


def _hexadecimal(address: Address, prefix: str) -> str:
    # The kernel prints the address as a number in the byte order of the machine: little-endian where this
    # runs.
    number = int.from_bytes(_packed(address), "little")
    return f"{prefix}{number:08X}:{address[1]:04X}"
