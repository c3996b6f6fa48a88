"""The planned power-off of the nodes (`launch --down`) while a job is launched or resumed: planned, put off,
restored.

A plan is on the nodes, which carry it out without this computer. What a command puts off is limited, since
this computer may vanish in the middle of it.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping

from cloudddp.agent import client
from cloudddp.agent.client import Runner
from cloudddp.agent.protocol.machine import Change, PowerOffReply, PowerOffRequest, ProbeReply
from cloudddp.config import timing
from cloudddp.errors import CloudDDPError
from cloudddp.job.job_request import NewJob


class PutOff:
    """The planned ends of nodes that a command has put off, as they were before."""

    def __init__(self) -> None:
        # After which job each node was to power off, and when, by the monotonic clock of this computer.
        self._before: dict[int, tuple[str, float]] = {}

    def extend(self, runner: Runner, seconds: float) -> None:
        """Let no node that answers power off within `seconds` because of a plan."""
        request = PowerOffRequest(Change.EXTEND, seconds)
        replies = runner.each(lambda node: client.call(runner, node, request), fatal=lambda _: False)
        for node, reply in replies.values.items():
            if reply.job and reply.before is not None:
                self._before.setdefault(node, (reply.job, time.monotonic() + reply.before))

    def plans(self, least: Mapping[str, float]) -> dict[int, tuple[str, float]]:
        """Return the plans to restore, by node, as (job, seconds): what is left of each, and at least as many
        seconds as `least` has for its job."""
        now = time.monotonic()
        return {
            node: (job, max(due - now, least.get(job, 0.0), 0.0)) for node, (job, due) in self._before.items()
        }


def restore(runner: Runner, plans: Mapping[int, tuple[str, float]]) -> float | None:
    """Change the plans of nodes, given as (job, seconds), over new connections; return when the first of them
    powers off, in seconds, or None. A node that does not answer keeps its plan; so does one on which another
    job runs."""

    def change(node: int) -> PowerOffReply:
        runner.reconnect(node)
        job, seconds = plans[node]
        return client.call(runner, node, PowerOffRequest(Change.CHANGE, seconds, job))

    nodes = [node for node in runner.nodes if node in plans]
    replies = runner.each(change, nodes=nodes, fatal=lambda _: False).values
    changed = [one for node, one in replies.items() if one.job == plans[node][0]]
    return min((one.left for one in changed if one.left is not None), default=None)


def plan(runner: Runner, job: str, seconds: float) -> set[int]:
    """Let the nodes power off in `seconds`, since `job` has ended; return those that will."""
    request = PowerOffRequest(Change.PLAN, seconds, job)
    replies = runner.each(lambda node: client.call(runner, node, request), fatal=lambda _: False)
    return {node for node, reply in replies.values.items() if reply.job == job and reply.left is not None}


def keep_after_failure(keep: float) -> float:
    """Return the seconds after which nodes power off whose job was not started, for a keep time in minutes:
    the user needs time to start it again."""
    return max(keep * timing.current().minute, timing.current().failed_launch)


class Hold:
    """Lets no node power off while a job is launched. For a job with --down it plans the end of the nodes
    before anything is sent to them, so that they also end if the job never starts."""

    def __init__(self, job: NewJob) -> None:
        self._job = job
        self._before: dict[int, PowerOffReply] = {}
        self._nodes: tuple[int, ...] = ()
        self._began = 0.0
        self.left: float | None = None  # after `release`: seconds until a node powers off; None: none does

    def begin(self, runner: Runner, probes: Mapping[int, ProbeReply]) -> None:
        """Put off what is planned, and plan the end of the nodes. Raises NodeError. No call where neither is
        needed."""
        job, seconds = self._job, timing.current().launch_hold
        self._began = time.monotonic()
        self._nodes = tuple(probes)
        self._before = {
            node: reply.poweroff for node, reply in probes.items() if reply.poweroff and reply.poweroff.job
        }
        if job.poweroff is not None:
            later = seconds + job.poweroff * timing.current().minute
            client.call_all(runner, lambda _: PowerOffRequest(Change.PLAN, later, job.id))
        elif self._before:
            client.call_all(runner, lambda _: PowerOffRequest(Change.EXTEND, seconds))

    def release(self, runner: Runner) -> None:
        """The job was not started: let the nodes power off as it was planned before, or soon if it was
        launched with --down."""
        plans = {node: self._plan(node) for node in self._nodes}
        wanted = {node: plan for node, plan in plans.items() if plan is not None}
        if wanted:
            with contextlib.suppress(CloudDDPError, OSError):
                self.left = restore(runner, wanted)

    def _plan(self, node: int) -> tuple[str, float] | None:
        if self._job.poweroff is not None:
            return self._job.id, keep_after_failure(self._job.poweroff)
        before = self._before.get(node)
        if before is None or before.left is None:
            return None
        passed = time.monotonic() - self._began
        return before.job, max(before.left - passed, timing.current().minute)
