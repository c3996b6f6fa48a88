"""Messages to the kernel's packet filter: packets that wait for a verdict of ours, and the rule that makes
them wait.

Standard library only. Layouts and numbers are from linux/netlink.h, linux/netfilter/nfnetlink_queue.h and
linux/netfilter/nf_tables.h. Functions return or read bytes; a caller sends them on `connect`.
"""

from __future__ import annotations

import os
import socket
import struct
from typing import NamedTuple

DROP, ACCEPT = 0, 1
LOCAL_IN, LOCAL_OUT = 1, 3  # hooks

_NETLINK_NETFILTER = 12
_QUEUE, _NFTABLES = 3, 10  # subsystems
_PACKET, _VERDICT, _CONFIG = (_QUEUE << 8, _QUEUE << 8 | 1, _QUEUE << 8 | 2)
_BATCH_BEGIN, _BATCH_END, _NEW_RULE = 0x10, 0x11, _NFTABLES << 8 | 6
_ERROR = 2
_REQUEST, _ACK, _CREATE_AND_APPEND = 1, 4, 0x400 | 0x800
_NESTED = 0x8000
_COPY_PACKET = 2
_PAYLOAD = 10

_message = struct.Struct("=IHHII")
_attribute = struct.Struct("=HH")
_verdict = struct.Struct(">II")
_packet_head = struct.Struct(">IHB")


class Packet(NamedTuple):
    """A packet that waits for a verdict. `data` starts with its IP header."""

    number: int
    hook: int
    data: bytes


def connect(buffer: int) -> socket.socket:
    """Return a socket to the packet filter of this network namespace. `buffer`: bytes of packets not yet
    read."""
    line = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, _NETLINK_NETFILTER)
    force, ignore_overrun = 33, 5  # SO_RCVBUFFORCE, NETLINK_NO_ENOBUFS
    try:
        line.setsockopt(socket.SOL_SOCKET, force, buffer)
    except PermissionError:  # an ordinary user: as much as the computer's limit allows
        line.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer)
    # SOL_NETLINK; the packets that do not fit are lost, as on a router.
    line.setsockopt(270, ignore_overrun, 1)
    line.bind((0, 0))
    return line


def bind_queue(line: socket.socket, length: int) -> None:
    """Receive every packet of queue 0, of which at most `length` wait. Raises OSError if the kernel has no
    queues."""
    bind = struct.pack(">BxH", 1, 0)
    _request(line, _text(_CONFIG, _attributes((1, bind)), _REQUEST | _ACK))
    copy = struct.pack(">IB", 0xFFFF, _COPY_PACKET)
    _request(line, _text(_CONFIG, _attributes((2, copy), (3, struct.pack(">I", length))), _REQUEST | _ACK))


def queue_all(table: str, chain: str) -> None:
    """Append a rule to a chain of an `ip` table that puts every packet into queue 0. Raises OSError.

    `nft` would write the expression `queue`, which kernels without CONFIG_NFT_QUEUE lack; this one is the
    target NFQUEUE of iptables, as iptables-nft writes it.
    """
    information = struct.pack("=HHH2x", 0, 1, 0)  # xt_NFQ_info_v3: queue 0, of 1; no bypass
    target = _attributes((1, b"NFQUEUE\0"), (2, struct.pack(">I", 3)), (3, information))
    expression = _attributes((1, b"target\0"), (2 | _NESTED, target))
    rule = _attributes(
        (1, table.encode() + b"\0"),
        (2, chain.encode() + b"\0"),
        (4 | _NESTED, _attributes((1 | _NESTED, expression))),
    )
    batch = (
        _text(_BATCH_BEGIN, b"", _REQUEST, resource=_NFTABLES)
        + _text(_NEW_RULE, rule, _REQUEST | _ACK | _CREATE_AND_APPEND, family=socket.AF_INET)
        + _text(_BATCH_END, b"", _REQUEST, resource=_NFTABLES)
    )
    with connect(1 << 16) as line:
        _request(line, batch)


def verdict(number: int, what: int) -> bytes:
    """Return the message that ends the wait of a packet. Several may be sent at once."""
    return _text(_VERDICT, _attributes((2, _verdict.pack(what, number))), _REQUEST)


def read_packet(text: bytes) -> Packet | None:
    """Return the packet of a message, or None for a message of another kind."""
    if _message.unpack_from(text)[1] != _PACKET:
        return None
    number, _, hook = _packet_head.unpack_from(text, 24)  # the kernel writes this attribute first
    at, end = 20, len(text)
    while at < end:
        length, kind = _attribute.unpack_from(text, at)
        if kind == _PAYLOAD:
            return Packet(number, hook, text[at + 4 : at + length])
        at += (length + 3) & ~3
    return Packet(number, hook, b"")


def _request(line: socket.socket, text: bytes) -> None:
    line.send(text)
    while True:
        answer = line.recv(1 << 16)
        if _message.unpack_from(answer)[1] != _ERROR:
            continue  # a packet, which the kernel keeps until the queue is closed
        (code,) = struct.unpack_from("=i", answer, 16)
        if code:
            raise OSError(-code, os.strerror(-code))
        return


def _attributes(*pairs: tuple[int, bytes]) -> bytes:
    return b"".join(
        _attribute.pack(4 + len(value), kind) + value + bytes(-len(value) % 4) for kind, value in pairs
    )


def _text(kind: int, attributes: bytes, flags: int, *, family: int = 0, resource: int = 0) -> bytes:
    body = struct.pack(">BBH", family, 0, resource) + attributes
    return _message.pack(16 + len(body), kind, flags, 0, 0) + body
