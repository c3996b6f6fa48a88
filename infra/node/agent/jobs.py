"""`jobs`: list the jobs of this node; and what their ranks and scripts recorded."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Optional

from agent import phases, poweroff, records, store
from cloudddp.agent.protocol.codec import MAX_COUNT, MAX_TEXT, has_job_id_format
from cloudddp.agent.protocol.copies import Copied, CopyPhase
from cloudddp.agent.protocol.jobs import MAX_JOBS, JobsReply, JobsRequest, JobState, RankRecord
from cloudddp.agent.protocol.phases import JobPhase
from cloudddp.agent.protocol.training import TrainingState, TrainingStatus

REQUEST = JobsRequest

STATUS_LIMIT = 1 << 14  # bytes of a training status


def step(_: JobsRequest) -> JobsReply:
    return JobsReply(tuple([state_of(folder) for folder in phases.known_folders()[-MAX_JOBS:]]))


def state_of(folder: Path) -> JobState:
    """Return the state of a job from its files. A job whose record is unreadable is lost."""
    record, job = phases.recorded(folder), phases.job_file(folder)
    setup = None if job is not None else phases.setup_of(folder)
    if setup is not None:
        found = JobState(
            folder.name, phases.phase_of(folder), node=setup.node, script=setup.script[:MAX_TEXT],
            started=setup.started, ended=setup.ended, exit_code=setup.exit_code, setup=True,
        )  # fmt: skip
    elif record is not None:
        found = JobState(
            folder.name, record.state, node=record.node, exit_code=record.exit_code, started=record.started,
            ended=record.ended, error=record.error[:MAX_TEXT], script=record.script[:MAX_TEXT],
            expected=record.expected, max_restarts=record.max_restarts, restarts=record.restarts,
            resumed_from=record.resumed_from if has_job_id_format(record.resumed_from) else "",
        )  # fmt: skip
    else:
        found = JobState(folder.name, JobPhase.LOST, exit_code=1)
    return replace(
        found,
        poweroff=job.poweroff if job is not None else None,
        ends=poweroff.planned(folder.name, found.ended) if found.phase.ended else None,
        stopping=(record is not None or setup is not None) and phases.is_stopping(folder),
        ranks=tuple(rank_records(folder)),
        training=training_status(folder),
        stragglers=records.stragglers(folder),
        stall=records.left_stall(folder),
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


# -- ranks -------------------------------------------------------------------------------------------------


def rank_records(folder: Path) -> list[RankRecord]:
    records = [store.read(path, RankRecord) for _, path in phases.rank_files(folder, ".json")]
    return [record for record in records if record is not None]


def settle(folder: Path, records: Sequence[RankRecord], *, asked: bool) -> None:
    """Record an end by SIGKILL, now, for ranks whose wrapper was killed with them. `asked`: they were being ended."""
    killed = int(signal.SIGKILL)
    for record in records:
        if record.exit_code is None:
            ended = replace(
                record,
                ended=time.time(),
                exit_code=128 + killed,
                signal=killed,
                at=time.monotonic(),
                asked=asked,
            )
            store.write(folder / "ranks" / f"{record.rank}.json", ended)


# -- training ----------------------------------------------------------------------------------------------


def training_status(folder: Path) -> Optional[TrainingStatus]:
    """Return what rank 0 last reported, or None.

    A script may write anything there: unknown keys, other types and numbers that a float cannot hold are dropped.
    """
    try:
        path = folder / store.STATUS_FILE
        report = json.loads(store.read_bytes(path, STATUS_LIMIT))
        written = phases.modified(path)
    except (OSError, ValueError, RecursionError):
        return None
    if not isinstance(report, dict):
        return None
    found: dict[str, Any] = {}
    if report.get("state") in [state.value for state in TrainingState]:
        found["state"] = TrainingState(report["state"])
    for key, kinds in (("step", (int,)), ("steps", (int,)), ("best_accuracy", (int, float))):
        value = report.get(key)
        if isinstance(value, kinds) and not isinstance(value, bool) and -MAX_COUNT < value < MAX_COUNT:
            found[key] = value
    return TrainingStatus(reported=written, **found) if found else None
