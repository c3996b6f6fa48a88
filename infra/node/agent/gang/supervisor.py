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
from agent.gang.state import GangState, Policy, initial
from agent.gang.watches import Watches
from agent.jobs import job_record, phases, poweroff
from agent.jobs.notify import ANNOUNCE_SECONDS, DEADLINE, NOTICE, STALLED, Notifier
from agent.node import commands, docker, kernel, processes, store
from agent.node.shared_memory import SupervisorHeartbeat, last_line
from agent.ranks import attempt, causes, launchers
from agent.ranks.attempt import Attempt, Look
from agent.watch.gpus import Gpus
from agent.watch.measure import RECORD_SECONDS, Recorder
from agent.watch.notices import NoticeWatch
from cloudddp.agent.protocol.gang import MAX_FACT, Facts, Kind, Message
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
        connections = Mesh(request.node, request.gang)
    except OSError as error:
        job_record.refuse(request, f"cannot listen for the other nodes: {error.strerror}")
        return 1
    with contextlib.closing(connections):
        _Supervisor(request, connections, heartbeat, notifier).run()
    return 0


def _initial_state(request: StartRequest) -> GangState:
    policy = Policy(
        silence=request.gang.silence,
        stop_grace=request.stop_grace,
        join_by=time.monotonic() + request.gang.join,
        kill_seconds=processes.GIVE_UP_SECONDS,
        preflight=request.gang.preflight,
        leaves_stalls=request.on_stall is OnStall.LEAVE,
    )
    budget = Budget(request.retries, stalls=request.on_stall is OnStall.RESTART)
    nodes = frozenset(peer.node for peer in request.gang.peers)
    known = None if request.gang.preflight else Facts()
    return initial(request.node, nodes, policy, budget, facts=known)


