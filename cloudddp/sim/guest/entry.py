"""Which stand-in a command's name means."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

from . import here

POWER = ("poweroff", "halt", "reboot", "shutdown")
BIN = ("systemctl", "sudo", "cloud-init", "nvidia-smi")  # in /usr/bin; POWER is in /usr/sbin

# Name of the command -> module, and function in it. Imported when called: a node runs dozens of these at each boot.
_COMMANDS = {
    **dict.fromkeys(POWER, ("commands", "power")),
    "systemctl": ("commands", "systemctl"),
    "sudo": ("commands", "sudo"),
    "cloud-init": ("cloudinit", "status"),
    "nvidia-smi": ("nvidia", "main"),
}


def main() -> int:
    """Run the stand-in that this program is called by. Exits where this is no simulated node."""
    here.require()
    here.require()
    name, arguments = Path(sys.argv[0]).name, sys.argv[1:]
    module, function = _COMMANDS[name]
    command = getattr(importlib.import_module(f".{module}", __package__), function)
    return int(command(name, arguments) if name in POWER else command(arguments))
