"""`jobs`: list the jobs of this node; and what their ranks and scripts recorded."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Optional

from agent import phases, store
from cloudddp.agent.protocol.codec import MAX_COUNT, MAX_TEXT
from cloudddp.agent.protocol.jobs import MAX_JOBS, JobsReply, JobsRequest, JobState, RankRecord
from cloudddp.agent.protocol.phases import JobPhase
from cloudddp.agent.protocol.training import TrainingState, TrainingStatus

REQUEST = JobsRequest

STATUS_LIMIT = 1 << 14  # bytes of a training status


def step(_: JobsRequest) -> JobsReply:
    return JobsReply(tuple([state_of(folder) for folder in phases.known_folders()[-MAX_JOBS:]]))


def state_of(folder: Path) -> JobState:
    """Return the state of a job from its files. A job whose record is unreadable is lost."""
    record = phases.recorded(folder)
    setup = None if record is not None else phases.running_setup(folder)
    if setup is not None:
        found = JobState(
            folder.name, JobPhase.SETUP, node=setup.node, script=setup.script[:MAX_TEXT], started=setup.started,
        )  # fmt: skip
    elif record is not None:
        found = JobState(
            folder.name, record.state, node=record.node, exit_code=record.exit_code, started=record.started,
            ended=record.ended, error=record.error[:MAX_TEXT], script=record.script[:MAX_TEXT],
            expected=record.expected, max_restarts=record.max_restarts,
        )  # fmt: skip
    else:
        found = JobState(folder.name, JobPhase.LOST, exit_code=1)
    return replace(
        found,
        stopping=(record is not None or setup is not None) and phases.is_stopping(folder),
        ranks=tuple(rank_records(folder)),
        training=training_status(folder),
        cancelled=phases.cancelled_at(folder),
    )


# -- ranks -------------------------------------------------------------------------------------------------


def rank_records(folder: Path) -> list[RankRecord]:
    records = [store.read(path, RankRecord) for _, path in phases.rank_files(folder, ".json")]
    return [record for record in records if record is not None]


def outcome(folder: Path, ranks: int, codes: Sequence[int]) -> dict[str, Any]:
    """Return state and exit code of a job of which no process is left, given the exit codes of its launchers.

    The ranks decide: torchrun may exit 1 although every rank has finished (a race at its exit barrier).
    """
    _settle(folder)
    records = rank_records(folder)
    failed = sorted((one for one in records if one.exit_code), key=lambda one: one.ended or 0.0)
    if (folder / phases.CANCEL_MARK).exists():
        return {"state": JobPhase.CANCELLED, "exit_code": 130}
    if failed:
        return {"state": JobPhase.FAILED, "exit_code": failed[0].exit_code}
    if len(records) == ranks and all(one.exit_code == 0 for one in records):
        return {"state": JobPhase.SUCCEEDED, "exit_code": 0}
    worst = next((code for code in codes if code), 1)
    return {"state": JobPhase.FAILED, "exit_code": 128 - worst if worst < 0 else worst}


def _settle(folder: Path) -> None:
    """Record an end for ranks whose wrapper was killed with them."""
    for _, path in phases.rank_files(folder, ".json"):
        record = store.read(path, RankRecord)
        if record is not None and record.exit_code is None:
            killed = int(signal.SIGKILL)
            store.write(path, replace(record, ended=time.time(), exit_code=128 + killed, signal=killed))


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
