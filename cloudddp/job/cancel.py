"""Stopping a job on every node, and cleaning up after a launch that failed."""

from __future__ import annotations

import secrets
from dataclasses import dataclass

from cloudddp.agent import client
from cloudddp.agent.client import Runner
from cloudddp.agent.protocol.jobs import KillReply, KillRequest
from cloudddp.agent.protocol.phases import JobPhase
from cloudddp.agent.protocol.progress import TrainingStatus
from cloudddp.errors import NodeError

REPLY_SECONDS = 60.0  # for an agent to answer, beyond the grace


@dataclass(frozen=True, slots=True)
class Cancelled:
    """What a cancel stopped on all nodes together, and the training's last status."""

    ranks: int
    processes: int
    setup: bool  # the job was still in its setup
    training: TrainingStatus | None
    started: bool = True  # a rank was started

    @property
    def text(self) -> str:
        """`3 ranks stopped`, or '' where nothing was running."""
        if self.ranks:
            return f"{self.ranks} rank{'s' * (self.ranks != 1)} stopped"
        if self.setup:
            return "its setup was stopped"
        if self.processes and not self.started:
            return "it was stopped before its ranks had started"
        return "processes that its ranks had left behind were stopped" if self.processes else ""


def cancel(runner: Runner, job_id: str, *, grace: float) -> Cancelled:
    """Stop every rank of a job on every node, or its setup. Raises NodeError where processes survive, where
    nothing was stopped of a job that has not ended, or where a node cannot be reached."""
    request = KillRequest(job_id, grace, secrets.token_hex(8))
    again = "repeat the cancel; `cloudddp down` terminates the nodes"
    replies = runner.each(lambda node: _kill(runner, node, request), fatal=lambda _: False).all()
    if surviving := [f"{reply.left} on node {node}" for node, reply in replies.items() if reply.left]:
        raise NodeError(f"processes could not be killed: {', '.join(surviving)}", hint=again)
    done = Cancelled(
        ranks=sum(reply.ranks for reply in replies.values()),
        processes=sum(reply.ended for reply in replies.values()),
        setup=any(reply.phase is JobPhase.SETUP for reply in replies.values()),
        training=TrainingStatus.from_replies(reply.training for reply in replies.values()),
        started=any(reply.started for reply in replies.values() if reply.phase is not None),
    )
    phases = ((node, reply.phase) for node, reply in replies.items())
    going_on = {node: phase.value for node, phase in phases if phase is not None and not phase.ended}
    if going_on and not done.text:
        node, phase = next(iter(going_on.items()))
        raise NodeError(
            f"job {job_id}: nothing of it was stopped, and node {node} reports it as {phase}", hint=again
        )
    return done


def abort_launch(runner: Runner, job_id: str, *, grace: float = 1.0, forget: bool = False) -> list[int]:
    """Stop everything that an interrupted or failed launch has started, over new connections; return the
    nodes on which processes may be left. `forget`: no record of the job stays on the nodes."""
    request = KillRequest(job_id, grace, secrets.token_hex(8), forget)

    def stop(node: int) -> bool:
        runner.reconnect(node)
        return bool(_kill(runner, node, request).left)

    outcome = runner.each(stop, fatal=lambda _: False)
    return sorted({*outcome.errors, *(node for node, left in outcome.values.items() if left)})


def _kill(runner: Runner, node: int, request: KillRequest) -> KillReply:
    """Kill the processes of a job on one node and verify that they are gone. Raises NodeError."""
    return client.call(runner, node, request, timeout=request.grace + REPLY_SECONDS)
