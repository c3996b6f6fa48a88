"""A job on one node: starts its ranks once all nodes are connected, ends them when the gang has to end, records the end.

One thread serves the connections to the other nodes (mesh.py), looks at the ranks, and decides; a second one ends
processes, which may take as long as the ranks need to save.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any, Optional

from agent import (
    attempt,
    causes,
    decision,
    launchers,
    notices,
    phases,
    poweroff,
    prctl,
    preflight,
    processes,
    restarts,
    store,
)
from agent.attempt import Attempt, Look
from agent.commands import program
from agent.decision import Arrived, Seen
from agent.mesh import Closed, Mesh, Received
from agent.stall import Stall
from cloudddp.agent.protocol.codec import MAX_TEXT
from cloudddp.agent.protocol.gang import MAX_PROBLEMS, Facts, Kind, Message, Observed, Unreachable
from cloudddp.agent.protocol.phases import JobPhase
from cloudddp.agent.protocol.start import OnStall, StartRequest
from cloudddp.agent.protocol.training import PREEMPTED_EXIT_CODE
from cloudddp.agent.protocol.verdict import MAX_LINE, Cause, Failure, Verdict

PAUSE = 0.05  # seconds between two looks at the ranks
FAILURE_GRACE = (
    2.0  # seconds between SIGTERM and SIGKILL at most, once a rank has failed: the others cannot go on
)
HEARTBEATS = 10  # in the time after which a silent node is lost
EXIT_BARRIER = 10.0  # seconds that torchrun may wait for the others after every rank of the job has finished
LEFTOVERS_GRACE = 1.0  # seconds for processes that ranks have left behind
LAST_WORDS = 2.0  # seconds for the verdict to reach the others


def run(request: StartRequest) -> int:
    """Run the job on this node to its verdict. Return the exit code of this process."""
    prctl.adopt_orphans()
    launchers.raise_limits()
    try:
        mesh = Mesh(request.node, request.gang)
    except OSError as error:
        _refuse(request, f"cannot listen for the other nodes: {error.strerror}")
        return 1
    with contextlib.closing(mesh):
        return _Supervisor(request, mesh).run()


def _refuse(request: StartRequest, error: str) -> None:
    """Record that the job cannot be started on this node."""
    folder = store.job_folder(request.job)
    state = store.read(folder / phases.STATE_FILE, phases.StateFile)
    if state is not None:
        store.write(folder / phases.UNREACHABLE_FILE, Unreachable({}, (), error))
        first = Failure(request.node, Cause.START, detail=error)
        _record(folder, replace(state, error=error), Verdict(JobPhase.FAILED, 1, request.node, first))


def _record(folder: Path, state: phases.StateFile, verdict: Verdict) -> None:
    store.write(folder / phases.VERDICT_FILE, verdict)
    ended = replace(state, state=verdict.phase, ended=time.time(), exit_code=verdict.exit_code)
    store.write(folder / phases.STATE_FILE, ended)


class _Facts:
    """Collects what this node is like, while its agent connects to the others."""

    def __init__(self, request: StartRequest) -> None:
        self.found: Optional[Facts] = None
        if not request.gang.preflight:
            self.found = Facts()
            return
        first = request.processes[0] if request.processes else None
        word = (first.launcher or first.rank)[0] if first else ""
        python = program(word, store.project_folder(request.project))
        threading.Thread(target=self._collect, args=(python,), daemon=True).start()

    def _collect(self, python: str) -> None:
        try:
            self.found = preflight.facts(python, Path.home())
        finally:
            self.found = self.found or Facts()


class _Supervisor:
    def __init__(self, request: StartRequest, mesh: Mesh) -> None:
        self._request = request
        self._node = request.node
        self._folder = store.job_folder(request.job)
        self._others = {peer.node for peer in request.gang.peers} - {request.node}
        self._state = phases.StateFile(
            request.job, request.node, JobPhase.STARTING, pid=os.getpid(), born=processes.born(os.getpid()),
            script=request.script, expected=request.ranks, max_restarts=request.max_restarts,
            resumed_from=request.resumed_from, guard=os.getppid(), guard_born=processes.born(os.getppid()),
        )  # fmt: skip
        self._mesh = mesh
        self._facts: dict[int, Facts] = {}
        self._skews: dict[int, float] = {}  # seconds by which the clock of another node is ahead
        self._ready: set[int] = set()  # nodes that are connected to all others
        self._lost: dict[int, Seen] = {}  # nodes whose agent has ended or is silent
        self._verdict: Optional[Verdict] = None
        self._cancelled_at: Optional[float] = None
        self._guard = os.getppid()
        self._asked_to_end = 0  # the signal that asked this process to end
        self._heartbeat_at = 0.0
        self._looked_at = 0.0  # for silent nodes
        self._budget = restarts.Budget(request.retries, stalls=request.on_stall is OnStall.RESTART)
        self._notices = notices.Watch(request.deadline, request.save)
        self._early: list[Received] = []  # messages about an attempt that has not begun here
        self._begin(0)

    def _begin(self, number: int) -> None:
        """Forget what is known of the last attempt."""
        self._attempt = Attempt(self._request, self._folder, number)
        self._stall = Stall(self._node, self._folder, self._request.stall_minutes)
        self._finished: set[int] = set()  # nodes whose ranks have all exited with 0
        self._finished_at: Optional[float] = None  # when all nodes were
        self._reports: dict[int, Arrived] = {}

    def run(self) -> int:
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, self._on_signal)
        # The end of a launcher is noticed at once: its ranks end because of it, and those of other nodes because of them.
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(self._mesh.wake.fileno(), warn_on_full_buffer=False)
        store.write(self._folder / phases.STATE_FILE, self._state)
        if not self._join():
            return 1
        self._launch()
        while self._verdict is None:
            self._turn()
        _record(self._folder, self._state, self._verdict)
        self._send(Message(Kind.VERDICT, verdict=self._verdict))
        self._mesh.flush(LAST_WORDS)
        first = self._verdict.first
        if first is not None and first.cause is Cause.STALL and self._request.on_stall is OnStall.DOWN:
            poweroff.power_off()
        return 0

    def _on_signal(self, number: int, _: Any) -> None:
        self._asked_to_end = number

    # -- the beginning -----------------------------------------------------------------------------------------

    def _join(self) -> bool:
        """Connect to all other nodes, in both directions; return whether every node is connected to all others."""
        deadline = time.monotonic() + self._request.gang.join
        facts = _Facts(self._request)
        announced = False
        while self._ready != self._others or not announced:
            self._poll(0.01)
            if self._mesh.complete and not announced and (found := facts.found) is not None:
                announced = True
                self._facts[self._node] = found
                self._send(Message(Kind.READY, facts=found, clock=time.time()))
            stopped = phases.is_stopping(self._folder) or self._attempt.stopped_at is not None
            if stopped or self._lost or self._asked_to_end or time.monotonic() > deadline:
                self._give_up(cancelled=(self._folder / phases.CANCEL_MARK).exists())
                return False
        if not self._request.gang.preflight:
            return True
        problems = preflight.problems(self._node, self._facts, self._skews)
        if problems:
            self._give_up(cancelled=False, problems=tuple(one[:MAX_LINE] for one in problems[:MAX_PROBLEMS]))
        return not problems

    def _give_up(self, *, cancelled: bool, problems: tuple[str, ...] = ()) -> None:
        """End before any rank was started."""
        missing = replace(self._mesh.missing, problems=problems)
        self._send(Message(Kind.STOP, cancelled=cancelled))
        self._mesh.flush(LAST_WORDS)
        if cancelled:
            verdict = Verdict(JobPhase.CANCELLED, decision.CANCELLED, self._node)
            _record(self._folder, self._state, verdict)
            return
        store.write(self._folder / phases.UNREACHABLE_FILE, missing)
        peer = next(iter(missing.to), next(iter(missing.by), None))
        detail = missing.to.get(peer, "") if peer is not None else ""
        first = Failure(self._node, Cause.UNREACHABLE, detail=detail, peer=peer)
        if problems:
            first = Failure(self._node, Cause.PREFLIGHT, detail="; ".join(problems)[:MAX_TEXT])
        _record(self._folder, self._state, Verdict(JobPhase.FAILED, 1, self._node, first))

    def _launch(self) -> None:
        started = self._state.started or time.time()
        self._state = replace(
            self._state, state=JobPhase.RUNNING, started=started, restarts=self._attempt.number
        )
        store.write(self._folder / phases.STATE_FILE, self._state)
        own = self._facts.get(self._node)
        self._attempt.launch(torch=own.torch if own else "")
        if self._attempt.error:
            self._state = replace(self._state, error=self._attempt.error[:MAX_TEXT])

    # -- while it runs -----------------------------------------------------------------------------------------

    def _turn(self) -> None:
        """One turn of the loop: messages, silence, the ranks, the end."""
        self._poll(PAUSE)
        self._notice_silence()
        if self._attempt.stopped_at is None:
            self._watch()
        elif self._attempt.is_over and self._node not in self._reports:
            cancelled = None if self._cancelled_at is None else causes.ago_of(self._cancelled_at)
            report = self._attempt.report(cancelled)
            self._reports[self._node] = Arrived(time.monotonic(), report)
            self._send(Message(Kind.ENDED, report=report))
        self._decide()

    def _send(self, message: Message) -> None:
        self._mesh.send(replace(message, attempt=self._attempt.number))

    def _poll(self, seconds: float) -> None:
        now = time.monotonic()
        if now > self._heartbeat_at:
            self._heartbeat_at = now + self._request.gang.silence / HEARTBEATS
            finished = self._node in self._finished
            self._send(Message(Kind.HEARTBEAT, finished=finished, idle=self._stall.idle()))
        for event in self._mesh.poll(seconds):
            if isinstance(event, Received):
                self._received(event)
            else:
                self._closed(event)

    def _received(self, event: Received) -> None:
        node, message = event.node, event.message
        if message.attempt > self._attempt.number and message.kind is not Kind.RESTART:
            self._early.append(event)
        elif message.kind is Kind.READY:
            self._ready.add(node)
            if message.facts is not None:
                self._facts[node] = message.facts
            if message.clock is not None:
                self._skews[node] = message.clock - time.time()
        elif message.kind is Kind.RESTART and message.verdict is not None:
            if message.attempt == self._attempt.number + 1:
                self._restart(message.verdict)
        elif message.kind is Kind.VERDICT and message.verdict is not None and node not in self._lost:
            self._heard_verdict(message.verdict)
        elif message.attempt == self._attempt.number:
            self._heard(node, message)

    def _heard(self, node: int, message: Message) -> None:
        """Take a message about the attempt that runs."""
        if message.kind is Kind.HEARTBEAT:
            self._stall.heard_idle(node, message.idle)
            if message.finished:
                self._finished.add(node)
        elif message.kind is Kind.STALLED:
            self._stall.gather()
        elif message.kind is Kind.STACKS:
            self._stall.heard_stacks(node, message.stacks)
        elif message.kind is Kind.STOP:
            self._stop(cancelled=message.cancelled, token=message.token, grace=message.grace)
        elif message.kind is Kind.ENDED and message.report is not None:
            self._reports[node] = Arrived(time.monotonic(), message.report)

    def _heard_verdict(self, verdict: Verdict) -> None:
        """Accept it: the other nodes have ended. Processes may be left here, if this node was frozen."""
        if self._node not in self._reports:
            self._stop(cancelled=verdict.phase is JobPhase.CANCELLED)
            self._attempt.join()
        self._verdict = self._verdict or verdict

    def _closed(self, event: Closed) -> None:
        failure = Failure(event.node, Cause.AGENT)
        self._lose(event.node, Seen(time.monotonic(), Observed(failure, 0.0)))

    def _notice_silence(self) -> None:
        """Lose the nodes that are silent. A node that was itself frozen waits for them once more: the others may have sent
        it their verdict, which the network delivers after a while."""
        now = time.monotonic()
        if now - self._looked_at > self._request.gang.silence / 2:
            self._mesh.heard = dict.fromkeys(self._mesh.heard, now)
        self._looked_at = now
        for node in self._others - self._lost.keys():
            since = self._mesh.heard[node]
            if now - since > self._request.gang.silence:
                failure = Failure(node, Cause.SILENT, peer=self._node)
                self._lose(node, Seen(since, Observed(failure, 0.0)))

    def _lose(self, node: int, seen: Seen) -> None:
        if node in self._lost:
            return
        if node in self._reports:  # its ranks have ended, and the others have its report, too
            self._lost[node] = replace(seen, at=float("inf"))
            return
        self._lost[node] = seen
        self._stop(cancelled=False)

    def _watch(self) -> None:
        """Notice what ends the job on this node: a failure, a cancel, or that all ranks and launchers have ended."""
        look = self._attempt.look()
        if self._attempt.succeeded and self._node not in self._finished:
            self._finished.add(self._node)
            self._heartbeat_at = 0.0
        if phases.is_stopping(self._folder):
            self._stop(cancelled=(self._folder / phases.CANCEL_MARK).exists())
        elif self._asked_to_end:
            self._attempt.fail(Failure(self._node, Cause.AGENT, detail=self._why_asked()))
            self._stop(cancelled=False)
        elif look is Look.FAILED:
            self._stop(cancelled=False)
        elif look is Look.RUNNING and (notice := self._notices.due()) is not None:
            self._obey(notice)
        elif look is Look.ENDED or self._waits_at_exit_barrier():
            self._attempt.end(LEFTOVERS_GRACE)
        else:
            self._watch_stall()

    def _watch_stall(self) -> None:
        """Notice that no rank of any node does anything. The first node declares it, and decides what follows."""
        nodes = self._others | {self._node}
        is_first = self._node == min(nodes)
        if is_first and not nodes <= self._finished and self._stall.is_due(self._others):
            self._send(Message(Kind.STALLED))
            self._stall.gather()
        found = self._stall.gathered()
        if found is not None:
            self._send(Message(Kind.STACKS, stacks=found))
        stalled = self._stall.conclusion(nodes) if is_first else None
        if stalled is None:
            return
        _note(self._folder, f"stalled: {stalled.failure.detail}")
        self._stall.noted()
        if self._request.on_stall is not OnStall.LEAVE:
            self._attempt.fail(stalled.failure, stalled.last_lines)
            self._stop(cancelled=False)

    def _why_asked(self) -> str:
        if os.getppid() != self._guard:
            return "its parent was killed"
        return f"ended by {signal.Signals(self._asked_to_end).name}: the machine may be shutting down"

    def _waits_at_exit_barrier(self) -> bool:
        """Whether torchrun still waits for its peers although every rank of the job has finished."""
        if not self._others | {self._node} <= self._finished:
            return False
        self._finished_at = self._finished_at or time.monotonic()
        return time.monotonic() - self._finished_at > EXIT_BARRIER

    # -- the end -----------------------------------------------------------------------------------------------

    def _obey(self, notice: notices.Notice) -> None:
        """Tell the ranks of all nodes to save: this node is about to end."""
        failure = Failure(self._node, Cause.NOTICE, exit_code=PREEMPTED_EXIT_CODE, detail=notice.detail)
        self._attempt.fail(failure)
        self._stop(cancelled=False, grace=notice.grace(self._request.stop_grace))

    def _stop(self, *, cancelled: bool, token: str = "", grace: Optional[float] = None) -> None:
        """End the ranks here and on all other nodes. `grace`: seconds in which they may save."""
        if cancelled and self._cancelled_at is None:
            self._cancelled_at = self._time_of_cancel()
        own = self._request.stop_grace
        limit = grace if grace is not None else own if cancelled else min(own, FAILURE_GRACE)
        stopped = self._attempt.stopped_at is not None
        self._attempt.end(limit, saving=grace is not None)
        if stopped:
            return
        self._mark(cancelled=cancelled, token=token)
        token = phases.cancel_token(self._folder)
        self._send(Message(Kind.STOP, cancelled=cancelled, token=token, grace=grace))

    def _mark(self, *, cancelled: bool, token: str) -> None:
        """Mark that this process ends the ranks. The time of a cancel that is marked already is kept."""
        with contextlib.suppress(OSError):
            (self._folder / phases.STOPPED_MARK).touch()
            mark = self._folder / phases.CANCEL_MARK
            if cancelled and not mark.exists():
                store.write_private(mark, token.encode())

    def _time_of_cancel(self) -> float:
        """Return when the job was cancelled. `kill` sets its mark first, and may have ended launchers since."""
        marked = phases.cancelled_at(self._folder)
        return time.monotonic() - (0.0 if marked is None else max(time.time() - marked, 0.0))

    def _decide(self) -> None:
        """Decide if this is the first node that is left, and all that are left have reported."""
        left = (self._others | {self._node}) - self._lost.keys()
        if self._verdict is not None or self._node != min(left) or not left <= self._reports.keys():
            return
        seen = [one for one in self._lost.values() if one.at != float("inf")]
        verdict = decision.verdict(self._node, self._reports, seen)
        verdict = replace(verdict, restarts=self._attempt.number)
        if verdict.phase is JobPhase.FAILED and not self._lost:
            steps = [one.report.step for one in self._reports.values() if one.report.step is not None]
            refusal = self._budget.refusal(verdict, max(steps, default=None))
            if refusal is None:
                self._mesh.send(Message(Kind.RESTART, attempt=self._attempt.number + 1, verdict=verdict))
                self._restart(verdict)
                return
            verdict = replace(verdict, refusal=refusal)
        self._verdict = verdict

    def _restart(self, verdict: Verdict) -> None:
        """Start the ranks again, after no process of the last attempt is left on any node."""
        number = self._attempt.number + 1
        attempt.clear(self._folder)
        why = ""
        if verdict.first is not None and verdict.first.rank is not None:
            why = f": rank {verdict.first.rank} on node {verdict.first.node} failed"
        _note(self._folder, f"restart {number}{why}")
        self._begin(number)
        self._launch()
        early, self._early = self._early, []
        for event in early:
            self._received(event)


def _note(folder: Path, text: str) -> None:
    """Write into every log of this node what the agents do with the job."""
    line = f"--- cloudddp: {text} ---\n".encode(errors="replace")
    for path in [folder / "launcher.log", *(path for _, path in phases.rank_files(folder, ".log"))]:
        with contextlib.suppress(OSError), open(path, "ab") as log:
            log.write(line)
