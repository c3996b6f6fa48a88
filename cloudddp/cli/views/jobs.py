"""The jobs of a cluster, as a table and as JSON."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

from cloudddp.agent.protocol.copies import Copied, CopyPhase
from cloudddp.agent.protocol.progress import Straggler, ToleratedStall, TrainingStatus, current_stragglers
from cloudddp.cluster.nodes_end import NodesEnd
from cloudddp.errors import Message, inert, q
from cloudddp.formats import duration, plural, table, width_of
from cloudddp.job.status import JobRecord
from cloudddp.text import node_list, one_line, size_of

_WIDE = 100  # columns of a terminal that has room for sentences in a table
_SHOWN = 300  # characters of a job's command line in the table
STALE = 60.0  # seconds after which the age of the last training report is shown


def jobs_table(known: Sequence[JobRecord]) -> str:
    narrow = 0 < width_of(sys.stdout) < _WIDE
    rows = [
        (
            record.id,
            state_text(record),
            "-" if record.exit_code is None else str(record.exit_code),
            "-" if record.seconds is None else duration(record.seconds),
            _training(record, narrow=narrow),
            one_line(record.script, _SHOWN)
            + (f" (resumed from {record.resumed_from})" if record.resumed_from else ""),
        )
        for record in known
    ]
    header = ("JOB", "STATE", "EXIT", "TIME", "TRAINING", "SCRIPT")
    # The state of a job says as much as its exit code, unless it has failed.
    redundant = () if any(record.exit_code for record in known) else ("EXIT",)
    spare = ("EXIT",) if not redundant else ()
    return table(header, rows, redundant=redundant, elastic=("SCRIPT", "TRAINING"), spare=spare)


def state_text(record: JobRecord) -> str:
    if record.setup and record.status.ended:
        return f"{record.status} in setup"
    restarts = f", {plural(record.restarts, 'restart')}" if record.restarts else ""
    return record.status + (", stalled" if record.stalled else "") + restarts


def ending(known: Sequence[JobRecord], end: NodesEnd) -> str:
    """Return when the nodes end because of a job, or ''. `end`: as far as this computer knows."""
    for record in reversed(known):
        grace = record.poweroff if record.grace is None and not record.status.ended else record.grace
        if grace is not None:
            used = None if record.grace is None else time.time() - record.unused
            return replace(end, grace=grace, why=f"--keep of job {record.id}", used=used).sentence
    return ""


def troubles(known: Sequence[JobRecord]) -> list[str]:
    """Return sentences about stragglers and stalls of jobs that run, and why the newest one has failed."""
    found: list[str] = []
    for record in known:
        if record.stalled is not None:
            found.append(stalled(record.id, record.stalled))
        if not record.status.ended:
            for straggler in current_stragglers(record.stragglers):
                length = duration(time.time() - straggler.since)
                found.append(f"job {record.id}: {straggler.text} on node {straggler.node}, for {length}")
    if known and known[-1].cause:
        found.append(f"job {known[-1].id} {known[-1].status}: {known[-1].cause}")
    if known and known[-1].rebooted:
        found.append(after_reboot(known[-1].id, known[-1].rebooted))
    return found


def after_reboot(job_id: str, nodes: Sequence[int]) -> str:
    """Return what to do after nodes were rebooted while a job ran."""
    runs = "runs" if len(nodes) == 1 else "run"
    return Message(
        f"{node_list(nodes)} {runs} again, and keeps what is on its disk: `cloudddp resume {q(job_id)}` "
        "starts the job again"
    )


def stalled(job_id: str, stall: ToleratedStall) -> str:
    """Return since when a job does nothing, and where its ranks are."""
    length = duration(time.time() - stall.since)
    return Message(
        f"job {job_id} stalled {length} ago and was left alone (on_stall = leave): {inert(stall.detail)}; "
        f"`cloudddp stacks {q(job_id)}` shows where each rank is now, `cloudddp cancel {q(job_id)}` ends it"
    )


def copies(known: Sequence[JobRecord]) -> list[str]:
    """Return what the nodes have copied to S3 of the newest job that has ended, one line per node."""
    newest = next((one for one in reversed(known) if one.copied), None)
    if newest is None:
        return []
    return [f"job {newest.id}, node {node}: {copied_text(copied)}" for node, copied in newest.copied]


def copied_text(copied: Copied) -> str:
    """Return what a node has copied to S3, in words. A node wrote the text."""
    url = one_line(copied.url, 1200)
    if copied.phase is CopyPhase.COPYING:
        of = f"{copied.files} of {copied.expected} files" if copied.expected else "results"
        return f"copying {of} to {url}"
    what = f"{plural(copied.files, 'file')}, {size_of(copied.size)}, copied to {url}"
    if copied.phase is CopyPhase.COMPLETE:
        return what
    why = copied.error or "; ".join(copied.notes)
    of = f"{copied.files} of {copied.expected} files to {url}"
    return f"not all results were copied: {of}: {one_line(why, 500)}"


def jobs_json(known: Sequence[JobRecord]) -> list[dict[str, Any]]:
    return [_job_json(record) for record in known]


def _training(record: JobRecord, *, narrow: bool) -> str:
    """Return the progress of the training, the age of an old report, and the ranks that are slow."""
    slow = [
        f"rank {straggler.rank} ({straggler.ratio:.1f} x)"
        for straggler in current_stragglers(record.stragglers)
    ]
    behind = f"straggler{'s' * (len(slow) > 1)}: {', '.join(slow)}" if slow else ""
    return "; ".join(part for part in (_progress(record, narrow=narrow), behind) if part) or "-"


def _progress(record: JobRecord, *, narrow: bool) -> str:
    training = record.training
    if training is None or not training.text:
        return ""
    text = _short(training) if narrow else training.text
    if training.preempted:
        return f"{text}, snapshot saved"
    age = time.time() - training.reported
    stale = not record.status.ended and age > STALE
    return text + (f", {duration(age)} ago" if stale else "")


def _short(training: TrainingStatus) -> str:
    """Return `120/3000, best 0.9861`: the accuracy would be what a narrow column cuts off."""
    steps = "/".join(str(one) for one in (training.step, training.steps) if one is not None)
    best = "" if training.best_accuracy is None else f"best {training.best_accuracy:.4f}"
    return ", ".join(part for part in (steps, best) if part)


def _job_json(record: JobRecord) -> dict[str, Any]:
    stall, training = record.stall, record.training
    return {
        "id": record.id,
        "state": record.status,
        "exit_code": record.exit_code,
        "script": record.script,
        "started": iso(record.started),
        "ended": iso(record.ended),
        "nodes": list(record.nodes),
        "rank_zero_node": record.rank_zero,
        "training": training and _training_json(training),
        "nodes_end": None if record.grace is None else iso(time.time() - record.unused + record.grace),
        "nodes_end_after_seconds": record.poweroff,
        "resumed_from": record.resumed_from or None,
        "stragglers": [_straggler_json(straggler) for straggler in record.stragglers],
        "stall": stall and {"since": iso(stall.since), "until": iso(stall.until), "detail": stall.detail},
        "setup": record.setup,
        "restarts": record.restarts,
        "cause": record.cause or None,
        "copied": [
            {
                "node": node,
                "url": one.url,
                "state": one.phase.value,
                "files": one.files,
                "bytes": one.size,
                "expected_files": one.expected,
                "left_out": one.left_out,
                "error": one.error or None,
                "notes": list(one.notes),
            }
            for node, one in record.copied
        ],
    }


def _straggler_json(one: Straggler) -> dict[str, Any]:
    return {
        "rank": one.rank,
        "node": one.node,
        "times_median": round(one.ratio, 2),
        "seconds_per_step": one.seconds,
        "median_seconds_per_step": one.median,
        "measured": "work" if one.own else "interval",
        "since_step": one.step,
        "since": iso(one.since),
        "until": iso(one.until),
    }


def _training_json(training: TrainingStatus) -> dict[str, Any]:
    return {
        "state": training.state and training.state.value,
        "step": training.step,
        "steps": training.steps,
        "best_accuracy": training.best_accuracy,
        "reported": iso(training.reported),
    }


def iso(seconds: float | None) -> str | None:
    return None if seconds is None else datetime.fromtimestamp(seconds, UTC).isoformat(timespec="seconds")
