"""Whether this process is on a simulated node. What ends machines must not run anywhere else."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

STATE = Path("/run/cloudddp")
# The login user's. In a lab that root made, the uid is the same outside, and no user of the computer may have it:
# users can trace processes of their own uid. Distributions assign no uids to users from 1879048192 on.
USER_ID = 1_900_001_000
SSHD_ID = USER_ID + 1  # sshd's own unprivileged user, before login
SOCKET = STATE / "init.socket"
ENDS = {"poweroff": 40, "reboot": 41}  # exit status of pid 1: needs no disk, and nobody else can write it


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
