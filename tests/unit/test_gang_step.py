"""What the agents of a job do about each fault: a table. The nodes are states, whose messages reach each
other at once or late.

docs/faults.md has the faults measured with real processes. tests/node/test_gang*.py proves that the loop
around the state performs the actions.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.gang.decision import Budget
from agent.gang.events import (
    NONE_MISSING,
    Action,
    AnnounceStop,
    BeginAttempt,
    ConnectionClosed,
    Copied,
    CopyFailed,
    End,
    EndRanks,
    EndRequested,
    Event,
    FactsFound,
    LeaveStall,
    MessageReceived,
    Moment,
    NoticeReceived,
    RanksChecked,
    RanksEnded,
    RecordUnreachable,
    Restart,
    Send,
    SendHeartbeat,
    Stalled,
    StartRanks,
    StopMarked,
    Tick,
    WaitForRanks,
)
from agent.gang.joining import PATIENCE
from agent.gang.state import GangState, Policy, initial
from agent.gang.step import (
    EXIT_BARRIER,
    FAILURE_GRACE,
    FIRST_DECIDES,
    MAX_EARLY,
    STUCK,
    step,
)
from cloudddp.agent.protocol.gang import Facts, Kind, Message, Observed, Report, Unreachable
from cloudddp.agent.protocol.jobs import Cause, Failure, Verdict
from cloudddp.agent.protocol.phases import JobPhase

POLICY = Policy(silence=15.0, stop_grace=10.0, join_by=20.0, kill_seconds=5.0)
SUCCESS = Report(True)
NOTICE = Failure(1, Cause.NOTICE, exit_code=143, detail="spot notice")
STOPPED = Report(False, exit_code=143)


def failed(node: int, code: int = 7, *, step: int | None = None) -> Report:
    """The report of a node whose rank of the same number has failed."""
    return Report(False, (Observed(Failure(node, Cause.RANK, node, code), 0.0, ("last",)),), step=step)


class Job:
    """The nodes of a job. What a node sends reaches the others at once, unless it is `cut`; `actions` are
    what each node was told to do, without what it sent."""

    def __init__(self, count: int = 2, *, retries: int = 0, stalls: bool = False, **policy: Any) -> None:
        names = frozenset(range(count))
        self.now = 1.0
        self.cut: set[int] = set()  # nodes that get and send nothing
        self.actions: list[list[Action]] = [[] for _ in names]
        self.sent: list[tuple[int, Message]] = []
        self.heard = dict.fromkeys(names, self.now)
        own = replace(POLICY, **policy)
        self.states: list[GangState] = [
            initial(node, names, own, Budget(retries, stalls=stalls)) for node in range(count)
        ]

    def event(self, node: int, event: Event) -> None:
        """Something happens on a node; what follows from it on all nodes happens, too."""
        moment = Moment(self.now, 1e9 + self.now)
        self.states[node], actions = step(self.states[node], event, moment)
        for action in actions:
            if isinstance(action, Send):
                self._send(node, action.message)
            else:
                self.actions[node].append(action)
                for message in self._message_of(action):
                    self._send(node, replace(message, attempt=self.states[node].attempt))

    def _message_of(self, action: Action) -> Iterator[Message]:
        """What the loop sends for an action."""
        if isinstance(action, AnnounceStop):
            yield Message(Kind.STOP, cancelled=action.cancelled, token=action.token, grace=action.grace)
        elif isinstance(action, SendHeartbeat):
            yield Message(Kind.HEARTBEAT, finished=True)

    def _send(self, node: int, message: Message) -> None:
        self.sent.append((node, message))
        for other in range(len(self.states)):
            if other != node and not {node, other} & self.cut:
                self.heard[node] = self.now
                self.event(other, MessageReceived(node, message))

    def wait(self, seconds: float) -> None:
        """Time passes on the nodes that are not cut: they send heartbeats."""
        end = self.now + seconds
        while self.now < end:
            self.now = min(self.now + 1.0, end)
            for node in self.working:
                self.heard[node] = self.now
            for node in self.working:
                self.event(node, self.tick())

    def tick(self, *, is_connected: bool = True, missing: Unreachable = NONE_MISSING) -> Tick:
        """One turn of a node's loop, when the others sent something as `heard` says."""
        return Tick(self.heard, is_connected, missing)

    @property
    def working(self) -> list[int]:
        return [node for node in range(len(self.states)) if node not in self.cut]

    def joined(self) -> Job:
        """All nodes connect, are alike, and start their ranks."""
        for node in self.working:
            self.event(node, FactsFound(Facts(gpus="8 x NVIDIA H100")))
            self.event(node, self.tick())
        self.copied()
        assert all(self.did(node, StartRanks) for node in self.working)
        return self

    def copied(self) -> None:
        for node in self.working:
            self.event(node, Copied())

    def ended(self, node: int, report: Report = STOPPED) -> None:
        """No process of a node's ranks is left."""
        assert self.states[node].is_ending
        self.event(node, RanksEnded(report))

    def did(self, node: int, kind: type[Any]) -> list[Any]:
        return [one for one in self.actions[node] if isinstance(one, kind)]

    def verdict(self, *nodes: int) -> Verdict:
        """Return the verdict of these nodes, or of those that are not cut: it is the same one."""
        found = [self.states[node].verdict for node in nodes or self.working]
        assert found[0] is not None
        assert found == [found[0]] * len(found), found
        for node in nodes or self.working:
            assert [one.verdict for one in self.did(node, End)] == [found[0]]
        return found[0]

    @property
    def first(self) -> Failure:
        found = self.verdict()
        assert found.phase is JobPhase.FAILED
        assert found.first is not None
        return found.first


