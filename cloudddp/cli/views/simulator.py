"""The simulator and its nodes, as text and as JSON."""

from __future__ import annotations

from typing import Any

from cloudddp.formats import table
from cloudddp.simulator.control import Simulator

HEADER = ("CLUSTER", "NODE", "INSTANCE", "STATE", "PRIVATE", "PUBLIC", "PROCESSES", "DEADLINE", "FAULTS")
SPARE = ("PROCESSES", "PRIVATE", "DEADLINE", "PUBLIC", "STATE")  # left out in this order on a narrow terminal
FAULTS = {"freeze": "frozen", "fill-disk": "disk full", "slow-ssh": "slow ssh", "drop-ssh": "no ssh"}

Node = dict[str, Any]


def simulator(found: Simulator, nodes: list[Node]) -> str:
    head = f"simulator at {found.endpoint}, region {found.region}, pid {found.pid}; {kind(found)}"
    head += "".join(f"\ncalls are limited by {text}" for text in policies(found))
    rows = [_row(node, nodes) for node in nodes]
    return "\n".join([head, table(HEADER, rows, elastic=("FAULTS",), spare=SPARE)]) if nodes else head


def simulator_json(found: Simulator, nodes: list[Node]) -> dict[str, Any]:
    about = {"endpoint": found.endpoint, "region": found.region, "pid": found.pid, "kind": found.nodes}
    return {**about, "why": found.why, "policies": dict(found.policies), "nodes": nodes}


def policies(found: Simulator) -> list[str]:
    """Return the policies that limit calls, as options of `sim start`."""
    return [f"--{name} {description}" for name, description in found.policies.items()]


def kind(found: Simulator) -> str:
    if found.nodes == "namespace":
        return "nodes are separate hosts (namespaces)"
    if found.nodes == "machine":
        return "nodes are machines (Debian 13 in systemd-nspawn) without GPUs: use `up --allow-cpu`"
    return f"nodes are processes of this computer ({found.why})"


def _row(node: Node, nodes: list[Node]) -> tuple[str, ...]:
    rank = "-" if node["rank"] is None else str(node["rank"])
    names = (str(node[key] or "-") for key in ("instance_id", "state", "private_ip", "public_ip"))
    faults = [_fault(fault, node, nodes) for fault in node["faults"]]
    faults += [f"interrupted at {node['interruption']}"] if node["interruption"] else []
    more = (str(len(node["processes"])), node["deadline"] or "-", ", ".join(faults) or "-")
    return (node["cluster"] or "-", rank, *names, *more)


def _fault(fault: str, node: Node, nodes: list[Node]) -> str:
    """Return a fault as the table shows it; another node of the same cluster is named by its rank."""
    name, _, other = fault.partition(" ")
    if not other:
        return FAULTS.get(name, name)
    same = [n["rank"] for n in nodes if n["instance_id"] == other and n["cluster"] == node["cluster"]]
    return f"cut from {other if not same or same[0] is None else f'node {same[0]}'}"
