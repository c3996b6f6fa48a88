"""Injects faults into nodes, and remembers which are in effect."""

from __future__ import annotations

from cloudddp.simulator.api.node_names import BadRequest, Node
from cloudddp.simulator.hosts.host_backend import HostBackend
from cloudddp.simulator.net.router import Router

FAULTS = {
    "kill": "the machine fails; EC2 terminates the instance",
    "cut": "no packet reaches the node or leaves it",
    "cut-between": "no packet gets from one node to the other, or back",
    "cut-from": "no packet of the second node gets to the first one; those of the first get through",
    "freeze": "every process is stopped; connections stay open without a response",
    "fill-disk": "no space is left on the node's disk",
    "slow-ssh": "SSH is limited to 4 kB/s",
    "drop-ssh": "SSH packets are dropped; all others get through",
    "heal": "ends every fault of the node except kill",
}
_ON_ANY_HOST = ("kill", "freeze", "heal")


class FaultInjector:
    def __init__(self, backend: HostBackend) -> None:
        self._backend = backend
        # Instance id -> home of the host that was frozen: after a reboot there is another one.
        self._frozen: dict[str, str] = {}
        self._full: set[str] = set()

    def check(self, kind: object, names: object) -> None:
        """Raise BadRequest for an unknown fault or a wrong number of nodes."""
        if kind not in FAULTS:
            raise BadRequest(f"unknown fault {kind!r}; faults: {', '.join(FAULTS)}")
        count = 2 if kind in ("cut-between", "cut-from") else 1
        if not isinstance(names, list) or len(names) != count:
            raise BadRequest(f"{kind} takes {'two nodes' if count == 2 else 'one node'}")

    def inject(self, kind: str, nodes: list[Node]) -> list[str]:
        """Inject a fault, or heal. Return the faults that were healed. Raises BadRequest."""
        if len({node["instance_id"] for node in nodes}) != len(nodes):
            raise BadRequest("a node cannot be cut off from itself")
        router = self._backend.router
        if kind not in _ON_ANY_HOST and router is None:
            raise BadRequest(f"{kind} needs nodes in the lab; these are process nodes ({self._backend.why})")
        healed = nodes[0]["faults"] if kind == "heal" else []
        try:
            self._inject(kind, nodes, router)
        except ValueError as error:
            raise BadRequest(str(error)) from None
        return list(healed)

    def of_node(self, node: Node, ids: dict[str, str]) -> list[str]:
        """Return the faults in effect on a node, named as they were requested. `ids`: instance ids by
        address."""
        instance_id, address = node["instance_id"], node["private_ip"]
        found = ["freeze"] if self._frozen.get(instance_id) == node["home"] else []
        found += ["fill-disk"] if instance_id in self._full else []
        router = self._backend.router
        if router is None:
            return found
        found += [kind for kind, addresses in _network_faults(router).items() if address in addresses]
        pairs = list(router.faults.cut_pairs)
        others = {other for pair in pairs if address in pair for other in pair - {address}}
        found += [f"cut-from {ids.get(a, a)}" for a, b in sorted(router.faults.cut_from) if b == address]
        return found + [f"cut-between {ids.get(other, other)}" for other in sorted(others)]

    def _inject(self, kind: str, nodes: list[Node], router: Router | None) -> None:
        hosts, instance_id = self._backend.hosts, nodes[0]["instance_id"]
        if kind == "kill":
            hosts.kill(instance_id)
        elif kind == "freeze":
            hosts.freeze(instance_id)
            self._frozen[instance_id] = nodes[0]["home"]
        elif kind == "fill-disk":
            hosts.fill_disk(instance_id)
            self._full.add(instance_id)
        elif kind == "heal":
            self._heal(nodes[0], router)
        elif router is not None:
            addresses = [node["private_ip"] for node in nodes]
            if kind == "cut-between":
                router.faults.cut_pairs.add(frozenset(addresses))
            elif kind == "cut-from":
                router.faults.cut_from.add((addresses[1], addresses[0]))
            else:
                _network_faults(router)[kind].update(addresses)
            router.apply()

    def _heal(self, node: Node, router: Router | None) -> None:
        instance_id = node["instance_id"]
        self._backend.hosts.thaw(instance_id)
        self._frozen.pop(instance_id, None)
        if router is None:
            return
        self._backend.hosts.restore_disk(instance_id)
        self._full.discard(instance_id)
        router.faults.heal(node["private_ip"])
        router.apply()


def _network_faults(router: Router) -> dict[str, set[str]]:
    """Return the addresses that each fault of a single node affects."""
    return {"cut": router.faults.cut, "slow-ssh": router.faults.slow_ssh, "drop-ssh": router.faults.drop_ssh}
