"""Starts, finds and stops the simulator's server process, and points AWS clients at it.

Standard library only, since every command with `--sim` imports it. It finds the server by the record in
`sim/sim.json`, the marks on processes and the admin API, and imports none of its code. The caller passes in
the home folder.
"""

from cloudddp.simulator.control.admin_client import (
    conditions,
    fault,
    interrupt,
    maintenance,
    nodes,
    permissions,
)
from cloudddp.simulator.control.environment import HIDDEN, enter, environment, use
from cloudddp.simulator.control.node_session import relay
from cloudddp.simulator.control.options import denies_everything
from cloudddp.simulator.control.process import start, stop
from cloudddp.simulator.control.record import INTERFACE, TIMING, Simulator, find

__all__ = [
    "HIDDEN",
    "INTERFACE",
    "TIMING",
    "Simulator",
    "conditions",
    "denies_everything",
    "enter",
    "environment",
    "fault",
    "find",
    "interrupt",
    "maintenance",
    "nodes",
    "permissions",
    "relay",
    "start",
    "stop",
    "use",
]
