"""What the agents of a job do about each fault: a table. docs/faults.md has the faults measured with real
processes; tests/node/test_gang*.py proves that the loop around the state performs the actions.
"""

from __future__ import annotations

import pytest
from support.gang_states import POLICY, STOPPED, SUCCESS, Job, failed

from agent.gang import events
from agent.gang.joining import PATIENCE
from agent.gang.step import EXIT_BARRIER, FAILURE_GRACE, FIRST_DECIDES, STUCK
from cloudddp.agent.protocol.gang import Kind, NodeFacts, Observed, PeerMessage, Report, Unreachable
from cloudddp.agent.protocol.jobs import Cause, Failure, Verdict
from cloudddp.agent.protocol.phases import JobPhase


def test_no_rank_starts_before_every_node_is_connected_to_all_and_has_sent_its_facts() -> None:
    job = Job(3)
    for node in range(3):
        job.event(node, job.tick())
        assert job.sent == []
    for node in range(3):
        assert not any(job.did(other, events.BeginAttempt) for other in range(3))
        job.event(node, events.FactsFound(NodeFacts()))
        job.event(node, job.tick())
    assert all(job.did(node, events.BeginAttempt) for node in range(3))
    assert not any(job.did(node, events.StartRanks) for node in range(3))


def test_node_that_misses_another_one_is_named_on_all() -> None:
    """Nodes 1 and 2 cannot connect; nodes 0 and 3 are connected to all, and wait for those two to say so."""
    job = Job(4)
    missing = {1: Unreachable({2: "Connection refused"}, (2,)), 2: Unreachable({1: "timed out"}, (1,))}
    for node in range(4):
        job.event(node, events.FactsFound(NodeFacts()))
        job.event(node, job.tick(is_connected=node in (0, 3), missing=missing.get(node, events.NONE_MISSING)))
    job.now = POLICY.join_by + 0.1
    for node in (0, 3):
        job.event(node, job.tick())
        assert job.states[node].verdict is None
    job.event(1, job.tick(is_connected=False, missing=missing[1]))
    assert job.first == Failure(1, Cause.UNREACHABLE, detail="Connection refused", peer=2)
    assert [one.missing.to for one in job.did(1, events.End)] == [{2: "Connection refused"}]
    assert [one.missing.to for one in job.did(3, events.End)] == [{}]


@pytest.mark.parametrize("silent", [0, 1])
def test_node_that_is_connected_and_sends_nothing_is_named(silent: int) -> None:
    job = Job(3)
    for node in range(3):
        if node != silent:
            job.event(node, events.FactsFound(NodeFacts()))
        job.event(node, job.tick())
    job.wait(POLICY.facts_by - 1)  # its disk may be cold
    assert job.states[1].verdict is None
    job.wait(PATIENCE + 2)
    expected = f"node {silent} was not ready in time (does nvidia-smi answer there?)"
    assert (job.first.cause, job.first.detail) == (Cause.PREFLIGHT, expected)


def test_nodes_that_differ_start_no_rank_and_the_first_one_decides() -> None:
    job = Job(3)
    for node in range(3):
        job.event(node, events.FactsFound(NodeFacts(driver="560" if node == 2 else "570")))
    for node in (1, 2, 0):
        job.event(node, job.tick())
    assert (job.first.node, job.first.cause) == (0, Cause.PREFLIGHT)
    assert "the NVIDIA driver differs" in job.first.detail
    assert not any(job.did(node, events.BeginAttempt) for node in range(3))


def test_node_that_is_not_the_first_decides_if_that_one_does_not() -> None:
    job = Job(2)
    for node in range(2):
        job.event(node, events.FactsFound(NodeFacts(torch=str(node))))
    job.event(1, job.tick())
    job.event(0, job.tick(is_connected=False))
    job.event(
        1, events.MessageReceived(0, PeerMessage(Kind.READY, facts=NodeFacts(torch="0"), clock=1e9 + 1.0))
    )
    job.cut = {0}
    job.wait(FIRST_DECIDES - 1)
    assert job.states[1].verdict is None
    job.wait(2)
    assert (job.first.node, job.first.cause) == (1, Cause.PREFLIGHT)


def first_of(job: Job) -> Failure:
    """What failed first, as node 0 has decided."""
    verdict = job.states[0].verdict
    assert verdict is not None
    assert verdict.first is not None
    return verdict.first


