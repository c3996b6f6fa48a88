"""`poweroff`: change when this node powers off by itself, and return it."""

from __future__ import annotations

import dataclasses
from typing import Optional

from agent.jobs import phases, poweroff
from agent.node import store
from cloudddp.agent.protocol.machine import Change, PowerOffReply, PowerOffRequest

REQUEST = PowerOffRequest


def step(request: PowerOffRequest) -> PowerOffReply:
    """Change the plan of this node, and return what it is now."""
    with store.locked("jobs"):
        plan = poweroff.current()
        before = plan.left if plan is not None else None
        if not any(job != request.job for job in phases.running_jobs()):
            _change(plan, request)
    return dataclasses.replace(poweroff.reply(), before=before)


def _change(plan: Optional[poweroff.Plan], request: PowerOffRequest) -> None:
    if request.change is Change.PLAN:
        poweroff.write(request.job, request.seconds)
    elif plan is not None and request.change is Change.EXTEND:
        poweroff.write(plan.job, max(plan.left, request.seconds))
    elif plan is not None and plan.job == request.job:
        poweroff.write(plan.job, request.seconds)
