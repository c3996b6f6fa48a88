"""`conclude`: record the verdict of the other nodes on this one, where it has none, or one that it decided
alone."""

from __future__ import annotations

from pathlib import Path

from agent.jobs import job_record, phases, rank_records
from agent.node import processes, store
from cloudddp.agent.protocol.jobs import ConcludeRequest, StateFile, Verdict
from cloudddp.agent.protocol.phases import Done, JobPhase

REQUEST = ConcludeRequest


def step(request: ConcludeRequest) -> Done:
    folder = store.job_folder(request.job)
    phases.end_orphans()
    with store.locked("jobs"):  # not in the middle of a start
        state = phases.recorded(folder)
        if state is not None and _counts(folder, state, request.verdict):
            rank_records.settle(folder, rank_records.read(folder), asked=True)
            job_record.end(folder, state, request.verdict)
    return Done()


def _counts(folder: Path, state: StateFile, verdict: Verdict) -> bool:
    """Whether a verdict replaces what this node has recorded. Its agent was killed before it could record an
    end; or the nodes could not reach each other and decided apart, and then that of the first one counts."""
    if processes.find(phases.task(folder, state.node)):
        return False
    if state.state is JobPhase.LOST:
        return True
    own = phases.verdict(folder)
    if own is None or own.phase is not JobPhase.FAILED or verdict.phase is not JobPhase.FAILED:
        return False
    return verdict.decided_by < own.decided_by or own.is_of_guard
