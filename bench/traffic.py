"""Bytes between the laptop and the nodes, counted in the simulator's network by the packet filter.

Sent bytes are counted before a link delays or loses them, and with what TCP repeats. Packets that the network
card would split count with one header.
"""

from __future__ import annotations

import re
import subprocess

from cloudddp.simulator.net.nftables import LINK_MARK
from cloudddp.simulator.net.policy import LAPTOP

_TABLE = "bench_traffic"


def count() -> None:
    """Begin to count. Call it inside, once per simulator."""
    sent = f'oifname != "lo" ip saddr {LAPTOP} meta mark != {LINK_MARK} counter name sent'
    received = f'iifname != "lo" ip daddr {LAPTOP} counter name received'
    lines = [
        f"table ip {_TABLE} {{",
        "counter sent {\n}",
        "counter received {\n}",
        f"chain sent {{\n type filter hook output priority -400;\n {sent}\n}}",
        f"chain received {{\n type filter hook input priority 300;\n {received}\n}}",
        "}",
    ]
    subprocess.run(["nft", "-f", "-"], input="\n".join(lines), text=True, check=True)


def sent() -> int:
    return _bytes("sent")


def received() -> int:
    return _bytes("received")


def _bytes(name: str) -> int:
    command = ["nft", "list", "counter", "ip", _TABLE, name]
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    (number,) = re.findall(r"bytes (\d+)", text)
    return int(number)
