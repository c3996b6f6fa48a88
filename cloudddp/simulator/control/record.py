"""The record of a running simulator, which its server writes to `sim/sim.json` below the home folder."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

from cloudddp.simulator.linux import private_files, processes

TIMING = {"pending": 0.0, "booting": 0.0, "shutting-down": 0.0, "unknown": 0.0, "visible": 3600.0}
"""Default times in seconds that EC2 takes; see hosts.lifecycle.Timing."""

INTERFACE = "ens5"  # default name of a node's network interface


@dataclass(frozen=True, slots=True)
class Simulator:
    """A running simulator. `network` includes the address of every node; `ssh_port` is the same on all of
    them."""

    pid: int
    endpoint: str
    region: str
    network: str
    ssh_port: int
    started: str  # ISO 8601, UTC
    home: Path
    nodes: str  # namespace or machine (separate hosts), or process (sharing this computer)
    why: str  # why not namespace, or ''
    interfaces: tuple[str, ...] = (INTERFACE,)
    timing: Mapping[str, float] = field(default_factory=lambda: dict(TIMING))
    # Policy, scp -> see options.PolicyFile.description.
    policies: Mapping[str, str] = field(default_factory=dict)

    @property
    def has_lab(self) -> bool:
        """Whether the nodes are hosts on a network of their own, the lab."""
        return self.nodes != "process"


def find(home: Path) -> Simulator | None:
    """Return the running simulator of `home`, or None. A process that has reused its pid is not mistaken for
    it.

    Raises UsageError if other users could have written the record.
    """
    private_files.check(home)
    home = private_files.resolve(home)
    try:
        record = json.loads(record_path(home).read_text())
        ticks = record.pop("ticks")
        interfaces = tuple(record.pop("interfaces", (INTERFACE,)))
        simulator = Simulator(**{**record, "home": Path(record["home"]), "interfaces": interfaces})
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
    process = processes.read(simulator.pid)
    if process is None or process.started != ticks or process.home != str(home) or process.node:
        return None
    if processes.owner(simulator.pid) != os.getuid():
        return None
    return simulator


def write(simulator: Simulator) -> None:
    """Write the record. Called by the server when it is ready to serve."""
    process = processes.read(simulator.pid)
    if process is None:
        raise RuntimeError("cannot read this process in /proc")
    content = {**asdict(simulator), "home": str(simulator.home), "ticks": process.started}
    private_files.replace(record_path(simulator.home), json.dumps(content).encode())


def record_path(home: Path) -> Path:
    return home / "sim" / "sim.json"
