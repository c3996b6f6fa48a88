"""The jobs of a cluster, written as a table or as JSON with stable keys (docs/tour.md)."""

from __future__ import annotations

import time
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import click

from cloudddp.cli.say import duration, note, print_json, table

if TYPE_CHECKING:
    from cloudddp.job import JobRecord
    from cloudddp.standing import Standing

SILENT = 60.0  # seconds after which the age of a training's last word is said


def show(known: list[JobRecord], *, as_json: bool) -> None:
    """Print the jobs as a table for people, or as JSON."""
    if as_json:
        print_json([_job_json(record) for record in known])
        return
    if not known:
        note("no jobs")
        return
    rows = [
        (
            r.id,
            r.state,
            "-" if r.exit_code is None else str(r.exit_code),
            duration(r.seconds) if r.started else "-",
            _told(r),
            r.script,
        )
        for r in known
    ]
    header = ("JOB", "STATE", "EXIT", "TIME", "TRAINING", "SCRIPT")
    click.echo(table(header, rows, elastic=("SCRIPT", "TRAINING"), spare=("EXIT",)))


def _told(record: JobRecord) -> str:
    """Where the training is; of a running job also how long ago it said so, since a hang looks like that."""
    if record.standing is None or not record.standing.text:
        return "-"
    if record.standing.preempted:
        return f"{record.standing.text}, snapshot saved"
    ago = time.time() - record.standing.told
    silent = record.ended is None and ago > SILENT
    return record.standing.text + (f", {duration(ago)} ago" if silent else "")


def _job_json(record: JobRecord) -> dict[str, Any]:
    return {
        "id": record.id,
        "state": record.state,
        "exit_code": record.exit_code,
        "script": record.script,
        "started": _iso(record.started),
        "ended": _iso(record.ended),
        "nodes": list(record.nodes),
        "rank_zero_node": record.rank_zero,
        "training": _training_json(record.standing),
    }


def _training_json(standing: Standing | None) -> dict[str, Any] | None:
    if standing is None:
        return None
    return {
        "state": standing.state,
        "step": standing.step,
        "steps": standing.steps,
        "best_accuracy": standing.best_accuracy,
        "told": _iso(standing.told),
    }


def _iso(seconds: float | None) -> str | None:
    return None if seconds is None else datetime.fromtimestamp(seconds, UTC).isoformat(timespec="seconds")
