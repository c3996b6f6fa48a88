"""The cluster's deadline on this node: the timer that ends it, and where `extend` has moved it to."""

from __future__ import annotations

import contextlib
import math
import time
from datetime import datetime, timezone
from typing import TYPE_CHECKING, Optional

from agent.node import store
from agent.node.commands import run_quietly
from cloudddp.agent.protocol.machine import DeadlineReply

if TYPE_CHECKING:
    from cloudddp.agent.protocol.start import Deadline

TIMER = "cloudddp-deadline.timer"
MOVED = store.ROOT / "deadline.json"  # a DeadlineReply, by this node's clock, which jobs that run follow


def timer() -> dict[str, str]:
    """Return systemd's ActiveState and NextElapseUSecRealtime of the timer, in UTC."""
    names = "ActiveState,NextElapseUSecRealtime"
    shown = run_quietly(["env", "TZ=UTC", "systemctl", "show", TIMER, "-p", names])
    return dict(line.split("=", 1) for line in shown.splitlines() if "=" in line)


def elapses() -> Optional[float]:
    """Return when the timer ends this node, in seconds since the epoch; None where it is not armed."""
    shown = timer()
    with contextlib.suppress(ValueError, KeyError):
        if shown["ActiveState"] == "active":
            found = datetime.strptime(shown["NextElapseUSecRealtime"], "%a %Y-%m-%d %H:%M:%S UTC")
            return found.replace(tzinfo=timezone.utc).timestamp()
    return None


def left(given: Optional[Deadline], began: float) -> float:
    """Return how many seconds this node has left: as it was `given` to a job that began at `began`, by the
    monotonic clock, unless `extend` has moved it; infinity where nothing ends it."""
    moved = _moved()
    if moved is not None:
        return moved - time.time()
    return math.inf if given is None else began + given.left - time.monotonic()


def text(given: Optional[Deadline]) -> str:
    """Return when this node ends, for people."""
    moved = _moved()
    if moved is not None:
        return f"{datetime.fromtimestamp(moved, timezone.utc):%Y-%m-%d %H:%M} UTC"
    return "" if given is None else given.at


def _moved() -> Optional[float]:
    found = store.read(MOVED, DeadlineReply)
    return None if found is None else found.ends