def test_clock_that_differs_is_a_problem() -> None:
    job = Job(2)
    for node in range(2):
        job.event(node, events.FactsFound(NodeFacts()))
    job.event(0, events.MessageReceived(1, PeerMessage(Kind.READY, facts=NodeFacts(), clock=1e9 + 11.0)))
    job.event(0, job.tick())
    assert "the clock of node 1 is +10 s from that of node 0" in first_of(job).detail


@pytest.mark.parametrize(
    ("event", "cause"),
    [
        (events.EndRequested("ended by SIGTERM"), Cause.AGENT),
        (
            events.MessageReceived(
                1,
                PeerMessage(
                    Kind.VERDICT, verdict=Verdict(JobPhase.FAILED, 1, 1, Failure(1, Cause.PREFLIGHT))
                ),
            ),
            Cause.PREFLIGHT,
        ),
        (events.ConnectionClosed(1), Cause.AGENT),
    ],
    ids=["signal", "verdict", "closed"],
)
def test_join_ends_with(event: events.Event, cause: Cause) -> None:
    job = Job(2)
    job.event(0, event)
    assert first_of(job).cause is cause
    assert not job.did(0, events.BeginAttempt)


@pytest.mark.parametrize("by", ["mark", "message"])
def test_cancel_while_nodes_join(by: str) -> None:
    job = Job(2)
    job.event(
        0,
        events.StopMarked(True)
        if by == "mark"
        else events.MessageReceived(1, PeerMessage(Kind.STOP, cancelled=True)),
    )
    assert [state.verdict and state.verdict.phase for state in job.states] == [JobPhase.CANCELLED] * 2
    assert not job.did(0, events.BeginAttempt)


def test_job_succeeds_once_every_rank_of_every_node_has_exited_with_0() -> None:
    job = Job(3).joined()
    for node in range(3):
        assert job.states[0].verdict is None
        job.event(node, events.RanksChecked(succeeded=True, ended=True))
        job.ended(node, SUCCESS)
    assert job.verdict() == Verdict(JobPhase.SUCCEEDED, 0, 0)
    assert not any(job.did(node, events.AnnounceStop) for node in range(3))


@pytest.mark.parametrize("node", range(3))
def test_rank_that_fails_ends_those_of_all_nodes(node: int) -> None:
    job = Job(3).joined()
    job.event(node, events.RanksChecked(failed=True))
    assert [job.did(other, events.EndRanks)[0].grace for other in range(3)] == [FAILURE_GRACE] * 3
    for other in (2, 0, 1):
        assert job.states[0].verdict is None
        job.ended(other, failed(node) if other == node else STOPPED)
    assert job.verdict() == Verdict(JobPhase.FAILED, 7, 0, Failure(node, Cause.RANK, node, 7), ("last",))


def test_ranks_go_on_after_one_that_exits_with_0() -> None:
    job = Job(2).joined()
    job.event(0, events.RanksChecked(succeeded=True, ended=True))
    job.ended(0, SUCCESS)
    job.wait(60)
    assert not job.states[1].is_ending
    job.event(1, events.RanksChecked(failed=True))
    job.ended(1, failed(1, 3))
    assert job.verdict().exit_code == 3


def test_launchers_that_wait_for_each_other_after_all_ranks_have_finished_are_ended() -> None:
    job = Job(2).joined()
    for node in range(2):
        job.event(node, events.RanksChecked(succeeded=True))
    job.wait(EXIT_BARRIER - 2)
    job.event(0, events.RanksChecked(succeeded=True))
    assert not job.states[0].is_ending
    job.wait(EXIT_BARRIER + 2)
    for node in range(2):
        job.event(node, events.RanksChecked(succeeded=True))
        job.ended(node, SUCCESS)
    assert job.verdict().phase is JobPhase.SUCCEEDED


def test_files_that_cannot_be_copied_start_no_rank() -> None:
    job = Job(2)
    for node in range(2):
        job.event(node, events.FactsFound(NodeFacts()))
        job.event(node, job.tick())
    full = Failure(1, Cause.SNAPSHOT, detail="no space")
    job.event(1, events.FailureNoticed(full))
    for node in range(2):
        job.event(node, events.Copied())
        job.ended(
            node,
            Report(False, (Observed(Failure(1, Cause.SNAPSHOT, detail="no space"), 0.0),))
            if node
            else STOPPED,
        )
    assert job.first.cause is Cause.SNAPSHOT
    assert not any(job.did(node, events.StartRanks) for node in range(2))


