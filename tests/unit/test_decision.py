"""The verdict of a job from the reports of its nodes: a table."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from agent.gang.decision import TimedReport, verdict
from agent.ranks.causes import TimedFailure
from cloudddp.agent.protocol.gang import Observed, Report
from cloudddp.agent.protocol.jobs import Cause, Exited, Failure, Verdict
from cloudddp.agent.protocol.phases import JobPhase

RANK_1 = Failure(1, Cause.RANK, 1, 7)
RANK_2 = Failure(2, Cause.RANK, 2, 3)
SILENT_2 = Failure(2, Cause.SILENT, peer=0)
LAUNCHER_0 = Failure(0, Cause.LAUNCHER, exit_code=1)


def report(
    *failures: tuple[float, Failure], cancelled: float | None = None, code: int | None = None
) -> Report:
    """A report with failures, each so many seconds ago; one without failures, cancel and exit code is a
    success."""
    observed = tuple(Observed(failure, ago, (f"rank {failure.rank}",)) for ago, failure in failures)
    return Report(not observed and cancelled is None and code is None, observed, cancelled, code)


def case(
    name: str, reports: dict[int, tuple[float, Report]], expected: Verdict, *seen: tuple[float, Failure]
) -> Any:
    """A row: reports by node with the time when they came, and failures that were seen, with their times."""
    return pytest.param(
        {node: TimedReport(at, one) for node, (at, one) in reports.items()},
        [TimedFailure(at, Observed(failure, 0.0)) for at, failure in seen],
        expected,
        id=name,
    )


RESET = Observed(
    Failure(1, Cause.RANK, 1, 1), 2.0, ("RuntimeError: Connection closed by peer [10.0.0.7]:4711",)
)
OWN = Observed(RANK_1, 2.0, ("ValueError: the loss is nan",))
KILLED = Failure(2, Cause.RANK, 2, 137, 9)
STALLED = Failure(0, Cause.STALL, detail="no output")


SUCCEEDED = Verdict(JobPhase.SUCCEEDED, 0, 0)
CANCELLED = Verdict(JobPhase.CANCELLED, 130, 0)
FAILED_1 = Verdict(JobPhase.FAILED, 7, 0, RANK_1, ("rank 1",))
LOSS, OF_LOSS = (5.0, SILENT_2), Verdict(JobPhase.FAILED, 1, 0, SILENT_2)


@pytest.mark.parametrize(
    ("reports", "seen", "expected"),
    [
        case("all succeeded", {0: (10, report()), 1: (20, report())}, SUCCEEDED),
        case("one node failed", {0: (10, report(code=143)), 1: (10, report((1.0, RANK_1)))}, FAILED_1),
        case("no success", {0: (10, report()), 1: (10, report(code=1))}, Verdict(JobPhase.FAILED, 1, 0)),
        case(
            "two failures: the earlier one, although its report came later",
            {1: (30, report((21.0, RANK_1))), 2: (10, report((0.5, RANK_2)))},
            FAILED_1,
        ),
        case("two failures in one report", {1: (10, report((1.0, RANK_2), (2.0, RANK_1)))}, FAILED_1),
        case("a node was lost", {0: (10, report(code=143))}, OF_LOSS, LOSS),
        case("a rank failed before a node was lost", {1: (10, report((6.0, RANK_1)))}, FAILED_1, LOSS),
        case("a rank failed because of it", {1: (10, report((4.0, RANK_1)))}, OF_LOSS, LOSS),
        case("cancelled", {0: (10, report(cancelled=2.0, code=143)), 1: (10, report(code=143))}, CANCELLED),
        case(
            "cancelled before a launcher failed because of it",
            {0: (10, report((1.0, LAUNCHER_0), cancelled=1.5)), 1: (10, report(cancelled=1.0))},
            CANCELLED,
        ),
        case("cancelled before a node was lost", {0: (10, report(cancelled=9.0))}, CANCELLED, LOSS),
        case(
            "failed before it was cancelled",
            {0: (10, report(cancelled=1.0)), 1: (10, report((2.0, RANK_1)))},
            FAILED_1,
        ),
        case(
            "every rank was asked to stop, and has saved",
            {0: (10, report(code=143)), 1: (10, report(code=143))},
            Verdict(JobPhase.FAILED, 143, 0),
        ),
        case(
            "a failure without an exit code",
            {0: (10, report((1.0, Failure(0, Cause.AGENT))))},
            Verdict(JobPhase.FAILED, 1, 0, Failure(0, Cause.AGENT), ("rank None",)),
        ),
    ],
)
def test_verdict(reports: dict[int, TimedReport], seen: list[TimedFailure], expected: Verdict) -> None:
    for order in itertools.permutations(reports):  # nor does the order in which they are looked at matter
        assert verdict(0, {node: reports[node] for node in order}, seen) == expected


def test_verdict_names_the_node_that_decided() -> None:
    assert verdict(3, {3: TimedReport(1.0, report())}, []).decided_by == 3


@pytest.mark.parametrize(
    ("first", "exits", "expected"),
    [
        (RESET, {}, None),
        (RESET, {0: 5.0}, Exited(0, 0, 3.0, likely=True)),  # before a lost connection
        (OWN, {0: 5.0}, Exited(0, 0, 3.0)),
        (OWN, {0: 1.8}, None),
        (RESET, {0: 0.5}, None),  # long after it
        (RESET, {3: 5.0, 0: 6.0, 2: 1.0}, Exited(0, 0, 4.0, 1, likely=True)),
        (Observed(STALLED, 2.0), {0: 602.0}, Exited(0, 0, 600.0, likely=True)),
    ],
)
def test_rank_that_has_exited_with_0(
    first: Observed, exits: dict[int, float], expected: Exited | None
) -> None:
    """`exits`: how many seconds ago."""
    done = Report(True, exits=tuple(Exited(0, rank, ago) for rank, ago in exits.items()))
    found = verdict(0, {0: TimedReport(10, done), 1: TimedReport(10, Report(False, (first,)))}, []).first
    assert found is not None
    assert found.exited == expected


@pytest.mark.parametrize(
    ("ago", "first"), [(1.9, 2), (1.5, 2), (1.0, 1)], ids=["at once", "within the time to end", "much later"]
)
def test_lost_connection_is_a_consequence_of_the_failure_that_follows(ago: float, first: int) -> None:
    observed = {1: RESET, 2: Observed(KILLED, ago)}
    found = verdict(
        0, {node: TimedReport(10, Report(False, (one,))) for node, one in observed.items()}, []
    ).first
    assert found is not None
    assert found.rank == first
