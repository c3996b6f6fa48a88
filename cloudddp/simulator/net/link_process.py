"""The process of the wide-area link: delays, limits and drops the packets between the laptop and the nodes.

    python -m cloudddp.simulator.net.link_process

It runs in the lab's network and receives the packets from queue 0 of the packet filter. Each line of its
stdin is the JSON of a Link, and is answered with an empty line on stdout when it is in effect; it ends with
its stdin.

A packet of the laptop is taken out of the kernel and sent when it is due: one that stays in the kernel's
queue still belongs to the socket that sent it, and TCP keeps about a millisecond of data outside the socket,
which would then be all that is ever in flight. A packet of a node belongs to no socket any more, and waits in
the kernel.
"""

from __future__ import annotations

import json
import os
import random
import select
import socket
import sys
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from cloudddp.simulator.conditions.model import Link
from cloudddp.simulator.linux import netlink
from cloudddp.simulator.net.nftables import LINK_MARK

_SMALLEST_BUFFER = 256 << 10  # bytes, of the router at the narrow end of the link
_DELAYED_BYTES = 64 << 20  # under way at most, where no bandwidth limits them
_PACKETS = 1 << 16  # that wait in the kernel at most
_RECEIVE_BUFFER = 32 << 20
_AT_ONCE = 256  # packets read before the due ones are sent
_TICK = 0.0005  # seconds: packets that are due within one are sent together, late rather than early


@dataclass(slots=True)
class Direction:
    """One direction of the link: a queue in front of the narrow end, and the way from there.

    `send` gets the packets in order; `drop` those that are lost.
    """

    send: Callable[[netlink.Packet], None]
    drop: Callable[[netlink.Packet], None]
    link: Link = field(default_factory=Link)
    _under_way: deque[tuple[float, netlink.Packet]] = field(default_factory=deque)
    _bytes: int = 0
    _free_at: float = 0.0  # when the narrow end has sent what is queued

    def put(self, packet: netlink.Packet, now: float) -> None:
        """Send the packet when it is due, or drop it: by chance, or because the queue is full."""
        link, size = self.link, len(packet.data)
        if link.loss and random.random() * 100 < link.loss:  # noqa: S311  not a secret
            self.drop(packet)
            return
        due = now
        if link.mbit:
            rate = link.mbit * 125_000  # bytes per second
            starts = max(now, self._free_at)
            if (starts - now) * rate + size > max(rate * link.latency, _SMALLEST_BUFFER):
                self.drop(packet)
                return
            due = self._free_at = starts + size / rate
        elif self._bytes + size > _DELAYED_BYTES:
            self.drop(packet)
            return
        self._under_way.append((due + link.latency / 2, packet))
        self._bytes += size

    def send_due(self, now: float) -> None:
        under_way = self._under_way
        while under_way and under_way[0][0] <= now:
            _, packet = under_way.popleft()
            self._bytes -= len(packet.data)
            self.send(packet)

    @property
    def next_due(self) -> float | None:
        return self._under_way[0][0] if self._under_way else None


class Shaper:
    """Both directions, between the packet filter and a raw socket."""

    def __init__(self) -> None:
        self.line = netlink.connect(_RECEIVE_BUFFER)
        netlink.bind_queue(self.line, _PACKETS)
        self.line.setblocking(False)
        self._verdicts: list[bytes] = []
        self._raw = socket.socket(socket.AF_INET, socket.SOCK_RAW, socket.IPPROTO_RAW)
        self._raw.setsockopt(socket.SOL_SOCKET, socket.SO_MARK, LINK_MARK)  # not queued again
        self._to_nodes = Direction(self._send, lambda _: None)
        self._to_laptop = Direction(self._accept, self._drop)
        self._directions = (self._to_nodes, self._to_laptop)

    def use(self, link: Link) -> None:
        for direction in self._directions:
            direction.link = link

    def wait(self) -> float | None:
        """Return the seconds until something is due; None if nothing is."""
        due = [one.next_due for one in self._directions if one.next_due is not None]
        return max(min(due) - time.monotonic(), _TICK) if due else None

    def work(self) -> None:
        """Take what the kernel has queued, and send what is due."""
        now = time.monotonic()
        for _ in range(_AT_ONCE):
            try:
                packet = netlink.read_packet(self.line.recv(1 << 17))
            except BlockingIOError:
                break
            if packet is None:
                continue
            if packet.hook == netlink.LOCAL_OUT:
                self._drop(packet)  # in the kernel; our copy goes on
                self._to_nodes.put(packet, now)
            else:
                self._to_laptop.put(packet, now)
        for direction in self._directions:
            direction.send_due(now)
        if self._verdicts:
            self.line.send(b"".join(self._verdicts))
            self._verdicts.clear()

    def _send(self, packet: netlink.Packet) -> None:
        destination = socket.inet_ntoa(packet.data[16:20])
        try:
            self._raw.sendto(packet.data, (destination, 0))
        except OSError:  # the firewall or a fault drops it, or the node has gone: as lost as any other packet
            pass

    def _accept(self, packet: netlink.Packet) -> None:
        self._verdicts.append(netlink.verdict(packet.number, netlink.ACCEPT))

    def _drop(self, packet: netlink.Packet) -> None:
        self._verdicts.append(netlink.verdict(packet.number, netlink.DROP))


def main() -> int:
    """Run until stdin ends. Prints why if the kernel lacks what is needed, and returns 1."""
    try:
        shaper = Shaper()
    except OSError as error:
        print(f"this kernel gives no packets to programs (nfnetlink_queue): {error.strerror}", flush=True)
        return 1
    settings = sys.stdin.fileno()
    pending = b""
    while True:
        readable, _, _ = select.select([shaper.line, settings], [], [], shaper.wait())
        if settings in readable:
            text = os.read(settings, 1 << 12)
            if not text:
                return 0
            *lines, pending = (pending + text).split(b"\n")
            for one in lines:
                shaper.use(Link(**json.loads(one)))
                print(flush=True)
        shaper.work()


if __name__ == "__main__":
    sys.exit(main())
