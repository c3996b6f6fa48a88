"""A job on one node: the loop around step.step. It waits for messages, looks at the ranks and at what watches
them, and does what follows from that.

One thread runs the loop and decides. Others do what takes long, and keep what they find for it: the facts of
this node, notices of EC2, copies of files, stacks, and the end of processes, which may take as long as the
ranks need to save.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, Callable, Optional

from agent.gang import events, preflight, step
from agent.gang.decision import Budget
from agent.gang.mesh import Mesh
from agent.gang.state import GangState, Policy
from agent.gang.watches import Watches
from agent.jobs import job_record, phases, poweroff
from agent.jobs.notify import ANNOUNCE_SECONDS, DEADLINE, NOTICE, STALLED, Notifier
from agent.node import commands, docker, kernel, processes, store
from agent.node.shared_memory import SupervisorHeartbeat, last_line
from agent.ranks import attempt, causes, launchers
from agent.ranks.attempt import Attempt
from agent.watch.gpus import Gpus
from agent.watch.measure import RECORD_SECONDS, Recorder
from agent.watch.notices import NoticeWatch
from cloudddp.agent.protocol.gang import MAX_FACT, Kind, NodeFacts, PeerMessage
from cloudddp.agent.protocol.jobs import Cause, Failure
from cloudddp.agent.protocol.results import FACTS_FILE
from cloudddp.agent.protocol.start import OnStall, StartRequest

PAUSE = 0.05  # seconds between two looks at the ranks
LAST_WORDS = 2.0  # seconds for the verdict to reach the others
HEARTBEATS = 10  # in the time after which a silent node is lost


def run(request: StartRequest, heartbeat: SupervisorHeartbeat, notifier: Notifier) -> int:
    """Run the job on this node to its verdict. Return the exit code of this process, whose guard watches the
    `heartbeat` and has the other end of the `notifier`."""
    kernel.adopt_orphans()
    launchers.raise_limits()
    try:
        mesh = Mesh(request.node, request.gang)
    except OSError as error:
        why = f"cannot listen for the other nodes: {error.strerror}"
        job_record.JobRecord(request).refuse(why)
        return 1
    with contextlib.closing(mesh):
        _Supervisor(request, mesh, heartbeat, notifier).run()
    return 0


def _initial_state(request: StartRequest) -> GangState:
    policy = Policy(
        silence=request.gang.silence,
        stop_grace=request.work.stop_grace,
        join_by=time.monotonic() + request.gang.join,
        facts_by=time.monotonic() + 3 * request.gang.join,
        kill_seconds=processes.GIVE_UP_SECONDS,
        preflight=request.gang.preflight,
        leaves_stalls=request.watch.on_stall is OnStall.LEAVE,
    )
    budget = Budget(request.watch.retries, stalls=request.watch.on_stall is OnStall.RESTART)
    nodes = frozenset(peer.node for peer in request.gang.peers)
    known = {} if request.gang.preflight else {request.node: NodeFacts()}
    return GangState(request.node, nodes, policy, budget, facts=known)


class _Supervisor:
    """The effects: each event is read here, each action is done here, and nothing is decided."""

    def __init__(
        self, request: StartRequest, mesh: Mesh, heartbeat: SupervisorHeartbeat, notifier: Notifier
    ) -> None:
        self._request = request
        self._notifier = notifier
        self._mesh = mesh
        self._heartbeat = heartbeat
        self._record = job_record.JobRecord(request)
        self._state = _initial_state(request)
        self._notices = NoticeWatch(request.end.deadline, request.end.save)
        self._gpus = Gpus(RECORD_SECONDS)
        self._recorder = Recorder(self._record.folder, self._gpus)
        self._heartbeat_at = 0.0
        self._cancelled_at: Optional[float] = None
        self._guard = os.getppid()
        self._signal = 0  # that asked this process to end
        self._new_attempt(0)

    def _new_attempt(self, number: int) -> None:
        """Forget what is known of the last attempt."""
        self._attempt = Attempt(self._request, self._record.folder, number)
        self._watches = Watches(self._request, self._record.folder, number, self._gpus, self._send)

    def run(self) -> None:
        """Run the job to its verdict. An error of this process is sent to the others before it ends it."""
        # The end of a launcher is noticed at once: its ranks end because of it, and those of other nodes
        # because of them.
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGCHLD):
            signal.signal(number, self._on_signal)
        try:
            self._record.write()
            if self._request.gang.preflight:
                threading.Thread(target=self._find_facts, daemon=True).start()
            while self._state.verdict is None:
                self._heartbeat.beat(self._request.gang.silence)
                if time.monotonic() > self._heartbeat_at:
                    self._send_heartbeat()
                for event in self._turn():
                    self._apply(event)
        except Exception as error:
            self._send(PeerMessage(Kind.CRASHED, error=last_line(error)))
            raise
        finally:
            self._mesh.flush(LAST_WORDS)
        if os.getppid() != self._guard:
            self._notifier.conclude()

    def _find_facts(self) -> None:
        """Find what this node is like, while the nodes connect to each other."""
        found = NodeFacts()
        try:
            found = _facts(self._request)
        finally:
            job_record.keep(self._record.folder / FACTS_FILE, found)
            self._mesh.post(events.FactsFound(found))

    def _on_signal(self, number: int, _: Any) -> None:
        if number != signal.SIGCHLD:
            self._signal = number
        self._mesh.post()

    def _apply(self, event: events.Event) -> None:
        self._state, actions = step.step(self._state, event, events.Moment(time.monotonic(), time.time()))
        for action in actions:
            self._do(action)

    # -- events ----------------------------------------------------------------------------------------------

    def _turn(self) -> Iterator[events.Event]:
        """Yield what has happened, one by one: what is done about each may change what is looked at next."""
        yield from self._mesh.poll(PAUSE)
        yield events.Tick(self._mesh.heard, self._mesh.complete, self._mesh.missing)
        if not self._state.is_joined:
            yield from self._end_requests()
        elif not self._state.is_ending:
            yield from self._while_ranks_run()
        elif self._attempt.is_over:
            yield from self._while_others_end()

    def _end_requests(self) -> Iterator[events.Event]:
        """Yield what this node was asked for: by `kill`, and by a signal."""
        if phases.is_stopping(self._record.folder):
            yield events.StopMarked(phases.cancelled_at(self._record.folder) is not None)
        if self._signal:
            why = f"ended by {signal.Signals(self._signal).name}: the machine may be shutting down"
            yield events.EndRequested(why if os.getppid() == self._guard else "its parent was killed")

    def _while_ranks_run(self) -> Iterator[events.Event]:
        """Look for what ends the job here: a cancel, a failure, a notice, or the end of all launchers."""
        failed, ended = self._attempt.look() if self._state.ranks_started else (False, False)
        yield from self._end_requests()
        yield events.RanksChecked(failed, ended, self._attempt.succeeded)
        if not self._state.is_ending and (notice := self._notices.due()) is not None:
            failure, grace = notice.failure(self._request.node), notice.grace(self._request.work.stop_grace)
            if notice.by_aws:
                self._notifier.post(NOTICE, failure)
            yield events.FailureNoticed(failure, grace)
        if self._state.is_ending:
            return
        if self._state.is_first and (near := self._notices.announcement(ANNOUNCE_SECONDS)) is not None:
            self._notifier.post(DEADLINE, near.failure(self._request.node))
        if not self._state.ranks_started:
            yield from self._while_copying()
        else:
            yield from self._watch_stall()
            self._watches.turn(self._attempt.running_ranks, is_first=self._state.is_first)
            self._recorder.turn()

    def _while_copying(self) -> Iterator[events.Event]:
        spread = self._watches.spread
        if spread is None:
            yield events.Copied()
            return
        spread.turn()
        if spread.error:
            failure = Failure(self._request.node, Cause.SNAPSHOT, detail=spread.error)
            yield events.FailureNoticed(failure)
        elif spread.is_done:
            spread.close()
            yield events.Copied()

    def _watch_stall(self) -> Iterator[events.Event]:
        state = self._state
        declares = state.is_first and not state.all_finished
        self._watches.stalls.look(state.left - {state.node} if declares else None)
        if state.is_first and (found := self._watches.stalls.conclusion(state.left)) is not None:
            self._notifier.post(STALLED, found.failure)
            yield events.Stalled(found)

    def _while_others_end(self) -> Iterator[events.Event]:
        """Report the end of this node's ranks. If they have ended by themselves, watch the other nodes."""
        if not self._state.has_reported:
            self._watches.written.report(last=True)
            cancelled = None if self._cancelled_at is None else causes.ago_of(self._cancelled_at)
            yield events.RanksEnded(self._attempt.report(cancelled))
        if not self._state.is_stopping and self._state.is_ending:
            yield from self._end_requests()
            if not self._state.is_stopping:
                yield from self._watch_stall()

    # -- actions ---------------------------------------------------------------------------------------------

    def _do(self, action: events.Action) -> None:
        handlers: dict[type[Any], Callable[[Any], object]] = {
            events.Send: lambda one: self._mesh.send(one.message),
            events.SendHeartbeat: lambda _: self._send_heartbeat(),
            events.Forward: lambda one: self._watches.take(one.node, one.message),
            events.BeginAttempt: self._begin_attempt,
            events.StartRanks: lambda _: self._start_ranks(),
            events.RecordFailure: lambda one: self._attempt.fail(one.observed),
            events.EndRanks: self._end_ranks,
            events.AnnounceStop: self._announce_stop,
            events.Note: lambda one: self._watches.note(one.text),
            events.LeaveStall: lambda one: self._watches.stalls.leave(one.detail),
            events.End: self._end,
        }
        handlers[type(action)](action)

    def _send(self, message: PeerMessage) -> None:
        self._mesh.send(replace(message, attempt=self._state.attempt, clock=time.time()))

    def _send_heartbeat(self) -> None:
        self._heartbeat_at = time.monotonic() + self._request.gang.silence / HEARTBEATS
        finished = self._request.node in self._state.finished
        idle, paces = self._watches.stalls.idle(), self._watches.pace.paces()
        self._send(PeerMessage(Kind.HEARTBEAT, finished=finished, idle=idle, paces=paces))

    def _begin_attempt(self, action: events.BeginAttempt) -> None:
        if action.number:
            attempt.clear(self._record.folder)
            job_record.note(self._record.folder, action.note, launcher=True)
            self._new_attempt(action.number)
        self._record.running(action.number)
        if self._watches.spread is not None:
            self._watches.spread.start()

    def _start_ranks(self) -> None:
        self._watches.begin()
        own = self._state.facts.get(self._request.node)
        self._attempt.launch(torch=own.torch if own else "")
        if self._attempt.error:
            self._record.cannot_start(self._attempt.error)
        elif not self._attempt.number:
            poweroff.begin(self._request.job, self._request.end.poweroff)

    def _end_ranks(self, action: events.EndRanks) -> None:
        if action.cancelled and self._cancelled_at is None:
            self._cancelled_at = self._record.time_of_cancel()
        if not self._state.ranks_started and self._watches.spread is not None:
            self._watches.spread.close()
        self._attempt.end(action.grace, saving=action.saving)

    def _announce_stop(self, action: events.AnnounceStop) -> None:
        self._record.mark_stop(cancelled=action.cancelled, token=action.token)
        token = phases.cancel_token(self._record.folder)
        self._send(PeerMessage(Kind.STOP, cancelled=action.cancelled, token=token, grace=action.grace))

    def _end(self, action: events.End) -> None:
        if self._state.ranks_started:  # some may be left: this node was frozen while the others ended
            longest = self._request.work.stop_grace + processes.GIVE_UP_SECONDS
            self._heartbeat.beat(longest + self._request.gang.silence)
            self._attempt.join()
        self._record.end(action.verdict, action.missing)


def _facts(request: StartRequest) -> NodeFacts:
    """Return what this node is like."""
    copying = commands.later(lambda: _cannot_copy(request))
    image, project, container = "", store.project_folder(request.project), request.work.container
    command = [commands.program(request.work.program, project), "-I", "-c", preflight.VERSIONS]
    if container:
        image, folder = container.image, store.job_folder(request.job)
        command, _ = docker.command(replace(container, gpus=False), command, project, {}, folder)
    found = preflight.facts(command, Path.home())
    problem = copying() or ""
    defects = (*found.defects, problem[:MAX_FACT]) if problem else found.defects
    return replace(found, image=image, defects=defects)


def _cannot_copy(request: StartRequest) -> str:
    if request.end.results is None:
        return ""
    from agent.s3 import copies  # 35 ms, which a job without results in S3 need not take

    return copies.check(request, request.end.results)