class _Supervisor:
    """The effects: each event is read here, each action is done here, and nothing is decided."""

    def __init__(
        self, request: StartRequest, connections: Mesh, heartbeat: SupervisorHeartbeat, notifier: Notifier
    ) -> None:
        self._request = request
        self._notifier = notifier
        self._mesh = connections
        self._heartbeat = heartbeat
        self._record = job_record.JobRecord(request)
        self._state = _initial_state(request)
        self._facts: Optional[FactCollector] = None
        self._notices = NoticeWatch(request.deadline, request.save)
        self._gpus = Gpus(RECORD_SECONDS)
        self._recorder = Recorder(self._record.folder, self._gpus)
        self._heartbeat_at = 0.0
        self._cancelled_at: Optional[float] = None
        self._guard = os.getppid()
        self._signal = 0  # that asked this process to end
        self._begin(0)

    def _begin(self, number: int) -> None:
        """Forget what is known of the last attempt."""
        self._attempt = Attempt(self._request, self._record.folder, number)
        self._watches = Watches(self._request, self._record.folder, number, self._gpus)

    def run(self) -> None:
        """Run the job to its verdict. An error of this process is sent to the others before it ends the
        process."""
        try:
            self._run()
        except Exception as error:
            self._send(Message(Kind.CRASHED, error=last_line(error)))
            self._mesh.flush(LAST_WORDS)
            raise
        finally:
            commands.kill_running()

    def _run(self) -> None:
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, self._on_signal)
        # The end of a launcher is noticed at once: its ranks end because of it, and those of other nodes
        # because of them.
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(self._mesh.wake.fileno(), warn_on_full_buffer=False)
        self._record.starting()
        if self._request.gang.preflight:
            self._facts = FactCollector(self._request, on_found=lambda: self._mesh.wake.send(b"\0"))
        while self._state.verdict is None:
            self._heartbeat.beat(self._request.gang.silence)
            if time.monotonic() > self._heartbeat_at:
                self._send_heartbeat()
            for event in self._turn():
                self._apply(event)
        self._mesh.flush(LAST_WORDS)
        if os.getppid() != self._guard:
            self._notifier.conclude()

    def _on_signal(self, number: int, _: Any) -> None:
        self._signal = number

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
            yield from self._while_joining()
        elif not self._state.is_ending:
            yield from self._while_ranks_run()
        elif self._attempt.is_over:
            yield from self._while_others_end()

    def _while_joining(self) -> Iterator[events.Event]:
        if self._facts is not None and self._facts.found is not None:
            found, self._facts = self._facts.found, None
            self._record.keep_facts(found)
            yield events.FactsFound(found)
        yield from self._end_requests()

    def _end_requests(self) -> Iterator[events.Event]:
        """Yield what this node was asked for: by `kill`, and by a signal."""
        if self._record.is_stopping:
            yield events.StopMarked(self._record.is_cancelled)
        if self._signal:
            yield events.EndRequested(self._why_requested())

    def _why_requested(self) -> str:
        if os.getppid() != self._guard:
            return "its parent was killed"
        return f"ended by {signal.Signals(self._signal).name}: the machine may be shutting down"

    def _while_ranks_run(self) -> Iterator[events.Event]:
        """Look for what ends the job on this node: a cancel, a failure, a notice, or that all launchers have
        ended."""
        look = self._attempt.look() if self._state.ranks_started else Look.RUNNING
        yield from self._end_requests()
        yield events.RanksChecked(look is Look.FAILED, look is Look.ENDED, self._attempt.succeeded)
        if look is Look.RUNNING and not self._state.is_ending and (notice := self._notices.due()) is not None:
            failure, grace = notice.failure(self._request.node), notice.grace(self._request.stop_grace)
            if notice.by_aws:
                self._notifier.post(NOTICE, failure)
            yield events.NoticeReceived(failure, grace)
        if self._state.is_ending:
            return
        if self._state.is_first and (near := self._notices.announcement(ANNOUNCE_SECONDS)) is not None:
            self._notifier.post(DEADLINE, near.failure(self._request.node))
        if not self._state.ranks_started:
            yield from self._while_copying()
        else:
            yield from self._watch_stall()
            for message in self._watches.stragglers(is_first=self._state.is_first):
                self._send(message)
            for message in self._watches.written():
                self._send(message)
            self._watches.note_isolated_ranks(self._attempt.running_ranks)
            self._watches.set_stale_copies_aside()
            self._recorder.turn()

    def _while_copying(self) -> Iterator[events.Event]:
        spread = self._watches.spread
        if spread is None:
            yield events.Copied()
            return
        for message in spread.turn():
            self._send(message)
        if spread.error:
            yield events.CopyFailed(spread.error)
        elif spread.is_done:
            spread.close()
            yield events.Copied()

    def _watch_stall(self) -> Iterator[events.Event]:
        state = self._state
        others = None if state.all_finished else state.left - {state.node}
        for message in self._watches.stall(is_first=state.is_first, others=others):
            self._send(message)
        if state.is_first and (found := self._watches.stalls.conclusion(state.left)) is not None:
            self._notifier.post(STALLED, found.failure)
            yield events.Stalled(found)

    def _while_others_end(self) -> Iterator[events.Event]:
        """Report the end of this node's ranks. Where they have ended by themselves, watch those of the other
        nodes."""
        if not self._state.has_reported:
            for message in self._watches.written(last=True):
                self._send(message)
            cancelled = None if self._cancelled_at is None else causes.ago_of(self._cancelled_at)
            yield events.RanksEnded(self._attempt.report(cancelled))
        if not self._state.is_stopping and self._state.is_ending:
            if self._record.is_stopping:
                yield events.StopMarked(self._record.is_cancelled)
            else:
                yield from self._watch_stall()

    # -- actions ---------------------------------------------------------------------------------------------

    def _do(self, action: events.Action) -> None:
        handlers: dict[type[Any], Callable[[Any], object]] = {
            events.Send: lambda one: self._mesh.send(one.message),
            events.SendHeartbeat: lambda _: self._send_heartbeat(),
            events.Forward: lambda one: self._watches.take(one.node, one.message),
            events.BeginAttempt: lambda _: self._begin_attempt(),
            events.StartRanks: lambda _: self._start_ranks(),
            events.Restart: self._restart,
            events.RecordFailure: self._record_failure,
            events.EndRanks: self._end_ranks,
            events.AnnounceStop: self._announce_stop,
            events.WaitForRanks: lambda _: self._wait_for_ranks(),
            events.Note: self._note,
            events.LeaveStall: lambda one: self._send(self._watches.leave_stall(one.detail)),
            events.RecordUnreachable: lambda one: self._record.unreachable(one.missing),
            events.End: lambda one: self._record.end(one.verdict),
        }
        handlers[type(action)](action)

    def _send(self, message: Message) -> None:
        self._mesh.send(replace(message, attempt=self._state.attempt, clock=time.time()))

    def _send_heartbeat(self) -> None:
        self._heartbeat_at = time.monotonic() + self._request.gang.silence / HEARTBEATS
        finished = self._request.node in self._state.finished
        idle, paces = self._watches.stalls.idle(), self._watches.pace.paces()
        self._send(Message(Kind.HEARTBEAT, finished=finished, idle=idle, paces=paces))

    def _begin_attempt(self) -> None:
        self._record.running(self._attempt.number)
        if self._watches.spread is not None:
            self._watches.spread.start()

    def _start_ranks(self) -> None:
        self._watches.begin()
        own = self._state.facts.get(self._request.node)
        self._attempt.launch(torch=own.torch if own else "")
        if self._attempt.error:
            self._record.cannot_start(self._attempt.error)
        elif not self._attempt.number:
            poweroff.begin(self._request.job, self._request.poweroff)

    def _restart(self, action: events.Restart) -> None:
        attempt.clear(self._record.folder)
        job_record.note(self._record.folder, action.note, launcher=True)
        self._begin(action.number)

    def _record_failure(self, action: events.RecordFailure) -> None:
        self._attempt.fail(action.observed.failure, action.observed.last_lines)

    def _end_ranks(self, action: events.EndRanks) -> None:
        if action.cancelled and self._cancelled_at is None:
            self._cancelled_at = self._record.time_of_cancel()
        if not self._state.ranks_started and self._watches.spread is not None:
            self._watches.spread.close()
        self._attempt.end(action.grace, saving=action.saving)

    def _announce_stop(self, action: events.AnnounceStop) -> None:
        self._record.mark_stop(cancelled=action.cancelled, token=action.token)
        token = phases.cancel_token(self._record.folder)
        self._send(Message(Kind.STOP, cancelled=action.cancelled, token=token, grace=action.grace))

    def _wait_for_ranks(self) -> None:
        longest = self._request.stop_grace + processes.GIVE_UP_SECONDS
        self._heartbeat.beat(longest + self._request.gang.silence)
        self._attempt.join()

    def _note(self, action: events.Note) -> None:
        job_record.note(self._record.folder, action.text)
        self._watches.stalls.noted()  # which is no output of the ranks


