"""The version of the agent that the store belongs to.

A job is served by one version of the agent: files and processes of another one might be misread, and a rank
left running. So the store of another version is taken over while no job runs, and refused while one does.
Before version 2 no version was recorded.
"""

from __future__ import annotations

import contextlib
from typing import Optional

from agent.jobs import phases
from agent.node import store
from cloudddp.agent.protocol import SAFE_STEPS, VERSION
from cloudddp.agent.protocol.phases import VersionConflict

FILE = "version"
UNRECORDED = 1
UNREADABLE = 0
MAX_DIGITS = 8


def stored() -> int:
    try:
        text = store.read_bytes(store.ROOT / FILE, MAX_DIGITS + 1).decode("ascii").strip()
    except FileNotFoundError:
        return UNRECORDED
    except (OSError, ValueError):
        return UNREADABLE
    return int(text) if text.isdigit() else UNREADABLE


def conflict(step: str) -> Optional[VersionConflict]:
    """Return why a step must not run now, or None once the store is of this version."""
    if step in SAFE_STEPS or stored() == VERSION:
        return None
    with store.locked("jobs"):
        found = stored()
        if found == VERSION:
            return None
        running = phases.running_jobs()
        if running:
            return VersionConflict(found, VERSION, tuple(running))
        take_over()
    return None


def take_over() -> None:
    """Record this version, and remove the agents of other versions, which are no longer in use."""
    with contextlib.suppress(OSError):  # on a full disk the next step tries again
        store.replace(store.ROOT / FILE, f"{VERSION}\n".encode())
    for path in store.ROOT.glob("agent-*.py"):
        with contextlib.suppress(OSError):
            path.unlink()
