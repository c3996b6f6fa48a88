"""Whether this process runs on a simulated node, and the description of the node that the simulator provides.

Code that powers off a machine must not run anywhere else.
"""

from __future__ import annotations

import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

STATE_FOLDER = "/run/cloudddp"
SOCKET = f"{STATE_FOLDER}/init.socket"
SHARED_FOLDER = "/srv/cloudddp-nfs"  # the same on all namespace nodes (nfs.py)
SYSTEM_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
ENVIRONMENT = {"PATH": SYSTEM_PATH, "LANG": "C.UTF-8"}  # of services and of cloud-init's commands: no HOME
# The login user. In a lab that root started, the uid is the same outside the node, where no user may have it:
# users can trace processes of their own uid. Distributions assign no uids to users from 1879048192 on.
USER_ID = 1_900_001_000
SSHD_ID = USER_ID + 1  # sshd's unprivileged user before login
EXIT_STATUS = {"poweroff": 40, "reboot": 41}  # of pid 1: it needs no disk, and no other process can forge it


def is_node() -> bool:
    """Return whether this is the pid namespace that the node's pid 1 recorded, which no other process is ever
    in."""
    try:
        with open(f"{STATE_FOLDER}/namespace") as file:
            return file.read() == os.readlink("/proc/self/ns/pid")
    except OSError:
        return False


def require() -> None:
    """Exit with an error unless this is a simulated node."""
    if not is_node():
        sys.exit(f"{os.path.basename(sys.argv[0])}: refused: this stand-in acts on simulated nodes only")


def facts() -> dict[str, Any]:
    """Return the simulator's description of this node: instance_id, gpus, efa_devices, cloud_config, script,
    login_keys, boot (the fields of conditions.model.Boot)."""
    import json

    with open(f"{STATE_FOLDER}/node.json") as file:
        return dict(json.load(file))
