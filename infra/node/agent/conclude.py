"""`conclude`: record the verdict of the other nodes on this one, whose agent was killed before it could record an end."""

from __future__ import annotations

from agent import job_record, jobs, phases, processes, store
from cloudddp.agent.protocol.phases import JobPhase
from cloudddp.agent.protocol.verdict import ConcludeReply, ConcludeRequest

REQUEST = ConcludeRequest


def step(request: ConcludeRequest) -> ConcludeReply:
    folder = store.job_folder(request.job)
    with store.locked("jobs"):  # not in the middle of a start
        state = phases.recorded(folder)
        if (
            state is None
            or state.state is not JobPhase.LOST
            or processes.find(phases.task(folder, state.node))
        ):
            return ConcludeReply(recorded=False)
        jobs.settle(folder, jobs.rank_records(folder), asked=True)
        job_record.end(folder, state, request.verdict)
    return ConcludeReply(recorded=True)
