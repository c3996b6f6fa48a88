"""Ending this node from itself. Instances of cloudddp terminate when they shut down."""

from __future__ import annotations

from agent.commands import run_quietly

SECONDS = 30.0


def power_off() -> None:
    """Shut the node down."""
    run_quietly(["sudo", "-n", "systemctl", "poweroff"], SECONDS)
