"""What somebody may wish of a simulator that is to be started, and whether the one that runs is like that.

Standard library only, as control.py: it starts nothing and knows no server.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from cloudddp.errors import UsageError

if TYPE_CHECKING:
    from cloudddp.sim.control import Simulator

KINDS = ("auto", "namespace", "process")

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,14}")  # what Linux takes, and `ip` does not misread


def check(names: Sequence[str], nodes: str) -> None:
    """Raise UsageError for a kind of nodes that is none, a name that no interface can have, or names for nodes that
    have no interface."""
    if nodes not in KINDS:
        raise UsageError(
            f"there is no kind of nodes {nodes!r}", hint=f"--nodes, or CLOUDDDP_SIM_NODES: {', '.join(KINDS)}"
        )
    for name in names:
        if not _NAME.fullmatch(name) or name in ("lo", "all", "default"):  # the last two are of /proc/sys/net
            raise UsageError(
                f"no interface of a node can be called {name!r}",
                hint="1 to 15 letters, digits, '.', '_' or '-', as in --interface enp71s0; not lo, all or default",
            )
    if names and nodes == "process":
        raise UsageError(
            "process nodes have no interface of their own, so none can be named",
            hint="leave out --interface, or ask for --nodes namespace",
        )


def unlike(
    running: Simulator,
    *,
    port: int,
    ssh_port: int,
    nodes: str,
    interfaces: Sequence[str],
    timing: Mapping[str, float],
) -> list[str]:
    """In what the running simulator is not as was asked for, in the words of its options; what was not asked for is
    right as it is."""
    own_port = int(running.endpoint.rpartition(":")[2])
    return [
        *([f"{running.nodes} nodes"] if nodes not in ("auto", running.nodes) else []),
        *([f"--port {own_port}"] if port not in (0, own_port) else []),
        *([f"SSH port {running.ssh_port}"] if ssh_port not in (0, running.ssh_port) else []),
        *(
            [" ".join(f"--interface {name}" for name in running.interfaces)]
            if interfaces and tuple(interfaces) != running.interfaces
            else []
        ),
        *(
            f"--{name}-seconds {running.timing.get(name, 0.0):g}"
            for name, wanted in timing.items()
            if wanted != running.timing.get(name, 0.0)
        ),
    ]