def failure_of(job: Job, node: int, report: Report) -> None:
    """A rank of a node fails, and those of all nodes are ended."""
    job.event(node, RanksChecked(failed=True))
    for other in job.working:
        job.ended(other, report if other == node else STOPPED)


# -- the beginning -------------------------------------------------------------------------------------------


def test_no_rank_starts_before_every_node_is_connected_to_all_and_says_what_it_is_like() -> None:
    job = Job(3)
    for node in range(3):
        job.event(node, job.tick())
        assert job.sent == []
    for node in range(3):
        assert not any(job.did(other, BeginAttempt) for other in range(3))
        job.event(node, FactsFound(Facts()))
        job.event(node, job.tick())
    assert all(job.did(node, BeginAttempt) for node in range(3))
    assert not any(job.did(node, StartRanks) for node in range(3))


def test_node_that_misses_another_one_is_named_on_all() -> None:
    """Nodes 1 and 2 cannot connect; nodes 0 and 3 are connected to all, and wait for those two to say so."""
    job = Job(4)
    missing = {1: Unreachable({2: "Connection refused"}, (2,)), 2: Unreachable({1: "timed out"}, (1,))}
    for node in range(4):
        job.event(node, FactsFound(Facts()))
        job.event(node, job.tick(is_connected=node in (0, 3), missing=missing.get(node, NONE_MISSING)))
    job.now = POLICY.join_by + 0.1
    for node in (0, 3):
        job.event(node, job.tick())
        assert job.states[node].verdict is None
    job.event(1, job.tick(is_connected=False, missing=missing[1]))
    assert job.first == Failure(1, Cause.UNREACHABLE, detail="Connection refused", peer=2)
    assert [one.missing.to for one in job.did(1, RecordUnreachable)] == [{2: "Connection refused"}]
    assert [one.missing.to for one in job.did(3, RecordUnreachable)] == [{}]


@pytest.mark.parametrize("silent", [0, 1])
def test_node_that_is_connected_and_says_nothing_is_named(silent: int) -> None:
    job = Job(3)
    for node in range(3):
        if node != silent:
            job.event(node, FactsFound(Facts()))
        job.event(node, job.tick())
    job.wait(POLICY.join_by + 2 * PATIENCE + 1)
    expected = f"node {silent} was not ready in time (does nvidia-smi answer there?)"
    assert (job.first.cause, job.first.detail) == (Cause.PREFLIGHT, expected)


