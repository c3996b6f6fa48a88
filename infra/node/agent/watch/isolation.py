"""Notices that each node of a job trains alone: no process of its ranks is connected to another node.

torch.distributed keeps a connection to the store on the first node from its initialization on. A script that
starts its own ranks on each node (mp.spawn with MASTER_ADDR=localhost), sets RANK and WORLD_SIZE itself or
never initializes torch.distributed has none, and succeeds: on each node the whole training is done again.
"""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Collection, Iterable, Iterator
from typing import Callable

from agent.node import processes
from cloudddp.agent.protocol.phases import Peer

INTERVAL = 5.0  # seconds between two looks
_ESTABLISHED = "01"
_MAPPED = "0000000000000000FFFF0000"  # prefix of an IPv4-mapped address in /proc/net/tcp6


class IsolationWatch:
    """Looks for `seconds` whether the ranks of a node connect to another node; with 0 not at all."""

    def __init__(self, node: int, peers: Collection[Peer], seconds: float) -> None:
        own = {peer.address for peer in peers if peer.node == node}
        self._node, self._seconds = node, seconds
        self._others = {peer.address for peer in peers} - own
        # The store is on the first node: its ranks may have no connection to another one.
        self._applies = bool(seconds and self._others) and node != min(peer.node for peer in peers)
        self._ends_at = time.monotonic() + seconds
        self._next = 0.0

    def found(self, running: Callable[[], Collection[int]]) -> str:
        """Look at the processes of ranks from time to time; return once that none is connected, else ''."""
        now = time.monotonic()
        if not self._applies or now < self._next:
            return ""
        self._next = min(now + INTERVAL, max(self._ends_at, now))
        ranks = running()
        if not ranks or _are_connected(ranks, self._others):
            self._applies = not ranks
            return ""
        self._applies = now < self._ends_at
        if self._applies:
            return ""
        return (
            f"node {self._node}: no rank has connected to another node for {self._seconds:.0f} s. "
            "If the ranks are training, each node trains alone. Call torch.distributed.init_process_group() "
            "with RANK, WORLD_SIZE and MASTER_ADDR from the environment, and start no ranks in the script"
        )


def _are_connected(ranks: Iterable[int], addresses: Collection[str]) -> bool:
    sockets: set[str] = set()
    for rank in ranks:
        with contextlib.suppress(OSError):
            sockets.update(_to(rank, addresses))
            for pid in processes.tree(rank):
                if not sockets.isdisjoint(_sockets(pid)):
                    return True
    return False


def _to(pid: int, addresses: Collection[str]) -> Iterator[str]:
    """Yield the inodes of the connections to these addresses in the network of a process."""
    known = {socket.inet_aton(address)[::-1].hex().upper() for address in addresses}
    known |= {_MAPPED + one for one in known}
    for table in ("tcp", "tcp6"):
        with contextlib.suppress(OSError), open(f"/proc/{pid}/net/{table}", encoding="ascii") as file:
            for line in file:
                words = line.split()
                if words[3] == _ESTABLISHED and words[2].partition(":")[0] in known:
                    yield words[9]


def _sockets(pid: int) -> Iterator[str]:
    with contextlib.suppress(OSError):
        for name in os.listdir(f"/proc/{pid}/fd"):
            with contextlib.suppress(OSError):
                target = os.readlink(f"/proc/{pid}/fd/{name}")
                if target.startswith("socket:["):
                    yield target[8:-1]
