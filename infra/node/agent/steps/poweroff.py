"""`poweroff`: change after how much time without a use this node ends."""

from __future__ import annotations

from agent.jobs import phases, poweroff
from agent.node import store
from cloudddp.agent.protocol.machine import PowerOffReply, PowerOffRequest

REQUEST = PowerOffRequest


def step(request: PowerOffRequest) -> PowerOffReply:
    with store.locked("jobs"):
        if not any(job != request.job for job in phases.running_jobs()):
            store.write(poweroff.PLAN, poweroff.PowerOff(request.job, request.seconds, request.clients))
    plan = poweroff.current()
    return PowerOffReply("" if plan is None else plan.job)
