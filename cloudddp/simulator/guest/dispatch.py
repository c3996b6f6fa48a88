"""Runs the stand-in for the name that a command was called by."""

from __future__ import annotations

import sys

from . import on_node

BIN = ("systemctl", "sudo", "cloud-init", "nvidia-smi", "fi_info")  # commands in /usr/bin
# In /usr/local/bin: they come before those of this computer.
LOCAL_BIN = ("docker", "exportfs", "findmnt", "mount", "mount.nfs4", "umount")
SBIN = ("poweroff", "halt", "reboot", "shutdown")  # commands in /usr/sbin

# Command -> module, function. A node runs a dozen commands at each boot: only what one needs is imported, and
# none of typing, dataclasses and pathlib, which together take longer than Python to start.
_COMMANDS = {
    **dict.fromkeys(SBIN, ("systemctl", "power")),
    "systemctl": ("systemctl", "main"),
    "sudo": ("sudo", "main"),
    "cloud-init": ("cloud_init", "status"),
    "nvidia-smi": ("devices", "nvidia_smi"),
    "fi_info": ("devices", "fi_info"),
    "docker": ("docker", "main"),
    "exportfs": ("nfs", "exportfs"),
    "findmnt": ("nfs", "findmnt"),
    "mount": ("nfs", "mount"),
    "mount.nfs4": ("nfs", "mount"),
    "umount": ("nfs", "umount"),
}


def main() -> int:
    """Run the stand-in that this program is called by. Exits with an error outside a simulated node."""
    on_node.require()
    name, arguments = sys.argv[0].rpartition("/")[2], sys.argv[1:]
    module, function = _COMMANDS[name]
    command = getattr(__import__(f"{__package__}.{module}", fromlist=[function]), function)
    return int(command(name, arguments) if name in SBIN else command(arguments))