def test_nodes_that_differ_start_no_rank_and_the_first_one_decides() -> None:
    job = Job(3)
    for node in range(3):
        job.event(node, FactsFound(Facts(driver="560" if node == 2 else "570")))
    for node in (1, 2, 0):
        job.event(node, job.tick())
    assert (job.first.node, job.first.cause) == (0, Cause.PREFLIGHT)
    assert "the NVIDIA driver differs" in job.first.detail
    assert not any(job.did(node, BeginAttempt) for node in range(3))


def test_node_that_is_not_the_first_decides_if_that_one_does_not() -> None:
    job = Job(2)
    for node in range(2):
        job.event(node, FactsFound(Facts(torch=str(node))))
    job.event(1, job.tick())
    job.event(0, job.tick(is_connected=False))
    job.event(1, MessageReceived(0, Message(Kind.READY, facts=Facts(torch="0"), clock=1e9 + 1.0)))
    job.cut = {0}
    job.wait(FIRST_DECIDES - 1)
    assert job.states[1].verdict is None
    job.wait(2)
    assert (job.first.node, job.first.cause) == (1, Cause.PREFLIGHT)


def test_clock_that_differs_is_a_problem() -> None:
    job = Job(2)
    for node in range(2):
        job.event(node, FactsFound(Facts()))
    job.event(0, MessageReceived(1, Message(Kind.READY, facts=Facts(), clock=1e9 + 11.0)))
    job.event(0, job.tick())
    assert (found := job.states[0].verdict) is not None
    assert found.first is not None
    assert "the clock of node 1 is +10 s from that of node 0" in found.first.detail


@pytest.mark.parametrize(
    ("event", "cause"),
    [
        (EndRequested("ended by SIGTERM"), Cause.AGENT),
        (
            MessageReceived(
                1, Message(Kind.VERDICT, verdict=Verdict(JobPhase.FAILED, 1, 1, Failure(1, Cause.PREFLIGHT)))
            ),
            Cause.PREFLIGHT,
        ),
        (ConnectionClosed(1), Cause.AGENT),
    ],
    ids=["signal", "verdict", "closed"],
)
def test_join_ends_with(event: Event, cause: Cause) -> None:
    job = Job(2)
    job.event(0, event)
    assert (found := job.states[0].verdict) is not None
    assert found.first is not None
    assert found.first.cause is cause
    assert not job.did(0, BeginAttempt)


@pytest.mark.parametrize("by", ["mark", "message"])
def test_cancel_while_nodes_join(by: str) -> None:
    job = Job(2)
    job.event(0, StopMarked(True) if by == "mark" else MessageReceived(1, Message(Kind.STOP, cancelled=True)))
    assert [state.verdict and state.verdict.phase for state in job.states] == [JobPhase.CANCELLED] * 2
    assert not job.did(0, BeginAttempt)


# -- ranks ---------------------------------------------------------------------------------------------------


def test_job_succeeds_once_every_rank_of_every_node_has_exited_with_0() -> None:
    job = Job(3).joined()
    for node in range(3):
        assert job.states[0].verdict is None
        job.event(node, RanksChecked(succeeded=True, ended=True))
        job.ended(node, SUCCESS)
    assert job.verdict() == Verdict(JobPhase.SUCCEEDED, 0, 0)
    assert not any(job.did(node, AnnounceStop) for node in range(3))


@pytest.mark.parametrize("node", range(3))
def test_rank_that_fails_ends_those_of_all_nodes(node: int) -> None:
    job = Job(3).joined()
    job.event(node, RanksChecked(failed=True))
    assert [job.did(other, EndRanks)[0].grace for other in range(3)] == [FAILURE_GRACE] * 3
    for other in (2, 0, 1):
        assert job.states[0].verdict is None
        job.ended(other, failed(node) if other == node else STOPPED)
    assert job.verdict() == Verdict(JobPhase.FAILED, 7, 0, Failure(node, Cause.RANK, node, 7), ("last",))


