"""The verdict of a job from the reports of its nodes: a table."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from agent.gang.decision import Arrived, Seen, verdict
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
        {node: Arrived(at, one) for node, (at, one) in reports.items()},
        [Seen(at, Observed(failure, 0.0)) for at, failure in seen],
        expected,
        id=name,
    )


RESET = Observed(
    Failure(1, Cause.RANK, 1, 1), 2.0, ("RuntimeError: Connection closed by peer [10.0.0.7]:4711",)
)
OWN = Observed(RANK_1, 2.0, ("ValueError: the loss is nan",))
KILLED = Failure(2, Cause.RANK, 2, 137, 9)
STALLED = Failure(0, Cause.STALL, detail="no output")


def exited(node: int, rank: int, ago: float) -> Exited:
    return Exited(node, rank, ago)


SUCCEEDED = Verdict(JobPhase.SUCCEEDED, 0, 0)
CANCELLED = Verdict(JobPhase.CANCELLED, 130, 0)
FAILED_1 = Verdict(JobPhase.FAILED, 7, 0, RANK_1, ("rank 1",))


@pytest.mark.parametrize(
    ("reports", "seen", "expected"),
    [
        case("all succeeded", {0: (10, report()), 1: (20, report())}, SUCCEEDED),
        case("one node failed", {0: (10, report(code=143)), 1: (10, report((1.0, RANK_1)))}, FAILED_1),
        case(
            "one node has ended without success",
            {0: (10, report()), 1: (10, report(code=1))},
            Verdict(JobPhase.FAILED, 1, 0),
        ),
        case("nobody has an exit code", {0: (10, Report(False))}, Verdict(JobPhase.FAILED, 1, 0)),
        case(
            "two failures: the earlier one, although its report came later",
            {1: (30, report((21.0, RANK_1))), 2: (10, report((0.5, RANK_2)))},
            FAILED_1,
        ),
        case(
            "two failures: the earlier one, although its report came earlier",
            {1: (10, report((1.0, RANK_1))), 2: (30, report((20.0, RANK_2)))},
            FAILED_1,
        ),
        case("two failures in one report", {1: (10, report((1.0, RANK_2), (2.0, RANK_1)))}, FAILED_1),
        case(
            "a node was lost",
            {0: (10, report(code=143))},
            Verdict(JobPhase.FAILED, 1, 0, SILENT_2),
            (5.0, SILENT_2),
        ),
        case(
            "a rank failed before a node was lost",
            {1: (10, report((6.0, RANK_1)))},
            FAILED_1,
            (5.0, SILENT_2),
        ),
        case(
            "a node was lost before a rank failed because of it",
            {1: (10, report((4.0, RANK_1)))},
            Verdict(JobPhase.FAILED, 1, 0, SILENT_2),
            (5.0, SILENT_2),
        ),
        case("cancelled", {0: (10, report(cancelled=2.0, code=143)), 1: (10, report(code=143))}, CANCELLED),
        case(
            "cancelled on all nodes",
            {0: (10, report(cancelled=2.0)), 1: (11, report(cancelled=2.0))},
            CANCELLED,
        ),
        case(
            "cancelled before a launcher failed because of it",
            {0: (10, report((1.0, LAUNCHER_0), cancelled=1.5)), 1: (10, report(cancelled=1.0))},
            CANCELLED,
        ),
        case(
            "cancelled at the moment of a failure",
            {0: (10, report((1.0, LAUNCHER_0), cancelled=1.0))},
            CANCELLED,
        ),
        case(
            "cancelled before a node was lost", {0: (10, report(cancelled=9.0))}, CANCELLED, (5.0, SILENT_2)
        ),
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
            "one rank had not saved when it was killed, another had",
            {0: (10, report(code=137)), 1: (10, report(code=143))},
            Verdict(JobPhase.FAILED, 143, 0),
        ),
        case(
            "a failure without an exit code",
            {0: (10, report((1.0, Failure(0, Cause.AGENT))))},
            Verdict(JobPhase.FAILED, 1, 0, Failure(0, Cause.AGENT), ("rank None",)),
        ),
    ],
)
def test_verdict(reports: dict[int, Arrived], seen: list[Seen], expected: Verdict) -> None:
    for order in itertools.permutations(reports):  # nor does the order in which they are looked at matter
        assert verdict(0, {node: reports[node] for node in order}, seen) == expected


def test_verdict_names_the_node_that_decided() -> None:
    assert verdict(3, {3: Arrived(1.0, report())}, []).decided_by == 3


@pytest.mark.parametrize(
    ("first", "exits", "expected"),
    [
        pytest.param(RESET, [], None, id="no rank has exited"),
        pytest.param(
            RESET, [exited(0, 0, 5.0)], Exited(0, 0, 3.0, likely=True), id="before a lost connection"
        ),
        pytest.param(OWN, [exited(0, 0, 5.0)], Exited(0, 0, 3.0), id="before a failure of another kind"),
        pytest.param(OWN, [exited(0, 0, 1.8)], None, id="after a failure of another kind"),
        pytest.param(
            RESET,
            [exited(0, 0, 1.8)],
            Exited(0, 0, 0.0, likely=True),
            id="shortly after the connection that it closed",
        ),
        pytest.param(RESET, [exited(0, 0, 0.5)], None, id="long after a lost connection"),
        pytest.param(
            RESET,
            [exited(0, 3, 5.0), exited(0, 0, 6.0), exited(0, 2, 1.0)],
            Exited(0, 0, 4.0, 1, likely=True),
            id="several",
        ),
        pytest.param(
            Observed(STALLED, 2.0),
            [exited(0, 0, 602.0)],
            Exited(0, 0, 600.0, likely=True),
            id="before a stall",
        ),
        pytest.param(
            Observed(Failure(1, Cause.STALL, 1), 2.0),
            [exited(0, 0, 602.0)],
            Exited(0, 0, 600.0),
            id="before a stall that another rank explains",
        ),
        pytest.param(Observed(SILENT_2, 2.0), [exited(0, 0, 5.0)], None, id="before a node was lost"),
    ],
)
def test_rank_that_has_exited_with_0(first: Observed, exits: list[Exited], expected: Exited | None) -> None:
    reports = {0: Arrived(10, Report(True, exits=tuple(exits))), 1: Arrived(10, Report(False, (first,)))}
    found = verdict(0, reports, []).first
    assert found is not None
    assert found.exited == expected


@pytest.mark.parametrize(
    ("ago", "first"), [(1.9, 2), (1.5, 2), (1.0, 1)], ids=["at once", "within the time to end", "much later"]
)
def test_lost_connection_is_a_consequence_of_the_failure_that_follows(ago: float, first: int) -> None:
    reports = {
        1: Arrived(10, Report(False, (RESET,))),
        2: Arrived(10, Report(False, (Observed(KILLED, ago),))),
    }
    found = verdict(0, reports, []).first
    assert found is not None
    assert found.rank == first
