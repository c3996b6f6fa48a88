"""`poweroff`: when a node powers off by itself, once no job runs on it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Optional

from cloudddp.agent.protocol.codec import check_job_id, check_range

MAX_WAIT = 1e8  # seconds


class Change(Enum):
    """What is to be done with the plan of a node."""

    PLAN = "plan"  # for a job that is being launched; it replaces the plan of any other one
    EXTEND = "extend"  # the plan of any job: the node powers off that late, or later
    CHANGE = "change"  # the plan of that job, and of no other


@dataclass(frozen=True)
class PowerOffReply:
    """The node powers off after `job`, in `left` seconds if no job runs on it; None: it does not. `before`:
    what `left` was before it was changed."""

    job: str = ""
    left: Optional[float] = None
    before: Optional[float] = None

    def __post_init__(self) -> None:
        if self.job:
            check_job_id("job", self.job)
        check_range("left", self.left, 0, MAX_WAIT)
        check_range("before", self.before, 0, MAX_WAIT)


@dataclass(frozen=True)
class PowerOffRequest:
    """Let the node power off in `seconds`. `job`: see Change; '' for EXTEND. Nothing is changed where another
    job runs."""

    change: Change
    seconds: float
    job: str = ""

    STEP = "poweroff"
    REPLY = PowerOffReply

    def __post_init__(self) -> None:
        check_range("seconds", self.seconds, 0, MAX_WAIT)
        if self.job or self.change is not Change.EXTEND:
            check_job_id("job", self.job)