def test_ranks_go_on_after_one_that_exits_with_0() -> None:
    job = Job(2).joined()
    job.event(0, RanksChecked(succeeded=True, ended=True))
    job.ended(0, SUCCESS)
    job.wait(60)
    assert not job.states[1].is_ending
    failure_of_one = failed(1, 3)
    job.event(1, RanksChecked(failed=True))
    job.ended(1, failure_of_one)
    assert job.verdict().exit_code == 3


def test_launchers_that_wait_for_each_other_after_all_ranks_have_finished_are_ended() -> None:
    job = Job(2).joined()
    for node in range(2):
        job.event(node, RanksChecked(succeeded=True))
    job.wait(EXIT_BARRIER - 2)
    job.event(0, RanksChecked(succeeded=True))
    assert not job.states[0].is_ending
    job.wait(EXIT_BARRIER + 2)
    for node in range(2):
        job.event(node, RanksChecked(succeeded=True))
        job.ended(node, SUCCESS)
    assert job.verdict().phase is JobPhase.SUCCEEDED


def test_files_that_cannot_be_copied_start_no_rank() -> None:
    job = Job(2)
    for node in range(2):
        job.event(node, FactsFound(Facts()))
        job.event(node, job.tick())
    job.event(1, CopyFailed("no space"))
    for node in range(2):
        job.event(node, Copied())
        job.ended(
            node,
            Report(False, (Observed(Failure(1, Cause.SNAPSHOT, detail="no space"), 0.0),))
            if node
            else STOPPED,
        )
    assert job.first.cause is Cause.SNAPSHOT
    assert not any(job.did(node, StartRanks) for node in range(2))


# -- agents and nodes ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("lost", range(3))
def test_agent_that_ends_is_named_with_its_error(lost: int) -> None:
    job = Job(3).joined()
    for node in range(3):
        if node != lost:
            job.event(node, MessageReceived(lost, Message(Kind.CRASHED, error="OSError: no space")))
    job.cut = {lost}
    for node in job.working:
        job.event(node, ConnectionClosed(lost))
    for node in job.working:
        job.ended(node)
    assert job.first == Failure(lost, Cause.AGENT, detail="OSError: no space")
    assert job.verdict().decided_by == job.working[0]


def test_agent_that_ends_after_its_report_changes_nothing() -> None:
    job = Job(3).joined()
    for node in range(3):
        job.event(node, RanksChecked(succeeded=True, ended=True))
    job.ended(2, SUCCESS)
    job.cut = {2}
    for node in (0, 1):
        job.event(node, ConnectionClosed(2))
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
    job.event(frozen, MessageReceived(job.working[0], Message(Kind.VERDICT, verdict=found)))
    assert job.verdict(0, 1, 2) == found
    assert job.did(frozen, EndRanks)
    assert job.did(frozen, WaitForRanks)


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
    job.event(1, EndRequested("ended by SIGTERM"))
    found = Failure(1, Cause.AGENT, detail="ended by SIGTERM")
    assert [one.observed.failure for one in job.actions[1] if hasattr(one, "observed")] == [found]
    job.ended(0)
    job.ended(1, Report(False, (Observed(found, 0.0),)))
    assert job.first == found


def test_node_that_sends_heartbeats_and_does_not_report_is_lost() -> None:
    job = Job(3).joined()
    job.event(1, RanksChecked(failed=True))
    job.ended(0)
    job.ended(1, failed(1))
    job.wait(FAILURE_GRACE + POLICY.kill_seconds + 2 * POLICY.silence + 2)
    assert job.verdict(0, 1).first == Failure(1, Cause.RANK, 1, 7)
    assert job.states[0].lost[2].observed.failure == Failure(2, Cause.SILENT, peer=0, detail=STUCK)


def test_first_node_that_never_decides_is_left_out() -> None:
    job = Job(3).joined()
    for node in (1, 2):
        job.event(node, MessageReceived(0, Message(Kind.ENDED, report=SUCCESS)))
    job.cut = {0}
    job.event(1, RanksChecked(failed=True))
    job.ended(1, failed(1))
    job.ended(2)
    for _ in range(60):
        job.now += 1
        for node in (1, 2):
            job.event(node, Tick(dict.fromkeys(range(3), job.now), True, NONE_MISSING))
    assert job.verdict(1, 2) == Verdict(JobPhase.FAILED, 7, 1, Failure(1, Cause.RANK, 1, 7), ("last",))


