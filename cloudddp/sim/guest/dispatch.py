"""Runs the stand-in for the name that a command was called by."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

from . import on_node

BIN = ("systemctl", "sudo", "cloud-init", "nvidia-smi", "fi_info")  # commands in /usr/bin
SBIN = ("poweroff", "halt", "reboot", "shutdown")  # commands in /usr/sbin

# Command -> module, function. Imported when called: a node runs dozens of commands at each boot.
_COMMANDS = {
    **dict.fromkeys(SBIN, ("shutdown", "main")),
    "systemctl": ("systemctl", "main"),
    "sudo": ("sudo", "main"),
    "cloud-init": ("cloud_init", "status"),
    "nvidia-smi": ("nvidia", "main"),
    "fi_info": ("efa", "main"),
}


def main() -> int:
    """Run the stand-in that this program is called by. Exits with an error outside a simulated node."""
    on_node.require()
    name, arguments = Path(sys.argv[0]).name, sys.argv[1:]
    module, function = _COMMANDS[name]
    command = getattr(importlib.import_module(f".{module}", __package__), function)
    return int(command(name, arguments) if name in SBIN else command(arguments))
