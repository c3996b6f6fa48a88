"""Whether this process is on a simulated node. What ends machines must not run anywhere else."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

STATE = Path("/run/cloudddp")
USER_ID = 1500  # of the login user: not 1000, who is somebody on most machines
SOCKET = STATE / "init.socket"


def on_node() -> bool:
    """True only in the pid namespace that the node's pid 1 wrote down, which no other process ever is in."""
    try:
        return (STATE / "namespace").read_text() == os.readlink("/proc/self/ns/pid")  # noqa: PTH115 (a string)
    except OSError:
        return False


def require() -> None:
    """Exit where this is no simulated node."""
    if not on_node():
        sys.exit(f"{Path(sys.argv[0]).name}: this stand-in acts on simulated nodes only; refused")


def facts() -> dict[str, Any]:
    """What the simulator says of this node: instance_id, gpus, cloud_config, script, ..."""
    return dict(json.loads((STATE / "node.json").read_text()))
