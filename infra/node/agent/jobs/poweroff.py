"""The end of this node: what the agent tells root's timer (infra/node/cloudddp-idle.sh), which alone ends it.

A node ends at its deadline, or once it has been unused for its grace. The grace of a job that was launched
with --down is in PLAN; a process named RUNS_A_JOB is a use. The instance's shutdown behaviour is `terminate`,
so powering off needs no AWS permission.
"""

from __future__ import annotations

import contextlib
import math
import time
from dataclasses import field
from datetime import datetime, timezone
from pathlib import Path
from typing import Optional

from agent.jobs import phases
from agent.node import kernel, store
from agent.node.commands import run_quietly
from cloudddp.agent.protocol.codec import JobId
from cloudddp.agent.protocol.frozen import frozen
from cloudddp.agent.protocol.machine import CLIENT_SECONDS, MAX_POWEROFF_WAIT, PoweroffSeconds
from cloudddp.agent.protocol.start import Deadline

# The deadline as `extend` has moved it: seconds since the epoch by this node's clock, written by
# infra/node/move-deadline.sh.
MOVED = store.ROOT / "deadline"
PLAN = store.ROOT / "poweroff.json"  # the timer reads `seconds` and `clients` of it
UNUSED = Path("/run/cloudddp-unused")  # of the timer: the uptime at which the node was last used, and more
ENDING = Path("/run/cloudddp-ending")  # the timer has decided to end the node
LOOK = ["sudo", "-n", "systemctl", "start", "cloudddp-idle.service"]  # it returns once the timer has looked


@frozen
class PowerOff:
    """The node ends once it has been unused for `seconds`. Clients prolong that by at most `clients` seconds
    after the last use by a job, or after this was `written`."""

    job: JobId
    seconds: PoweroffSeconds
    clients: PoweroffSeconds = CLIENT_SECONDS
    written: float = field(default_factory=time.time)  # the timer sees that it was written again


def deadline(given: Optional[Deadline], began: float) -> tuple[float, str]:
    """Return when this node ends (monotonic), and as text; infinity and '' for never. `given`: at `began`."""
    with contextlib.suppress(OSError, ValueError, OverflowError):
        moved = float(store.read_bytes(MOVED, 64))
        text = f"{datetime.fromtimestamp(moved, timezone.utc):%Y-%m-%d %H:%M} UTC"
        return time.monotonic() + moved - time.time(), text
    return (math.inf, "") if given is None else (began + given.left, given.at)


def current() -> Optional[PowerOff]:
    return store.read(PLAN, PowerOff)


def grace(job: str) -> Optional[float]:
    """Return after how many seconds without a use this node ends because of this job, or None."""
    plan = current()
    return plan.seconds if plan is not None and plan.job == job else None


def unused(ended: Optional[float]) -> float:
    """Return for how many seconds this node has been unused; with another version's timer, since `ended`."""
    try:
        last = float(store.read_bytes(UNUSED).split()[0])
        found = time.clock_gettime(time.CLOCK_BOOTTIME) - last
    except (OSError, ValueError, IndexError):
        found = 0.0 if ended is None else time.time() - ended
    return min(max(found, 0.0), MAX_POWEROFF_WAIT)


def occupy() -> None:
    """Let this process count as a use of the node. Raises SystemExit where the node ends: the timer sets its
    mark and then looks for such a process, so one of the two sees the other."""
    kernel.set_name(kernel.RUNS_A_JOB)
    if ENDING.exists():
        raise SystemExit("this node is ending, since nobody has used it; `cloudddp up` creates another one")


def begin(job: str, seconds: Optional[float]) -> None:
    """The ranks of a job have been started: replace the plan by that of this job, or remove it."""
    with store.locked("jobs"), contextlib.suppress(OSError):  # a full disk ends no job
        if seconds is not None:
            store.write(PLAN, PowerOff(job, seconds))
        else:
            PLAN.unlink(missing_ok=True)


def replan(job: str, seconds: float, *, own: bool = False) -> None:
    """Change the plan of a job that has ended, unless another one has taken the node. `own`: only where the
    job has a plan; a later one may have removed it and ended."""
    with store.locked("jobs"), contextlib.suppress(OSError):
        plan = current()
        taken = (own or bool(phases.running_jobs())) if plan is None else plan.job != job
        if not taken and (plan is None or plan.seconds != seconds):
            store.write(PLAN, PowerOff(job, seconds))


def let_end(job: str) -> None:
    """The agent of a job ends: let the timer look now, so that the seconds of the plan count from here."""
    seconds = grace(job)
    if seconds == 0:
        kernel.set_name(kernel.RAN_A_JOB)
    if seconds is not None:
        run_quietly(LOOK)
