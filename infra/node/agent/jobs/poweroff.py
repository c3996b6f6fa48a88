"""The end of this node: what the agent tells root's timer (infra/node/cloudddp-idle.sh), which alone ends it.

A node ends at its deadline, or once it has been unused for its grace. The grace of a job that was launched
with --down is in PLAN; a process named RUNS_A_JOB is a use. The instance's shutdown behaviour is `terminate`,
so powering off needs no AWS permission.
"""

from __future__ import annotations

import contextlib
import time
from dataclasses import field
from pathlib import Path
from typing import Optional

from agent.jobs import phases
from agent.node import kernel, store
from agent.node.commands import run_quietly
from cloudddp.agent.protocol.codec import JobId
from cloudddp.agent.protocol.frozen import frozen
from cloudddp.agent.protocol.machine import CLIENT_SECONDS, MAX_POWEROFF_WAIT, PoweroffSeconds

PLAN = store.ROOT / "poweroff.json"  # the timer reads `seconds` and `clients` of it
UNUSED = Path("/run/cloudddp-unused")  # of the timer: the uptime at which the node was last used, and more
ENDING = Path("/run/cloudddp-ending")  # the timer has decided to end the node
LOOK = ["sudo", "-n", "systemctl", "start", "cloudddp-idle.service"]  # it returns once the timer has looked


@frozen
class Plan:
    """The node ends once it has been unused for `seconds`. Clients prolong that by at most `clients` seconds
    after the last use by a job, or after this was `written`."""

    job: JobId
    seconds: PoweroffSeconds
    clients: PoweroffSeconds = CLIENT_SECONDS
    written: float = field(default_factory=time.time)  # the timer sees that it was written again


def current() -> Optional[Plan]:
    return store.read(PLAN, Plan)


def grace(job: str) -> Optional[float]:
    """Return after how many seconds without a use this node ends because of a job; None: not because of that
    one."""
    plan = current()
    return plan.seconds if plan is not None and plan.job == job else None


def unused(ended: Optional[float]) -> float:
    """Return for how many seconds this node has been unused, since a job `ended`; that is the answer where
    another version has installed the timer."""
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
            store.write(PLAN, Plan(job, seconds))
        else:
            PLAN.unlink(missing_ok=True)


def replan(job: str, seconds: float, *, own: bool = False) -> None:
    """Change the plan of a job that has ended, unless another one has taken the node. `own`: only where the
    job has a plan; a later one may have removed it and ended."""
    with store.locked("jobs"), contextlib.suppress(OSError):
        plan = current()
        taken = (own or bool(phases.running_jobs())) if plan is None else plan.job != job
        if not taken and (plan is None or plan.seconds != seconds):
            store.write(PLAN, Plan(job, seconds))


def let_end(job: str) -> None:
    """The agent of a job ends: let the timer look now, so that the seconds of its plan count from now on, or
    so that it ends the node at once."""
    seconds = grace(job)
    if seconds == 0:
        kernel.set_name(kernel.RAN_A_JOB)
    if seconds is not None:
        run_quietly(LOOK)