# -- a cancel, a notice, a stall -----------------------------------------------------------------------------


@pytest.mark.parametrize("nodes", [(0,), (1,), (0, 1)], ids=str)
def test_cancel_cancels_the_job_on_all_nodes(nodes: tuple[int, ...]) -> None:
    job = Job(2, retries=5).joined()
    for node in nodes:
        job.event(node, StopMarked(True))
    assert [job.did(node, EndRanks)[0] for node in range(2)] == [
        EndRanks(POLICY.stop_grace, cancelled=True)
    ] * 2
    for node in range(2):
        assert len(job.did(node, AnnounceStop)) == 1
        job.ended(node, Report(False, cancelled=1.0))
    assert job.verdict() == Verdict(JobPhase.CANCELLED, 130, 0)


def test_cancel_on_a_node_whose_ranks_have_finished() -> None:
    job = Job(2).joined()
    job.event(0, RanksChecked(succeeded=True, ended=True))
    job.ended(0, SUCCESS)
    job.event(0, StopMarked(True))
    job.ended(1, Report(False, cancelled=1.0))
    assert job.verdict().phase is JobPhase.CANCELLED


def test_ranks_of_all_nodes_may_save_as_long_as_a_notice_allows() -> None:
    job = Job(2, retries=3).joined()
    job.event(1, NoticeReceived(NOTICE, 100.0))
    assert [job.did(node, EndRanks)[0] for node in range(2)] == [EndRanks(100.0, saving=True)] * 2
    job.ended(0)
    job.ended(1, Report(False, (Observed(NOTICE, 0.0),)))
    assert (job.first.cause, job.verdict().exit_code, job.verdict().refusal) == (Cause.NOTICE, 143, "")


def test_later_stop_can_only_shorten_the_grace() -> None:
    job = Job(2).joined()
    job.event(1, NoticeReceived(NOTICE, 100.0))
    job.event(0, StopMarked(True))
    assert [one.grace for one in job.did(0, EndRanks)] == [100.0, POLICY.stop_grace]


STALL = Stalled(Observed(Failure(1, Cause.STALL, rank=1, detail="no output"), 0.0, ("here",)))


def test_stall_that_is_left_alone() -> None:
    job = Job(2, leaves_stalls=True).joined()
    job.event(0, STALL)
    assert job.did(0, LeaveStall) == [LeaveStall("no output")]
    assert not any(state.is_ending for state in job.states)


def test_stall_ends_the_job_although_the_ranks_of_the_first_node_have_finished() -> None:
    job = Job(2).joined()
    job.event(0, RanksChecked(succeeded=True, ended=True))
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


# -- restarts ------------------------------------------------------------------------------------------------


def test_ranks_start_again_once_those_of_all_nodes_have_ended() -> None:
    job = Job(2, retries=1).joined()
    job.event(1, RanksChecked(failed=True))
    job.ended(1, failed(1))
    assert not job.did(0, Restart)
    job.ended(0)
    for node in range(2):
        assert job.did(node, Restart) == [Restart(1, "restart 1: rank 1 on node 1 failed")]
        assert len(job.did(node, BeginAttempt)) == 2
        assert len(job.did(node, StartRanks)) == 1
    job.copied()
    for node in range(2):
        job.event(node, RanksChecked(succeeded=True, ended=True))
        job.ended(node, SUCCESS)
    assert (job.verdict().phase, job.verdict().restarts) == (JobPhase.SUCCEEDED, 1)


