"""What the agent of one node does next: `step(state, event, now)`.

Pure: no clock, no file, no process and no connection, so that every fault and every order of events is a row
of a table (tests/unit/test_gang_step.py). The loop that feeds it is supervisor.py.

The nodes join: all connect to each other and say what they are like. Then the ranks start; when those of one
node end badly, those of all nodes are ended, every node reports, and the first node that is left decides: the
verdict, or another attempt.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Callable, Optional

from agent.gang import decision, events, joining
from agent.gang.decision import TimedReport
from agent.gang.state import NEVER, GangState
from agent.ranks.causes import TimedFailure
from cloudddp.agent.protocol.gang import Kind, Observed, PeerMessage, Unreachable
from cloudddp.agent.protocol.jobs import Cause, Failure, Verdict
from cloudddp.agent.protocol.phases import JobPhase

FIRST_DECIDES = 5.0  # seconds for the first node to say why the ranks do not start, as it knows it, too
# Seconds between SIGTERM and SIGKILL at most, once a rank has failed: the others cannot go on.
FAILURE_GRACE = 2.0
EXIT_BARRIER = 10.0  # seconds that torchrun may wait for the others after every rank of the job has finished
LEFTOVERS_GRACE = 1.0  # seconds for processes that ranks have left behind
# Messages of one node about the next attempt: it sends a heartbeat, and how its ranks have ended.
MAX_EARLY = 32
STUCK = "it did not take part in the end of the job"


def step(
    state: GangState, event: events.Event, now: events.Moment
) -> tuple[GangState, tuple[events.Action, ...]]:
    """Return the state after an event, and what this node does because of it, in order."""
    current = _Step(state, now)
    if state.verdict is None:
        current.take(event)
        current.decide()
    return current.state, tuple(current.actions)


class _Step:
    """One step: the state so far, and the actions so far."""

    def __init__(self, state: GangState, now: events.Moment) -> None:
        self.state = state
        self.actions: list[events.Action] = []
        self._now, self._wall = now.at, now.wall

    def take(self, event: events.Event) -> None:
        handlers: dict[type[Any], Callable[[Any], None]] = {
            events.MessageReceived: self._message_received,
            events.ConnectionClosed: self._connection_closed,
            events.Tick: self._tick,
            events.FactsFound: self._facts_found,
            events.StopMarked: self._stop_marked,
            events.EndRequested: self._end_requested,
            events.Copied: self._copied,
            events.RanksChecked: self._ranks_checked,
            events.FailureNoticed: lambda one: self._fail(one.failure, grace=one.grace),
            events.Stalled: self._stalled,
            events.RanksEnded: self._ranks_ended,
        }
        handlers[type(event)](event)

    def decide(self) -> None:
        """Do what follows from all that is known."""
        if self.state.verdict is None and not self.state.is_joined:
            self._decide_start()
        if self.state.verdict is None and self.state.is_joined:
            self._decide_end()

    def _set(self, **changes: Any) -> None:
        self.state = replace(self.state, **changes)

    def _do(self, *actions: events.Action) -> None:
        self.actions += actions

    def _send(self, kind: Kind, **more: Any) -> None:
        self._do(events.Send(PeerMessage(kind, attempt=self.state.attempt, **more)))

    # -- messages of other nodes -----------------------------------------------------------------------------

    def _message_received(self, event: events.MessageReceived) -> None:
        node, message, state = event.node, event.message, self.state
        kind = message.kind
        if kind is Kind.CRASHED:
            self._set(errors={**state.errors, node: message.error})
        elif message.attempt > state.attempt and kind is not Kind.RESTART:
            self._keep_early(event)
        elif not self._is_valid(event):
            return
        elif kind is Kind.READY:
            self._ready(node, message)
            self._do(events.Forward(node, message))
        elif kind is Kind.ENDED and message.report is not None:
            self._set(reports={**state.reports, node: TimedReport(self._now, message.report)})
        elif kind is Kind.STOP:
            self._stop(cancelled=message.cancelled, token=message.token, grace=message.grace)
        elif kind is Kind.RESTART and message.verdict is not None:
            self._restart(message.verdict)
        elif kind is Kind.VERDICT and message.verdict is not None:
            self._accept(message.verdict)
        else:
            if kind is Kind.HEARTBEAT and message.finished:
                self._set(finished=state.finished | {node})
            self._do(events.Forward(node, message))

    def _keep_early(self, event: events.MessageReceived) -> None:
        """Keep a message about the next attempt, of which a node sends few before it begins here."""
        early = self.state.early
        known = sum(one.node == event.node for one in early)
        if event.message.attempt == self.state.attempt + 1 and known < MAX_EARLY:
            self._set(early=(*early, event))

    def _is_valid(self, event: events.MessageReceived) -> bool:
        """Whether a message is about what runs here."""
        kind, attempt = event.message.kind, event.message.attempt
        if kind is Kind.READY:
            return True
        if kind is Kind.RESTART:
            # The first node has the report of this one by then. Otherwise its ranks may still run.
            return attempt == self.state.attempt + 1 and self.state.has_reported
        if kind is Kind.VERDICT:
            return event.node not in self.state.lost
        return attempt == self.state.attempt

    def _ready(self, node: int, message: PeerMessage) -> None:
        state = self.state
        self._set(ready=state.ready | {node})
        if message.facts is not None:
            self._set(facts={**state.facts, node: message.facts})
        if message.clock is not None:
            self._set(skews={**state.skews, node: message.clock - self._wall})

    def _accept(self, verdict: Verdict) -> None:
        """Accept a verdict: the other nodes have ended. Ranks may be left here, if this node was frozen."""
        if not self.state.is_joined:
            self._give_up(verdict)
            return
        if not self.state.has_reported:
            self._stop(cancelled=verdict.phase is JobPhase.CANCELLED)
        self._end(verdict)

    # -- the beginning ---------------------------------------------------------------------------------------

    def _facts_found(self, event: events.FactsFound) -> None:
        self._set(facts={**self.state.facts, self.state.node: event.facts})

    def _decide_start(self) -> None:
        """Start the ranks once every node is connected to all others and its facts are known; or give up."""
        state = self.state
        if state.is_stopping:
            self._give_up(None)
        elif state.problems:  # the first node decides: all have the same verdict then
            if state.is_first or self._now > state.problems_at + FIRST_DECIDES:
                self._give_up(None)
        elif state.lost or joining.is_late(state, self._now):
            self._give_up(None)
        else:
            self._announce()
            if self.state.is_announced and state.ready == state.others:
                self._compare()

    def _announce(self) -> None:
        state = self.state
        own = state.facts.get(state.node)
        if not state.is_announced and own is not None and state.is_connected:
            self._set(is_announced=True)
            self._send(Kind.READY, facts=own, clock=self._wall)

    def _compare(self) -> None:
        """Start the ranks, unless the nodes differ or have defects."""
        state = self.state
        if found := joining.problems(state):
            self._set(problems=found, problems_at=self._now)
            self._decide_start()
        else:
            self._set(is_joined=True, resumed_at=self._now)
            self._do(events.BeginAttempt())

    def _give_up(self, given: Optional[Verdict], asked: str = "") -> None:
        """End before any rank was started, with a `given` verdict or an own one. `asked`: to end, and why."""
        state = self.state
        missing: Optional[Unreachable] = None
        if state.is_cancelled:
            verdict = Verdict(JobPhase.CANCELLED, decision.CANCELLED, state.node)
            self._send(Kind.STOP, cancelled=True)
        else:
            missing = replace(state.missing, problems=state.problems)
            if given is not None:
                verdict = given
            elif asked:
                verdict = self._failed(Failure(state.node, Cause.AGENT, detail=asked))
            else:
                missing, first = joining.why_not_started(state)
                verdict = self._failed(first)
            self._send(Kind.VERDICT, verdict=verdict)
        self._set(verdict=verdict)
        self._do(events.End(verdict, missing))

    def _failed(self, first: Failure) -> Verdict:
        return Verdict(JobPhase.FAILED, 1, self.state.node, first, at=self._wall)

    # -- while it runs ---------------------------------------------------------------------------------------

    def _copied(self, _: events.Copied) -> None:
        if not self.state.is_ending:
            self._set(ranks_started=True)
            self._do(events.StartRanks())

    def _ranks_checked(self, event: events.RanksChecked) -> None:
        state = self.state
        if state.is_ending:
            return
        if event.succeeded and state.node not in state.finished:
            self._set(finished=state.finished | {state.node})
            self._do(events.SendHeartbeat())
        if event.failed:
            self._stop(cancelled=False)
        elif event.ended or self._waits_at_exit_barrier():
            self._end_ranks(LEFTOVERS_GRACE)

    def _waits_at_exit_barrier(self) -> bool:
        """Whether torchrun still waits for its peers although every rank of the job has finished."""
        if not self.state.all_finished:
            return False
        if self.state.finished_at == NEVER:
            self._set(finished_at=self._now)
        return self._now - self.state.finished_at > EXIT_BARRIER

    def _stalled(self, event: events.Stalled) -> None:
        observed, state = event.observed, self.state
        self._do(events.Note(f"stalled: {observed.failure.detail}"))
        if state.policy.leaves_stalls:
            self._do(events.LeaveStall(observed.failure.detail))
        else:
            self._set(reports=_without(state.reports, state.node))  # it lacks this failure
            self._do(events.RecordFailure(observed))
            self._stop(cancelled=False)

    def _fail(self, failure: Failure, *, grace: Optional[float] = None) -> None:
        """End the ranks of all nodes because of what this one has noticed, unless they are being ended."""
        if not self.state.is_ending:
            self._do(events.RecordFailure(Observed(failure, 0.0)))
            self._stop(cancelled=False, grace=grace)

    # -- lost nodes ------------------------------------------------------------------------------------------

    def _connection_closed(self, event: events.ConnectionClosed) -> None:
        failure = Failure(event.node, Cause.AGENT, detail=self.state.errors.get(event.node, ""))
        matters = self._lose(event.node, TimedFailure(self._now, Observed(failure, 0.0)))
        if matters and self.state.is_joined:
            self._stop(cancelled=False)

    def _tick(self, event: events.Tick) -> None:
        state = self.state
        if self._now - state.ticked_at > state.policy.silence / 2:
            # This node was frozen. It waits for the others once more: they may have sent it their verdict,
            # which the network delivers after a while.
            self._set(resumed_at=self._now)
        self._set(ticked_at=self._now)
        if not state.is_joined:
            self._set(is_connected=event.is_connected, missing=event.missing)
            return
        self._lose_silent(event.heard)
        if self.state.has_reported and self._now > self.state.end_deadline:
            self._set(end_deadline=self._now + state.policy.silence)
            self._lose_stuck()

    def _lose_silent(self, heard: Mapping[int, float]) -> None:
        matters = False
        for node in sorted(self.state.others - self.state.lost.keys()):
            since = max(heard[node], self.state.resumed_at)
            if self._now - since > self.state.policy.silence:
                failure = Failure(node, Cause.SILENT, peer=self.state.node)
                matters |= self._lose(node, TimedFailure(since, Observed(failure, 0.0)))
        if matters:
            self._stop(cancelled=False)

    def _lose_stuck(self) -> None:
        """Lose nodes that send heartbeats and do not take part in the end: those that should have reported
        how their ranks have ended; or else the first one, which has not decided."""
        stuck = self.state.left - self.state.reports.keys() or {min(self.state.left)}
        for node in sorted(stuck - {self.state.node}):
            failure = Failure(node, Cause.SILENT, peer=self.state.node, detail=STUCK)
            self._set(reports=_without(self.state.reports, node))
            self._lose(node, TimedFailure(self._now, Observed(failure, 0.0)))

    def _lose(self, node: int, seen: TimedFailure) -> bool:
        """Keep that a node is lost; return whether it matters: its ranks had not ended."""
        if node in self.state.lost:
            return False
        has_ended = node in self.state.reports  # and the others have its report, too
        kept = replace(seen, at=NEVER) if has_ended else seen
        self._set(lost={**self.state.lost, node: kept})
        return not has_ended

    # -- the end ---------------------------------------------------------------------------------------------

    def _stop_marked(self, event: events.StopMarked) -> None:
        if self.state.is_joined:
            self._stop(cancelled=event.cancelled)
        else:
            self._set(is_cancelled=self.state.is_cancelled or event.cancelled)
            self._give_up(None)

    def _end_requested(self, event: events.EndRequested) -> None:
        if self.state.is_joined:
            self._fail(Failure(self.state.node, Cause.AGENT, detail=event.detail))
        else:
            self._give_up(None, event.detail)

    def _stop(self, *, cancelled: bool, token: str = "", grace: Optional[float] = None) -> None:
        """End the ranks here and on all other nodes. `grace`: seconds in which they may save."""
        policy = self.state.policy
        own = policy.stop_grace
        limit = grace if grace is not None else own if cancelled else min(own, FAILURE_GRACE)
        self._end_ranks(limit, saving=grace is not None, cancelled=cancelled)
        if not self.state.is_stopping:
            self._set(is_stopping=True, end_deadline=self._now + limit + policy.kill_seconds + policy.silence)
            self._do(events.AnnounceStop(cancelled, token, grace))

    def _end_ranks(self, grace: float, *, saving: bool = False, cancelled: bool = False) -> None:
        self._set(is_ending=True, is_cancelled=self.state.is_cancelled or cancelled)
        self._do(events.EndRanks(grace, saving, cancelled))

    def _ranks_ended(self, event: events.RanksEnded) -> None:
        reports = {**self.state.reports, self.state.node: TimedReport(self._now, event.report)}
        self._set(reports=reports)
        self._send(Kind.ENDED, report=event.report)

    def _decide_end(self) -> None:
        """Decide if this is the first node that is left, and all that are left have reported."""
        state = self.state
        if not state.is_first or not state.left <= state.reports.keys():
            return
        verdict = decision.verdict(state.node, state.reports, state.losses)
        verdict = replace(verdict, restarts=state.attempt)
        if verdict.phase is JobPhase.FAILED and not state.lost:
            budget, refusal = state.budget.spend(verdict, _newest_step(state.reports), self._now)
            self._set(budget=budget)
            if refusal is None:
                self._do(events.Send(PeerMessage(Kind.RESTART, attempt=state.attempt + 1, verdict=verdict)))
                self._restart(verdict)
                return
            verdict = replace(verdict, refusal=refusal)
        self._end(replace(verdict, at=self._wall))

    def _end(self, verdict: Verdict) -> None:
        self._set(verdict=verdict)
        self._do(events.End(verdict))
        self._send(Kind.VERDICT, verdict=verdict)

    def _restart(self, verdict: Verdict) -> None:
        """Start the ranks again, after no process of the last attempt is left on any node."""
        number, early = self.state.attempt + 1, self.state.early
        self._set(
            attempt=number,
            ranks_started=False,
            is_ending=False,
            is_stopping=False,
            end_deadline=NEVER,
            finished=frozenset(),
            finished_at=NEVER,
            reports={},
            early=(),
        )
        self._do(events.BeginAttempt(number, decision.restart_note(number, verdict)))
        for event in early:
            self._message_received(event)


def _newest_step(reports: Mapping[int, TimedReport]) -> Optional[int]:
    steps = [report.report.step for report in reports.values() if report.report.step is not None]
    return max(steps, default=None)


def _without(reports: Mapping[int, TimedReport], node: int) -> dict[int, TimedReport]:
    return {known: report for known, report in reports.items() if known != node}
