"""How a job goes on: by how it ended, what AWS and SSH show, and what the command may do."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from cloudddp.job.follow.verdict import JobResult
from cloudddp.job.next_attempt import Do, Policy, Reason, Seen, next_attempt
from cloudddp.job.outcome import JobStatus
from cloudddp.job.status import JobRecord

RESUME = Policy(1, waits=False, silence=15, unlisted=15, unnoticed=35)
WATCH = Policy(2, waits=True, silence=300, unlisted=15, unnoticed=35)
SPENT = replace(WATCH, times=0)


def record(job: str = "a", status: JobStatus = JobStatus.FAILED, **more: Any) -> JobRecord:
    return JobRecord(job, status, 1, "train.py", 1.0, 2.0, (0, 1), 0, 2, **more)


def ended(status: JobStatus = JobStatus.FAILED, **more: Any) -> JobResult:
    return JobResult("a", status, 0 if status is JobStatus.SUCCEEDED else 1, **more)


def seen(**changed: Any) -> Seen:
    """Return a look at the failed job `a` on two nodes that run; as changed."""
    return replace(Seen(job=record(), nodes=frozenset((0, 1))), **changed)


LOST = ended(lost=(1,), lost_reasons=("",))
LATER = {"later": record("b", JobStatus.RUNNING)}
RUNS = {"job": record(status=JobStatus.RUNNING)}
SILENT = {"silent": {1: "node 1: timeout"}}
ONE = {"nodes": frozenset((0,)), "gone": True}
LEAVES = ended(JobStatus.PREEMPTED, leaving=1)
TABLE = [
    # Before a look: whether the job can be started again at all.
    ("never followed", None, None, RESUME, Do.LOOK),
    ("resumed and detached", None, None, replace(RESUME, times=0), Do.FINISH),
    ("to be watched", None, None, SPENT, Do.LOOK),
    ("failed", ended(), None, WATCH, Do.LOOK),
    ("failed too often", LOST, None, SPENT, Do.FINISH),
    ("preempted", LEAVES, None, WATCH, Do.LOOK),
    ("agents have ended", ended(JobStatus.LOST), None, WATCH, Do.LOOK),
    *(
        (status, ended(status), None, WATCH, Do.FINISH)
        for status in (JobStatus.SUCCEEDED, JobStatus.CANCELLED, JobStatus.UNKNOWN, JobStatus.RUNNING)
    ),
    # Other commands.
    ("another command is at it", LOST, seen(busy=True), WATCH, Do.WAIT_FOR_COMMAND),
    ("the same, for a moment", None, seen(busy=True), RESUME, Do.WAIT),
    ("the same, for longer", None, seen(busy=True, waited=6), RESUME, Reason.BUSY),
    ("another command has resumed it", LOST, seen(**LATER), WATCH, (Do.FOLLOW, "b")),
    ("the same, by hand", None, seen(**LATER), RESUME, Reason.RESUMED),
    # To be followed.
    ("it runs", None, seen(**RUNS), WATCH, (Do.FOLLOW, "a")),
    ("a node is silent", None, seen(**SILENT), WATCH, (Do.FOLLOW, "a")),
    ("no node knows it", None, seen(job=None), WATCH, Reason.NOT_STARTED),
    ("the nodes are others", None, seen(job=None, known=False, gone=True), WATCH, Reason.NOT_STARTED),
    ("the cluster is gone", None, Seen(), WATCH, Reason.REMOVED),
    # `watch`: only a loss counts.
    ("no loss", ended(), seen(), WATCH, Do.FINISH),
    ("an instance has ended", ended(), seen(**ONE), WATCH, Do.START),
    ("all have ended", LOST, Seen(), WATCH, Do.FINISH),
    ("EC2 may not know yet", LOST, seen(waited=14), WATCH, Do.WAIT),
    ("the others have lost it", ended(suspect=1), seen(), WATCH, Do.WAIT),
    ("EC2 says that it runs", LOST, seen(waited=16), WATCH, Do.FINISH),
    ("it may be rebooting", LOST, seen(**SILENT, waited=299), WATCH, Do.WAIT),
    ("it is silent for too long", LOST, seen(**SILENT, waited=301), WATCH, Do.FINISH),
    ("one is gone, one is silent", LOST, seen(**ONE, silent={0: ""}, waited=299), WATCH, Do.WAIT),
    ("and stays silent", LOST, seen(**ONE, silent={0: ""}, waited=301), WATCH, Reason.SILENT),
    ("rebooted", ended(rebooted=(1,)), seen(), WATCH, Do.START),
    ("rebooted, as the others say", LOST, seen(job=record(rebooted=(1,))), WATCH, Do.START),
    ("AWS ends a node", LEAVES, seen(announced=True, ending=frozenset((1,))), WATCH, (Do.START, {1})),
    ("AWS has ended it", LEAVES, seen(**ONE, announced=True), WATCH, Do.START),
    ("the deadline ends a node", LEAVES, seen(), WATCH, Do.FINISH),
    ("the deadline has ended it", LEAVES, seen(**ONE), WATCH, Do.FINISH),
    ("the others have not noticed", LOST, seen(**ONE, **RUNS, waited=34), WATCH, Do.WAIT),
    # `resume`: whatever has ended it.
    ("a failure without a loss", None, seen(), RESUME, Do.START),
    ("cancelled", None, seen(job=record(status=JobStatus.CANCELLED)), RESUME, Do.START),
    ("a lost node", None, seen(**ONE), RESUME, Do.START),
    ("no node is left that ran it", None, seen(job=None, known=False, gone=True), RESUME, Do.START),
    ("AWS ends a node", None, seen(announced=True, ending=frozenset((1,))), RESUME, (Do.START, {1})),
    ("asked for", None, seen(), replace(RESUME, replaced=frozenset((0,))), (Do.START, {0})),
    ("it has succeeded", None, seen(job=record(status=JobStatus.SUCCEEDED)), RESUME, Reason.SUCCEEDED),
    ("it was never started", None, seen(job=None), RESUME, Reason.NOT_STARTED),
    ("it runs", None, seen(**RUNS), RESUME, Reason.RUNNING),
    ("they will never notice", None, seen(**ONE, **RUNS, waited=36), RESUME, Reason.RUNNING),
    ("a silent node", None, seen(**SILENT), RESUME, Do.WAIT),
    ("silent, and EC2 says that it runs", None, seen(**SILENT, waited=16), RESUME, Reason.SILENT),
    ("the cluster is gone", None, Seen(), RESUME, Reason.REMOVED),
    # An attempt that has failed.
    ("at another loss", LOST, seen(**ONE, broken=True), WATCH, Do.START),
    ("without a loss", LOST, seen(broken=True, waited=16), WATCH, Reason.BROKEN),
    ("no capacity", LOST, seen(**ONE, shortage="none"), WATCH, Reason.NO_CAPACITY),
    ("enough", LOST, seen(**ONE, shortage="none"), replace(WATCH, nodes_min=1), Do.START_ON_FEWER),
    ("too few", None, seen(**ONE, shortage="none"), replace(RESUME, nodes_min=2), Reason.NO_CAPACITY),
    ("the last attempt", LOST, seen(**ONE, shortage="none"), SPENT, Reason.NO_CAPACITY),
    ("none is left", LOST, seen(nodes=frozenset(), shortage="none"), WATCH, Do.FINISH),
]


@pytest.mark.parametrize(("case", "result", "look", "policy", "expected"), TABLE)
def test_next_attempt(
    case: str, result: JobResult | None, look: Seen | None, policy: Policy, expected: Any
) -> None:
    action = next_attempt("a", result, look, policy)
    if isinstance(expected, Reason):
        assert (action.do, action.reason) == (Do.GIVE_UP, expected), case
        assert action.text, case
        return
    do, more = expected if isinstance(expected, tuple) else (expected, None)
    assert action.do is do, (case, action)
    if isinstance(more, str):
        assert action.job == more
    elif more is not None:
        assert action.replaced == more


def test_texts() -> None:
    """What a user reads, and types next."""
    again = next_attempt("a", None, seen(later=record("b")), RESUME)
    assert again.text == "job a was resumed before, as b (failed)"
    assert "`cloudddp resume b`" in again.hint
    assert "`cloudddp logs -f b`" in next_attempt("a", None, seen(**LATER), RESUME).hint
    silent = next_attempt("a", None, seen(silent={0: "x", 2: "y"}, waited=99), RESUME)
    assert silent.text == "EC2 says that nodes 0, 2 run, and they do not answer: x; y"
    assert "resume --replace 0 --replace 2`" in silent.hint
    fewer = next_attempt("a", None, seen(**ONE, shortage="node 1 could not be replaced: none"), RESUME)
    assert fewer.text == "node 1 could not be replaced: none; 1 node left"
    assert "--nodes-min 1" in fewer.hint
    for result, why in (
        (LOST, "has lost a node"),
        (LEAVES, "is about to lose node 1"),
        (ended(rebooted=(0, 1)), "ended with the reboot of nodes 0, 1"),
    ):
        assert (
            next_attempt("a", result, seen(**ONE, announced=True), WATCH).text == f"job a {why}; resuming it"
        )
