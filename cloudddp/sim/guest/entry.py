"""Which stand-in a command's name means."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

from . import cloudinit, commands, here, nvidia

POWER = ("poweroff", "halt", "reboot", "shutdown")
BIN = ("systemctl", "sudo", "cloud-init", "nvidia-smi")  # in /usr/bin; POWER is in /usr/sbin

_COMMANDS: dict[str, Callable[[list[str]], int]] = {
    "systemctl": commands.systemctl,
    "sudo": commands.sudo,
    "cloud-init": cloudinit.status,
    "nvidia-smi": nvidia.main,
}


def main() -> int:
    """Run the stand-in that this program is called by. Exits where this is no simulated node."""
    here.require()
    name, arguments = Path(sys.argv[0]).name, sys.argv[1:]
    if name in POWER:
        return commands.power(name, arguments)
    return _COMMANDS[name](arguments)
