"""`poweroff`: the end of this node after a job that was launched with --down: it powers off, and EC2
terminates it.

The instance's shutdown behaviour is `terminate`, so this needs no AWS permission. The plan is a file, which
`launch` writes before it sends anything, each job that starts replaces or removes, and `resume` extends. The
guard of a job that has ended carries it out, and so does a timer of root (infra/node/cloudddp-idle.sh), if
the guard was killed or no job was started. Neither does while a job runs.
"""

from __future__ import annotations

import contextlib
import itertools
import signal
import time
from collections.abc import Callable
from typing import Optional

from agent.jobs import phases
from agent.node import kernel, store
from agent.node.commands import succeeds
from cloudddp.agent.protocol.codec import JobId, Time
from cloudddp.agent.protocol.frozen import frozen
from cloudddp.agent.protocol.machine import PowerOffReply, PoweroffSeconds

PLAN = store.ROOT / "poweroff.json"  # cloudddp-idle.sh reads `seconds` of it
PAUSE = 0.5  # seconds between two looks at the plan
RETRY = 30.0  # seconds for a shutdown that has begun, until the next command is tried
SECONDS = 20.0  # for a command
# The shutdown ends this process, and not that unit, which forces a poweroff that hangs.
UNIT = "cloudddp-deadline.service"
COMMANDS = (
    ["systemctl", "start", "--no-block", UNIT],
    ["systemctl", "poweroff"],
    ["systemctl", "poweroff", "--force"],
    ["shutdown", "-P", "now"],
)


@frozen
class Plan:
    """The node powers off `seconds` after `since`, or after the end of `job` if that is later. `since`:
    seconds since the epoch by its clock, for people and to tell one plan from another; nothing is computed
    from it here."""

    job: JobId
    seconds: PoweroffSeconds
    since: Time

    @property
    def left(self) -> float:
        return min(max(self.since + self.seconds - time.time(), 0.0), self.seconds)


def current() -> Optional[Plan]:
    return store.read(PLAN, Plan)


def reply() -> PowerOffReply:
    """Return the plan, as the laptop gets it."""
    plan = current()
    return PowerOffReply() if plan is None else PowerOffReply(plan.job, plan.left)


def planned(job: str, ended: Optional[float]) -> Optional[float]:
    """Return when this node powers off because of a job that has ended, in seconds since the epoch, or None.
    The plan is older than the end where the guard was killed."""
    plan = current()
    return max(plan.since, ended or 0.0) + plan.seconds if plan is not None and plan.job == job else None


def begin(job: str, seconds: Optional[float]) -> None:
    """The ranks of a job have been started: replace the plan by that of this job, or remove it."""
    with store.locked("jobs"), contextlib.suppress(OSError):  # a full disk ends no job
        if seconds is not None:
            write(job, seconds)
        else:
            PLAN.unlink(missing_ok=True)


def write(job: str, seconds: float) -> Plan:
    plan = Plan(job, seconds, time.time())
    store.write(PLAN, plan)
    return plan


def after(
    job: str,
    seconds: float,
    busy: Callable[[], bool] = lambda: False,
    least: Callable[[], float] = lambda: 0.0,
) -> None:
    """Power off in `seconds`, and not while the node is `busy` nor `least()` seconds after that, unless
    another job is started until then. The plan may be changed meanwhile. Returns once another job has taken
    the node."""
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)  # a shutdown must not wait for this process
    countdown = _Countdown(job)
    if not countdown.begin(seconds):
        return
    kernel.set_name(kernel.RUNS_A_JOB)
    was_busy = True
    while True:
        if was_busy and not busy():
            was_busy = False
            countdown.at_least(least())
            kernel.set_name(kernel.WAITS_TO_END)
        if countdown.is_taken():
            return
        if countdown.is_over and not was_busy:
            break
        time.sleep(PAUSE)
    kernel.set_name(kernel.WAITS_TO_END)
    commands = itertools.cycle(COMMANDS)
    again = 0.0  # when the next command is run, by the monotonic clock
    while True:
        with store.locked("jobs"):  # no job can start between this and the shutdown
            if countdown.is_taken():
                return
            if time.monotonic() >= again and countdown.is_over and not phases.running_jobs():
                again = time.monotonic() + (
                    RETRY if succeeds(["sudo", "-n", *next(commands)], SECONDS) else PAUSE
                )
        time.sleep(PAUSE)


class _Countdown:
    """The wait of a job's guard, by the monotonic clock: the other one may be set."""

    def __init__(self, job: str) -> None:
        self._job = job
        self._plan: Optional[Plan] = None  # None where it could not be written: the wait itself needs no file
        self._end = 0.0

    def begin(self, seconds: float) -> bool:
        """Write the plan. Return False if another job has taken the node."""
        self._end = time.monotonic() + seconds
        with store.locked("jobs"):
            plan = current()
            if (plan is None and phases.running_jobs()) or (plan is not None and plan.job != self._job):
                return False
            with contextlib.suppress(OSError):
                self._plan = write(self._job, seconds)
        return True

    def at_least(self, seconds: float) -> None:
        """Wait so many seconds from now on, if less is left."""
        with store.locked("jobs"):
            if self.is_taken() or time.monotonic() + seconds <= self._end:
                return
            self._end = time.monotonic() + seconds
            with contextlib.suppress(OSError):
                self._plan = write(self._job, seconds)

    @property
    def is_over(self) -> bool:
        return time.monotonic() >= self._end

    def is_taken(self) -> bool:
        """Look at the plan, which may have been changed. Return whether it is another job's."""
        if self._plan is None:
            return bool(phases.running_jobs())
        plan = current()
        if plan is None or plan.job != self._job:
            return True
        if plan != self._plan:
            self._plan, self._end = plan, time.monotonic() + plan.seconds
        return False
