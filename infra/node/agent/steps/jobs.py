"""`jobs`: list the jobs of this node."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Optional

from agent.jobs import job_record, phases, poweroff, rank_records
from agent.node import store
from cloudddp.agent.protocol.codec import MAX_TEXT, has_job_id_format
from cloudddp.agent.protocol.copies import Copied, CopyPhase
from cloudddp.agent.protocol.jobs import MAX_JOBS, JobsReply, JobsRequest, JobState
from cloudddp.agent.protocol.phases import JobPhase

REQUEST = JobsRequest


def step(_: JobsRequest) -> JobsReply:
    phases.end_orphans()
    found = [state_of(folder) for folder in phases.known_folders()[-MAX_JOBS:]]
    return JobsReply(tuple([_with_end(one) if one.phase.ended else one for one in found]))


def _with_end(state: JobState) -> JobState:
    """Return the state of a job that has ended, with when the node ends. `follow` compares states, and has no
    use for that."""
    return replace(state, grace=poweroff.grace(state.job), unused=poweroff.unused(state.ended))


def state_of(folder: Path) -> JobState:
    """Return the state of a job from its files. A job whose record is unreadable is lost."""
    record, job = phases.recorded(folder), phases.job_file(folder)
    found = JobState(folder.name, JobPhase.LOST, exit_code=1)
    if record is not None:
        found = JobState(
            folder.name,
            record.state,
            record.node,
            record.exit_code,
            record.started,
            record.ended,
            record.error[:MAX_TEXT],
            record.script[:MAX_TEXT],
            record.expected,
            record.max_restarts,
            stopping=phases.is_stopping(folder),
            restarts=record.restarts,
            resumed_from=record.resumed_from if has_job_id_format(record.resumed_from) else "",
            setup=not phases.was_started(folder),
        )
    return replace(
        found,
        poweroff=job.poweroff if job is not None else None,
        ranks=tuple(rank_records.read(folder)),
        training=rank_records.training_status(folder),
        stragglers=job_record.stragglers_of(folder),
        stall=job_record.stall_of(folder),
        cancelled=phases.cancelled_at(folder),
        verdict=phases.verdict(folder) if found.phase.ended else None,
        copied=_copied(folder) if found.phase.ended else None,
        rebooted=phases.rebooted(folder) if found.phase.ended else None,
    )


def _copied(folder: Path) -> Optional[Copied]:
    """Return what was copied to S3. The guard copies: where it was killed, the copy has ended."""
    copied = store.read(folder / phases.COPIED_FILE, Copied)
    if copied is not None and copied.phase is CopyPhase.COPYING and not phases.agent_runs(folder):
        return replace(copied, phase=CopyPhase.INCOMPLETE, error="the agent that copied them was ended")
    return copied
