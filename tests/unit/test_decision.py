"""The verdict of a job from the reports of its nodes: a table."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from agent.decision import Arrived, Seen, verdict
from cloudddp.agent.protocol.gang import Observed, Report
from cloudddp.agent.protocol.phases import JobPhase
from cloudddp.agent.protocol.verdict import Cause, Failure, Verdict

RANK_1 = Failure(1, Cause.RANK, 1, 7)
RANK_2 = Failure(2, Cause.RANK, 2, 3)
SILENT_2 = Failure(2, Cause.SILENT, peer=0)
LAUNCHER_0 = Failure(0, Cause.LAUNCHER, exit_code=1)


def report(
    *failures: tuple[float, Failure], cancelled: float | None = None, code: int | None = None
) -> Report:
    """A report with failures, each so many seconds ago; one without failures, cancel and exit code is a success."""
    observed = tuple(Observed(failure, ago, (f"rank {failure.rank}",)) for ago, failure in failures)
    return Report(not observed and cancelled is None and code is None, observed, cancelled, code)


def case(
    name: str, reports: dict[int, tuple[float, Report]], expected: Verdict, *seen: tuple[float, Failure]
) -> Any:
    """A row: reports by node with the time when they came, and failures that were seen, with their times."""
    return pytest.param(
        {node: Arrived(at, one) for node, (at, one) in reports.items()},
        [Seen(at, Observed(failure, 0.0)) for at, failure in seen],
        expected,
        id=name,
    )


SUCCEEDED = Verdict(JobPhase.SUCCEEDED, 0, 0)
CANCELLED = Verdict(JobPhase.CANCELLED, 130, 0)
FAILED_1 = Verdict(JobPhase.FAILED, 7, 0, RANK_1, ("rank 1",))


@pytest.mark.parametrize(
    ("reports", "seen", "expected"),
    [
        case("all succeeded", {0: (10, report()), 1: (20, report())}, SUCCEEDED),
        case("one node failed", {0: (10, report(code=143)), 1: (10, report((1.0, RANK_1)))}, FAILED_1),
        case("one node has ended without success", {0: (10, report()), 1: (10, report(code=1))}, Verdict(JobPhase.FAILED, 1, 0)),
        case("nobody has an exit code", {0: (10, Report(False))}, Verdict(JobPhase.FAILED, 1, 0)),
        case(
            "two failures: the earlier one, although its report came later",
            {1: (30, report((21.0, RANK_1))), 2: (10, report((0.5, RANK_2)))}, FAILED_1,
        ),
        case(
            "two failures: the earlier one, although its report came earlier",
            {1: (10, report((1.0, RANK_1))), 2: (30, report((20.0, RANK_2)))}, FAILED_1,
        ),
        case("two failures in one report", {1: (10, report((1.0, RANK_2), (2.0, RANK_1)))}, FAILED_1),
        case(
            "a node was lost", {0: (10, report(code=143))}, Verdict(JobPhase.FAILED, 1, 0, SILENT_2), (5.0, SILENT_2),
        ),
        case("a rank failed before a node was lost", {1: (10, report((6.0, RANK_1)))}, FAILED_1, (5.0, SILENT_2)),
        case(
            "a node was lost before a rank failed because of it",
            {1: (10, report((4.0, RANK_1)))}, Verdict(JobPhase.FAILED, 1, 0, SILENT_2), (5.0, SILENT_2),
        ),
        case("cancelled", {0: (10, report(cancelled=2.0, code=143)), 1: (10, report(code=143))}, CANCELLED),
        case("cancelled on all nodes", {0: (10, report(cancelled=2.0)), 1: (11, report(cancelled=2.0))}, CANCELLED),
        case(
            "cancelled before a launcher failed because of it",
            {0: (10, report((1.0, LAUNCHER_0), cancelled=1.5)), 1: (10, report(cancelled=1.0))}, CANCELLED,
        ),
        case("cancelled at the moment of a failure", {0: (10, report((1.0, LAUNCHER_0), cancelled=1.0))}, CANCELLED),
        case("cancelled before a node was lost", {0: (10, report(cancelled=9.0))}, CANCELLED, (5.0, SILENT_2)),
        case("failed before it was cancelled", {0: (10, report(cancelled=1.0)), 1: (10, report((2.0, RANK_1)))}, FAILED_1),
        case(
            "every rank was asked to stop, and has saved",
            {0: (10, report(code=143)), 1: (10, report(code=143))}, Verdict(JobPhase.FAILED, 143, 0),
        ),
        case(
            "one rank had not saved when it was killed, another had",
            {0: (10, report(code=137)), 1: (10, report(code=143))}, Verdict(JobPhase.FAILED, 143, 0),
        ),
        case(
            "a failure without an exit code", {0: (10, report((1.0, Failure(0, Cause.AGENT))))},
            Verdict(JobPhase.FAILED, 1, 0, Failure(0, Cause.AGENT), ("rank None",)),
        ),
    ],
)  # fmt: skip
def test_verdict(reports: dict[int, Arrived], seen: list[Seen], expected: Verdict) -> None:
    for order in itertools.permutations(reports):  # nor does the order in which they are looked at matter
        assert verdict(0, {node: reports[node] for node in order}, seen) == expected


def test_verdict_names_the_node_that_decided() -> None:
    assert verdict(3, {3: Arrived(1.0, report())}, []).decided_by == 3
