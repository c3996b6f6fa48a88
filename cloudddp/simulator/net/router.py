"""The network between the simulated hosts: a veth pair per node, routes, public addresses and the firewall.

One network namespace is the laptop and everything between the nodes, with no route out of it. Each node is
attached by a veth pair of its own and reaches the others through here only, so one nftables table processes
every packet. Needs `ip` and `nft`, and root in the namespace. Independent of moto and of the implementation
of nodes.
"""

from __future__ import annotations

import subprocess
import threading
from pathlib import Path

from cloudddp.simulator.net.link import WideAreaLink
from cloudddp.simulator.net.nftables import METADATA, nft, ruleset
from cloudddp.simulator.net.policy import LAPTOP, PUBLIC, S3, Faults, Policy

MTU = 9001  # as inside a VPC
_BLACKHOLE = "void0"  # an interface whose packets vanish
_NO_ROUTE_TABLE = 7
_ROUTER_MAC = "02:00:5e:00:00:01"


class Router:
    """The network of one lab. Call `set_up` first, in the lab's namespace. Safe to use from any thread in
    it."""

    def __init__(self) -> None:
        self.faults = Faults()
        self.link = WideAreaLink()
        self._policy = Policy()
        self._lock = threading.Lock()
        self._numbers = iter(range(1, 1 << 20))
        self._links: dict[str, str] = {}  # private address -> the lab's end of the veth pair

    def set_up(self) -> None:
        """Give the laptop its address, and make packets of nodes to unknown addresses vanish, as on the
        internet.

        The laptop itself gets an error at once for an address without a route; otherwise its programs would
        wait for a timeout whenever they try the internet.
        """
        settings = Path("/proc/sys/net/ipv4")
        (settings / "ip_forward").write_text("1")
        for interfaces in ("all", "default"):
            # EC2's source check: a packet must come from the address that is routed to its interface.
            (settings / "conf" / interfaces / "rp_filter").write_text("1")
        _ip(
            "link set lo up",
            f"addr add {LAPTOP}/32 dev lo",
            f"addr add {METADATA}/32 dev lo",
            f"addr add {S3}/32 dev lo",
            f"link add {_BLACKHOLE} type veth peer name void1",
            f"link set {_BLACKHOLE} arp off up",
            "link set void1 up",
            f"route add {PUBLIC} dev {_BLACKHOLE} src {LAPTOP}",
            f"route add default dev {_BLACKHOLE} table {_NO_ROUTE_TABLE}",
            # After the main table, and only for forwarded packets: iif lo means sent from here.
            f"rule add pref 40000 not iif lo lookup {_NO_ROUTE_TABLE}",
        )
        self.apply(self._policy)

    def attach(self, pid: int, *, interface: str, private: str, mac: str) -> None:
        """Connect the network namespace of `pid`, where the link appears as `interface`. Raises OSError."""
        with self._lock:
            link = f"n{next(self._numbers)}"
            self._links[private] = link
        _ip(
            f"link add {link} address {_ROUTER_MAC} mtu {MTU} type veth "
            f"peer name {interface} address {mac} mtu {MTU} netns {pid}",
            f"link set {link} up",
            f"neigh replace {private} lladdr {mac} dev {link} nud permanent",
            f"route replace {private}/32 dev {link} src {LAPTOP}",
        )

    def detach(self, private: str, *, heal: bool = False) -> None:
        """Disconnect a node; packets to its address vanish from now on.

        Faults stay in effect for the node that is attached with that address next, unless `heal`: then the
        address is free for another node.
        """
        with self._lock:
            link = self._links.pop(private, None)
            healed = heal and self.faults.affects(private)
            if healed:
                self.faults.heal(private)
        if link is not None:
            # With no route at all, the network would report the node as unreachable to every peer at once.
            blackhole = f"route replace {private}/32 dev {_BLACKHOLE} src {LAPTOP}"
            commands = f"{blackhole}\nlink del {link}\n"
            subprocess.run(["ip", "-batch", "-"], input=commands.encode(), capture_output=True, check=False)
        if healed:
            self.apply()

    def apply(self, policy: Policy | None = None) -> None:
        """Replace the firewall rules, for a new policy or after a change of `faults`.

        Raises OSError, with the old rules still in effect, if nft rejects the new ones.
        """
        with self._lock:
            new = policy or self._policy
            nft(ruleset(new, self.faults))
            self._policy = new


def node_commands(*, interface: str, private: str, prefix_length: int, gateway: str) -> list[str]:
    """Return the `ip` commands for inside a node: its address, and a default route through the gateway."""
    return [
        "link set lo up",
        f"addr add {private}/{prefix_length} dev {interface} noprefixroute",
        f"link set {interface} mtu {MTU} up",
        f"neigh replace {gateway} lladdr {_ROUTER_MAC} dev {interface} nud permanent",
        f"route add {gateway} dev {interface} scope link",
        f"route add default via {gateway} dev {interface} src {private}",
    ]


def _ip(*commands: str) -> None:
    done = subprocess.run(
        ["ip", "-batch", "-"], input="\n".join(commands), text=True, capture_output=True, check=False
    )
    if done.returncode:
        raise OSError(f"ip: {done.stderr.strip()}")