@pytest.mark.parametrize("lost", range(3))
def test_agent_that_ends_is_named_with_its_error(lost: int) -> None:
    job = Job(3).joined()
    for node in range(3):
        if node != lost:
            job.event(
                node, events.MessageReceived(lost, PeerMessage(Kind.CRASHED, error="OSError: no space"))
            )
    job.cut = {lost}
    for node in job.working:
        job.event(node, events.ConnectionClosed(lost))
    for node in job.working:
        job.ended(node)
    assert job.first == Failure(lost, Cause.AGENT, detail="OSError: no space")
    assert job.verdict().decided_by == job.working[0]


def test_agent_that_ends_after_its_report_changes_nothing() -> None:
    job = Job(3).joined()
    for node in range(3):
        job.event(node, events.RanksChecked(succeeded=True, ended=True))
    job.ended(2, SUCCESS)
    job.cut = {2}
    for node in (0, 1):
        job.event(node, events.ConnectionClosed(2))
        job.ended(node, SUCCESS)
    assert job.verdict() == Verdict(JobPhase.SUCCEEDED, 0, 0)


@pytest.mark.parametrize("frozen", range(3))
def test_frozen_node_is_lost_and_ends_with_the_same_verdict_when_thawed(frozen: int) -> None:
    job = Job(3).joined()
    job.wait(5)
    job.cut = {frozen}
    job.wait(POLICY.silence - 1)
    assert not any(job.states[node].is_ending for node in job.working)
    job.wait(3)
    for node in job.working:
        job.ended(node)
    found = job.verdict()
    assert found.first == Failure(frozen, Cause.SILENT, peer=job.working[0])
    # It reads the verdict of the others before it notices that they are silent.
    job.event(frozen, job.tick())
    assert not job.states[frozen].is_ending
    job.event(frozen, events.MessageReceived(job.working[0], PeerMessage(Kind.VERDICT, verdict=found)))
    assert job.verdict(0, 1, 2) == found
    assert job.did(frozen, events.EndRanks)


def test_node_that_is_frozen_for_a_moment_goes_on() -> None:
    job = Job(2).joined()
    job.wait(5)
    job.cut = {1}
    job.wait(POLICY.silence - 1)
    job.cut = set()
    job.wait(60)
    assert not any(state.is_ending or state.lost for state in job.states)


def test_agent_that_is_asked_to_end_ends_all_ranks() -> None:
    job = Job(2).joined()
    job.event(1, events.EndRequested("ended by SIGTERM"))
    found = Failure(1, Cause.AGENT, detail="ended by SIGTERM")
    assert [one.observed.failure for one in job.actions[1] if hasattr(one, "observed")] == [found]
    job.ended(0)
    job.ended(1, Report(False, (Observed(found, 0.0),)))
    assert job.first == found


def test_node_that_sends_heartbeats_and_does_not_report_is_lost() -> None:
    job = Job(3).joined()
    job.event(1, events.RanksChecked(failed=True))
    job.ended(0)
    job.ended(1, failed(1))
    job.wait(FAILURE_GRACE + POLICY.kill_seconds + 2 * POLICY.silence + 2)
    assert job.verdict(0, 1).first == Failure(1, Cause.RANK, 1, 7)
    assert job.states[0].lost[2].observed.failure == Failure(2, Cause.SILENT, peer=0, detail=STUCK)


def test_first_node_that_never_decides_is_left_out() -> None:
    job = Job(3).joined()
    for node in (1, 2):
        job.event(node, events.MessageReceived(0, PeerMessage(Kind.ENDED, report=SUCCESS)))
    job.cut = {0}
    job.event(1, events.RanksChecked(failed=True))
    job.ended(1, failed(1))
    job.ended(2)
    for _ in range(60):
        job.now += 1
        for node in (1, 2):
            job.event(node, events.Tick(dict.fromkeys(range(3), job.now), True, events.NONE_MISSING))
    assert job.verdict(1, 2) == Verdict(JobPhase.FAILED, 7, 1, Failure(1, Cause.RANK, 1, 7), ("last",))
