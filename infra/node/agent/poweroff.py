"""The end of this node after a job that was launched with --down: it powers off, and EC2 terminates it.

The instance's shutdown behaviour is `terminate`, so this needs no AWS permission. The guard of the job waits here for the
time in which results can be pulled. A job that is started meanwhile keeps the node.
"""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Optional

from agent import phases, store
from agent.commands import run_quietly
from cloudddp.agent.protocol.codec import MAX_TIME, check_job_id, check_range

PLAN = store.ROOT / "poweroff.json"
PAUSE = 0.5  # seconds between two looks at the plan
RETRY = 30.0  # seconds until the next command is tried
COMMANDS = (["systemctl", "poweroff"], ["systemctl", "poweroff", "--force"], ["shutdown", "-P", "now"])
ROUNDS = 20


@dataclass(frozen=True)
class Plan:
    """The node powers off after `job`, at `at`: seconds since the epoch by its clock."""

    job: str
    at: float

    def __post_init__(self) -> None:
        check_job_id("job", self.job)
        check_range("at", self.at, 0, MAX_TIME)


def power_off() -> None:
    """Shut the node down now. Instances of cloudddp terminate when they shut down."""
    run_quietly(["sudo", "-n", *COMMANDS[0]])


def planned(job: str) -> Optional[float]:
    """Return when this node powers off because of a job, or None."""
    plan = store.read(PLAN, Plan)
    return plan.at if plan is not None and plan.job == job else None


def forget() -> None:
    """Let the node run on: a job is started on it."""
    with contextlib.suppress(FileNotFoundError):
        PLAN.unlink()


def after(job: str, seconds: float, busy: Callable[[], bool] = lambda: False) -> None:
    """Power off in `seconds`, and not while the node is `busy`, unless another job is started until then."""
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)  # a shutdown must not wait for this process
    with store.locked("jobs"):
        if phases.running_jobs():
            return
        with contextlib.suppress(OSError):  # a full disk: the wait itself needs no file
            store.write(PLAN, Plan(job, time.time() + seconds))
    written = planned(job) is not None
    end = time.monotonic() + seconds
    while (left := end - time.monotonic()) > 0 or busy():
        if _is_taken(job, written):
            return
        time.sleep(min(PAUSE, left) if left > 0 else PAUSE)
    for attempt in range(ROUNDS * len(COMMANDS)):
        if _is_taken(job, written):
            return
        run_quietly(["sudo", "-n", *COMMANDS[attempt % len(COMMANDS)]])
        time.sleep(RETRY)


def _is_taken(job: str, written: bool) -> bool:
    """Whether another job was started on this node."""
    return planned(job) is None if written else bool(phases.running_jobs())
