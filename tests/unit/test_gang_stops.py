"""What the agents of a job do about a cancel, a notice, a stall and a failure that is repeated."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.gang_states import NOTICE, POLICY, SUCCESS, Job, failed, failure_of

from agent.gang import events
from agent.gang.step import MAX_EARLY
from cloudddp.agent.protocol.gang import Kind, Observed, PeerMessage, Report
from cloudddp.agent.protocol.jobs import Cause, Failure, Verdict
from cloudddp.agent.protocol.phases import JobPhase


@pytest.mark.parametrize("nodes", [(0,), (1,), (0, 1)], ids=str)
def test_cancel_cancels_the_job_on_all_nodes(nodes: tuple[int, ...]) -> None:
    job = Job(2, retries=5).joined()
    for node in nodes:
        job.event(node, events.StopMarked(True))
    for node in range(2):
        assert job.did(node, events.EndRanks)[0] == events.EndRanks(POLICY.stop_grace, cancelled=True)
        assert len(job.did(node, events.AnnounceStop)) == 1
        job.ended(node, Report(False, cancelled=1.0))
    assert job.verdict() == Verdict(JobPhase.CANCELLED, 130, 0)


def test_cancel_on_a_node_whose_ranks_have_finished() -> None:
    job = Job(2).joined()
    job.event(0, events.RanksChecked(succeeded=True, ended=True))
    job.ended(0, SUCCESS)
    job.event(0, events.StopMarked(True))
    job.ended(1, Report(False, cancelled=1.0))
    assert job.verdict().phase is JobPhase.CANCELLED


def test_ranks_of_all_nodes_may_save_as_long_as_a_notice_allows() -> None:
    job = Job(2, retries=3).joined()
    job.event(1, events.FailureNoticed(NOTICE, 100.0))
    saving = events.EndRanks(100.0, saving=True)
    assert [job.did(node, events.EndRanks)[0] for node in range(2)] == [saving] * 2
    job.ended(0)
    job.ended(1, Report(False, (Observed(NOTICE, 0.0),)))
    assert (job.first.cause, job.verdict().exit_code, job.verdict().refusal) == (Cause.NOTICE, 143, "")


def test_later_stop_can_only_shorten_the_grace() -> None:
    job = Job(2).joined()
    job.event(1, events.FailureNoticed(NOTICE, 100.0))
    job.event(0, events.StopMarked(True))
    assert [one.grace for one in job.did(0, events.EndRanks)] == [100.0, POLICY.stop_grace]


STALL = events.Stalled(Observed(Failure(1, Cause.STALL, rank=1, detail="no output"), 0.0, ("here",)))


def test_stall_that_is_left_alone() -> None:
    job = Job(2, leaves_stalls=True).joined()
    job.event(0, STALL)
    assert job.did(0, events.LeaveStall) == [events.LeaveStall("no output")]
    assert not any(state.is_ending for state in job.states)


def test_stall_ends_the_job_although_the_ranks_of_the_first_node_have_finished() -> None:
    job = Job(2).joined()
    job.event(0, events.RanksChecked(succeeded=True, ended=True))
    job.ended(0, SUCCESS)
    job.event(0, STALL)
    job.ended(1)
    assert job.states[0].verdict is None, "it reports again: the failure was not in its report"
    job.ended(0, Report(True, (STALL.observed,)))
    assert job.first.cause is Cause.STALL


@pytest.mark.parametrize(("stalls", "restarts"), [(True, 1), (False, 0)])
def test_stall_is_started_again_only_if_that_is_wanted(stalls: bool, restarts: int) -> None:
    job = Job(2, retries=1, stalls=stalls).joined()
    job.event(0, STALL)
    job.ended(1)
    job.ended(0, Report(False, (STALL.observed,)))
    assert job.states[0].attempt == restarts


def test_ranks_start_again_once_those_of_all_nodes_have_ended() -> None:
    job = Job(2, retries=1).joined()
    job.event(1, events.RanksChecked(failed=True))
    job.ended(1, failed(1))
    assert len(job.did(0, events.BeginAttempt)) < 2
    job.ended(0)
    for node in range(2):
        again = events.BeginAttempt(1, "restart 1: rank 1 on node 1 failed")
        assert job.did(node, events.BeginAttempt)[1:] == [again]
        assert len(job.did(node, events.StartRanks)) == 1
    job.copied()
    for node in range(2):
        job.event(node, events.RanksChecked(succeeded=True, ended=True))
        job.ended(node, SUCCESS)
    assert (job.verdict().phase, job.verdict().restarts) == (JobPhase.SUCCEEDED, 1)


def because(code: int, *lines: str, cause: Cause = Cause.RANK) -> list[Report]:
    return [Report(False, (Observed(Failure(0, cause, 0, code), 0.0, lines),))]


SYNTAX_ERROR = (
    "[rank0]: Traceback (most recent call last):",
    "[rank0]: SyntaxError: invalid syntax (model.py, line 3)",
    "terminate called without an active exception",
)
AGAIN = "it has been started again"
REFUSALS = {
    "not asked for": (0, [failed(0)], ""),
    "the same three times": (9, [failed(0)] * 3, "the same failure has occurred 3 times"),
    "at the same step": (9, [failed(0, step=120)] * 3, "the same failure has occurred 3 times at step 120"),
    "it gets further": (2, [failed(0, step=n) for n in range(3)], f"{AGAIN} 2 times within an hour"),
    "the script": (9, because(1, *SYNTAX_ERROR), "the script itself is wrong"),
    "no script": (9, because(2, "python3: can't open file 'x'"), "the script itself is wrong"),
    "usage": (9, because(2, "Usage: x", "x: error"), "the script itself is wrong"),
    "it crashed after its end": (9, because(134, cause=Cause.EXIT), ""),
    "full disk": (9, because(1, cause=Cause.DISK), ""),
    "no rank failed": (9, [Report(False, exit_code=5)], "no rank has failed by itself"),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_failure_that_would_come_again_is_not_repeated(name: str) -> None:
    retries, reports, refusal = REFUSALS[name]
    job = Job(2, retries=retries).joined()
    for report in reports:
        failure_of(job, 0, report)
        job.copied()
    found = job.verdict()
    assert (found.phase, found.restarts, found.refusal) == (JobPhase.FAILED, len(reports) - 1, refusal)


def test_restart_of_a_node_whose_ranks_run_is_ignored() -> None:
    """No agent sends it: nothing would end the ranks of the last attempt."""
    job = Job(2, retries=1).joined()
    verdict = Verdict(JobPhase.FAILED, 1, 1)
    for _ in range(2):
        job.event(0, events.MessageReceived(1, PeerMessage(Kind.RESTART, attempt=1, verdict=verdict)))
        assert job.states[0].attempt == 0
        assert len(job.did(0, events.BeginAttempt)) < 2
        job.event(0, events.RanksChecked(failed=True))  # and they are being ended


def test_restarts_are_counted_within_an_hour() -> None:
    job = Job(2, retries=1).joined()
    for number in range(3):
        failure_of(job, 0, failed(0, step=number))
        assert job.states[0].attempt == number + 1
        job.copied()
        job.now += 3601
        for node in range(2):
            job.event(node, events.Tick(dict.fromkeys(range(2), job.now), True, events.NONE_MISSING))


def test_job_that_has_lost_a_node_is_not_started_again_by_the_agents() -> None:
    job = Job(2, retries=5).joined()
    job.cut = {1}
    job.event(0, events.ConnectionClosed(1))
    assert [one.cancelled for one in job.did(0, events.EndRanks)] == [False], "a failure is no cancel"
    assert [one.cancelled for one in job.did(0, events.AnnounceStop)] == [False]
    job.ended(0)
    assert (job.verdict().restarts, job.first.cause) == (0, Cause.AGENT)


def test_message_about_the_next_attempt_waits_for_it() -> None:
    """Node 1 has begun again, and its rank has failed, before node 0 knows of the restart. A flood is not
    kept."""
    job = Job(2, retries=3).joined()
    job.event(1, events.MessageReceived(0, PeerMessage(Kind.STOP)))
    job.event(1, events.RanksEnded(failed(1)))
    heartbeat, finished = (PeerMessage(Kind.HEARTBEAT, attempt=1, finished=one) for one in (False, True))
    ends = [PeerMessage(Kind.ENDED, attempt=n, report=one) for n, one in ((1, failed(1)), (7, SUCCESS))]
    for message in [finished, ends[0], *[heartbeat] * 100, ends[1]]:
        job.event(1, events.MessageReceived(0, message))
    assert len(job.states[1].early) == MAX_EARLY
    verdict = Verdict(JobPhase.FAILED, 7, 0, Failure(1, Cause.RANK, 1, 7))
    job.event(1, events.MessageReceived(0, PeerMessage(Kind.RESTART, attempt=1, verdict=verdict)))
    assert (job.states[1].attempt, job.states[1].finished) == (1, {0})
    assert job.states[1].reports[0].report == failed(1)


def test_message_about_an_earlier_attempt_is_ignored() -> None:
    job = Job(2, retries=3).joined()
    failure_of(job, 0, failed(0))
    before = job.states[1]
    job.event(1, events.MessageReceived(0, PeerMessage(Kind.STOP, attempt=0)))
    job.event(1, events.MessageReceived(0, PeerMessage(Kind.ENDED, attempt=0, report=SUCCESS)))
    assert (job.states[1].reports, job.states[1].is_ending) == (before.reports, False)


FAULTS: dict[str, events.Event] = {
    "rank": events.RanksChecked(failed=True),
    "cancel": events.StopMarked(True),
    "signal": events.EndRequested("x"),
    "notice": events.FailureNoticed(NOTICE, 30.0),
    "done": events.RanksChecked(succeeded=True, ended=True),
    "stall": STALL,
    "copy": events.FailureNoticed(Failure(1, Cause.SNAPSHOT, detail="x")),
}


@given(
    faults=st.lists(st.tuples(st.integers(0, 3), st.sampled_from(sorted(FAULTS))), min_size=1, max_size=6),
    lost=st.sets(st.integers(0, 3), max_size=3),
    order=st.permutations(range(4)),
)
def test_nodes_that_are_left_agree_whatever_happens(
    faults: list[tuple[int, str]], lost: set[int], order: list[int]
) -> None:
    job = Job(4).joined()
    for node, name in faults:
        job.event(node, FAULTS[name])
    job.cut = set(lost)
    for node in job.working:
        for one in lost:
            job.event(node, events.ConnectionClosed(one))
    for node in order:
        if node in job.working and not job.states[node].is_ending:
            job.event(node, events.RanksChecked(succeeded=True, ended=True))
    for node in order:
        if node in job.working and not job.states[node].has_reported:
            job.ended(node)
    found = job.verdict()
    assert found.decided_by == min(job.working)
    for node in job.working:
        assert len(job.did(node, events.End)) == 1
        assert len(job.did(node, events.StartRanks)) == 1