REFUSALS = {
    "not asked for": (0, [failed(0)], ""),
    "the same three times": (9, [failed(0)] * 3, "the same failure has occurred 3 times"),
    "at the same step": (9, [failed(0, step=120)] * 3, "the same failure has occurred 3 times at step 120"),
    "it gets further": (
        2,
        [failed(0, step=one) for one in range(3)],
        "it has been started again 2 times within an hour",
    ),
    "the script": (
        9,
        [Report(False, (Observed(Failure(0, Cause.RANK, 0, 1), 0.0, ("NameError: x",)),))],
        "the script itself is wrong",
    ),
    "usage": (
        9,
        [Report(False, (Observed(Failure(0, Cause.RANK, 0, 2), 0.0, ("usage: x", "x: error")),))],
        "the script itself is wrong",
    ),
    "full disk": (9, [Report(False, (Observed(Failure(0, Cause.DISK, 0, 1), 0.0),))], ""),
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
        job.event(0, MessageReceived(1, Message(Kind.RESTART, attempt=1, verdict=verdict)))
        assert job.states[0].attempt == 0
        assert not job.did(0, Restart)
        job.event(0, RanksChecked(failed=True))  # and they are being ended


def test_restarts_are_counted_within_an_hour() -> None:
    job = Job(2, retries=1).joined()
    for number in range(3):
        failure_of(job, 0, failed(0, step=number))
        assert job.states[0].attempt == number + 1
        job.copied()
        job.now += 3601
        for node in range(2):
            job.event(node, Tick(dict.fromkeys(range(2), job.now), True, NONE_MISSING))


def test_job_that_has_lost_a_node_is_not_started_again_by_the_agents() -> None:
    job = Job(2, retries=5).joined()
    job.cut = {1}
    job.event(0, ConnectionClosed(1))
    job.ended(0)
    assert (job.verdict().restarts, job.first.cause) == (0, Cause.AGENT)


def test_message_about_the_next_attempt_waits_for_it() -> None:
    """Node 1 has begun again, and its rank has failed, before node 0 knows of the restart. A flood is not
    kept."""
    job = Job(2, retries=3).joined()
    job.event(1, MessageReceived(0, Message(Kind.STOP)))
    job.event(1, RanksEnded(failed(1)))
    early = [
        Message(Kind.HEARTBEAT, attempt=1, finished=True),
        Message(Kind.ENDED, attempt=1, report=failed(1)),
    ]
    for message in [
        *early,
        *[Message(Kind.HEARTBEAT, attempt=1)] * 100,
        Message(Kind.ENDED, attempt=7, report=SUCCESS),
    ]:
        job.event(1, MessageReceived(0, message))
    assert len(job.states[1].early) == MAX_EARLY
    verdict = Verdict(JobPhase.FAILED, 7, 0, Failure(1, Cause.RANK, 1, 7))
    job.event(1, MessageReceived(0, Message(Kind.RESTART, attempt=1, verdict=verdict)))
    assert job.states[1].attempt == 1
    assert job.states[1].finished == {0}
    assert job.states[1].reports[0].report == failed(1)


def test_message_about_an_earlier_attempt_is_ignored() -> None:
    job = Job(2, retries=3).joined()
    failure_of(job, 0, failed(0))
    before = job.states[1]
    job.event(1, MessageReceived(0, Message(Kind.STOP, attempt=0)))
    job.event(1, MessageReceived(0, Message(Kind.ENDED, attempt=0, report=SUCCESS)))
    assert (job.states[1].reports, job.states[1].is_ending) == (before.reports, False)


# -- any order -----------------------------------------------------------------------------------------------

FAULTS: dict[str, Event] = {
    "rank": RanksChecked(failed=True),
    "cancel": StopMarked(True),
    "signal": EndRequested("x"),
    "notice": NoticeReceived(NOTICE, 30.0),
    "done": RanksChecked(succeeded=True, ended=True),
    "stall": STALL,
    "copy": CopyFailed("x"),
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
            job.event(node, ConnectionClosed(one))
    for node in order:
        if node in job.working and not job.states[node].is_ending:
            job.event(node, RanksChecked(succeeded=True, ended=True))
    for node in order:
        if node in job.working and not job.states[node].has_reported:
            job.ended(node)
    found = job.verdict()
    assert found.decided_by == min(job.working)
    for node in job.working:
        assert len(job.did(node, End)) == 1
        assert len(job.did(node, StartRanks)) == 1
