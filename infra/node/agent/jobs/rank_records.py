"""What the ranks of a job recorded: how each of them ended, and the training status that rank 0 reports."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Optional

from agent.jobs import phases
from agent.node import processes, store
from cloudddp.agent.protocol.codec import MAX_COUNT
from cloudddp.agent.protocol.jobs import RankRecord
from cloudddp.agent.protocol.progress import TrainingState, TrainingStatus
from cloudddp.agent.protocol.readings import MAX_METRICS

STATUS_LIMIT = 1 << 14  # bytes of a training status
LARGEST_METRIC = 1e300  # also integers may be larger than a float can be


def read(folder: Path) -> list[RankRecord]:
    records = [store.read(path, RankRecord) for _, path in phases.rank_files(folder, ".json")]
    return [record for record in records if record is not None]


def running(folder: Path) -> list[RankRecord]:
    """Return the records of the ranks that run."""
    return [one for one in read(folder) if one.exit_code is None and one.pid and processes.born(one.pid)]


def settle(folder: Path, records: Sequence[RankRecord], *, asked: bool) -> None:
    """Record an end by SIGKILL, now, of ranks whose wrapper was killed, too. `asked`: they were to end."""
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


def training_status(folder: Path) -> Optional[TrainingStatus]:
    """Return what rank 0 last reported, or None.

    A script may write anything there: unknown keys, other types and numbers that a float cannot hold are
    dropped.
    """
    report, written = _report(folder)
    found: dict[str, Any] = {}
    if report.get("state") in [state.value for state in TrainingState]:
        found["state"] = TrainingState(report["state"])
    for key, kinds in (("step", (int,)), ("steps", (int,)), ("best_accuracy", (int, float))):
        value = report.get(key)
        if isinstance(value, kinds) and not isinstance(value, bool) and -MAX_COUNT < value < MAX_COUNT:
            found[key] = value
    return TrainingStatus(reported=written, **found) if found else None


def metrics(folder: Path) -> dict[str, Optional[float]]:
    """Return the first numbers that rank 0 last reported, of any name. None for NaN and infinity."""
    numbers = [
        (name, float(value) if abs(value) < LARGEST_METRIC else None)
        for name, value in _report(folder)[0].items()
        if type(value) in (int, float)
    ]
    return dict(numbers[:MAX_METRICS])


def _report(folder: Path) -> tuple[dict[str, Any], float]:
    """Return what rank 0 last reported, and when; {} where that is not readable."""
    try:
        path = folder / store.STATUS_FILE
        report = json.loads(store.read_bytes(path, STATUS_LIMIT))
        return (report if isinstance(report, dict) else {}), phases.modified(path)
    except (OSError, ValueError, RecursionError):
        return {}, 0.0