class FactCollector:
    """Collects in a thread what this node is like, while the nodes of a job connect to each other, and calls
    `on_found`. `found` is None until then."""

    def __init__(self, request: StartRequest, *, on_found: Callable[[], object]) -> None:
        self.found: Optional[Facts] = None
        self._request = request
        self._on_found = on_found
        threading.Thread(target=self._collect, daemon=True).start()

    def _collect(self) -> None:
        problems: list[str] = []
        copying = threading.Thread(target=lambda: problems.append(self._cannot_copy()), daemon=True)
        copying.start()
        try:
            request, project = self._request, store.project_folder(self._request.project)
            image, command = "", [commands.program(request.program, project), "-I", "-c", preflight.VERSIONS]
            if request.container:
                image, folder = request.container.image, store.job_folder(request.job)
                without = replace(request.container, gpus=False)
                command, _ = docker.command(without, command, project, {}, folder)
            found = preflight.facts(command, Path.home())
            copying.join()
            defects = [one[:MAX_FACT] for one in problems if one]
            self.found = replace(found, image=image, defects=(*found.defects, *defects))
        finally:
            self.found = self.found or Facts()
            with contextlib.suppress(OSError):  # the socket is full, or closed
                self._on_found()

    def _cannot_copy(self) -> str:
        if self._request.results is None:
            return ""
        from agent.s3 import copies  # 35 ms, which a job without results in S3 need not take

        return copies.check(self._request)
