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

from agent import causes, decision, jobs, launchers, phases, preflight, processes, store
from agent.commands import program
from agent.decision import Arrived, Seen
from agent.mesh import Closed, Mesh, Received
from cloudddp.agent.protocol.codec import MAX_TEXT
from cloudddp.agent.protocol.gang import MAX_PROBLEMS, Facts, Kind, Message, Observed, Report, Unreachable
from cloudddp.agent.protocol.jobs import RankRecord
from cloudddp.agent.protocol.phases import JobPhase
from cloudddp.agent.protocol.start import StartRequest
from cloudddp.agent.protocol.verdict import MAX_LINE, Cause, Failure, Verdict

PAUSE = 0.05  # seconds between two looks at the ranks
NOT_STARTED = 127  # the exit code of a command that cannot be started, as in a shell
FAILURE_GRACE = (
    2.0  # seconds between SIGTERM and SIGKILL at most, once a rank has failed: the others cannot go on
)
HEARTBEATS = 10  # in the time after which a silent node is lost
EXIT_BARRIER = 10.0  # seconds that torchrun may wait for the others after every rank of the job has finished
WRAPPER_SECONDS = 0.2  # for a rank's wrapper to record its end
LAST_WORDS = 2.0  # seconds for the verdict to reach the others


def run(request: StartRequest) -> int:
    """Run the job on this node to its verdict. Return the exit code of this process."""
    processes.adopt_orphans()
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
        self._task = phases.task(self._folder, request.node)
        self._others = {peer.node for peer in request.gang.peers} - {request.node}
        self._state = phases.StateFile(
            request.job, request.node, JobPhase.STARTING, pid=os.getpid(), born=processes.born(os.getpid()),
            script=request.script, expected=request.ranks, max_restarts=request.max_restarts,
        )  # fmt: skip
        self._kernel = causes.Kernel.now()
        self._mesh = mesh
        self._children: list[launchers.Child[bytes]] = []
        self._facts: dict[int, Facts] = {}
        self._skews: dict[int, float] = {}  # seconds by which the clock of another node is ahead
        self._ready: set[int] = set()  # nodes that are connected to all others
        self._finished: set[int] = set()  # nodes whose ranks have all exited with 0
        self._finished_at: Optional[float] = None  # when all nodes were
        self._lost: dict[int, Seen] = {}  # nodes whose agent has ended or is silent
        self._reports: dict[int, Arrived] = {}
        self._verdict: Optional[Verdict] = None
        self._failures: list[Seen] = []  # on this node, that are no rank's own end
        self._cancelled_at: Optional[float] = None
        self._ending: Optional[threading.Thread] = None
        self._stopped_at: Optional[float] = None  # when the ranks were asked to end here
        self._asked_to_end = 0  # the signal that asked this process to end
        self._heartbeat_at = 0.0
        self._told = False  # that another node has failed, or that the job was cancelled there
        self._launchers: dict[int, Seen] = {}  # failed ones, by pid
        self._gone: dict[int, float] = {}  # ranks that have ended without a record, and since when
        self._records: list[RankRecord] = []
        self._records_changed = -1

    def run(self) -> int:
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, self._on_signal)
        # The end of a launcher is noticed at once: its ranks end because of it, and those of other nodes because of them.
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(self._mesh.wake.fileno(), warn_on_full_buffer=False)
        store.write(self._folder / phases.STATE_FILE, self._state)
        if not self._join():
            return 1
        self._launch_all()
        while self._verdict is None:
            self._turn()
        _record(self._folder, self._state, self._verdict)
        self._mesh.send(Message(Kind.VERDICT, verdict=self._verdict))
        self._mesh.flush(LAST_WORDS)
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
                self._mesh.send(Message(Kind.READY, facts=found, clock=time.time()))
            stopped = phases.is_stopping(self._folder) or self._stopped_at is not None
            if stopped or self._lost or self._asked_to_end or time.monotonic() > deadline:
                self._give_up(cancelled=phases.is_stopping(self._folder))
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
        self._mesh.send(Message(Kind.STOP, cancelled=cancelled))
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

    def _launch_all(self) -> None:
        self._state = replace(self._state, state=JobPhase.RUNNING, started=time.time())
        store.write(self._folder / phases.STATE_FILE, self._state)
        try:
            for process in self._request.processes:
                if not phases.is_stopping(self._folder):
                    self._children.append(launchers.launch(self._request, process, self._task))
        except (OSError, ValueError) as error:  # ValueError: a NUL in an argument or a variable
            reason = (
                f"{error.filename or 'process'}: {error.strerror}"
                if isinstance(error, OSError)
                else str(error)
            )
            self._state = replace(self._state, error=reason[:MAX_TEXT])
            self._fail(Failure(self._node, Cause.START, exit_code=NOT_STARTED, detail=reason[:MAX_TEXT]))

    # -- while it runs -----------------------------------------------------------------------------------------

    def _turn(self) -> None:
        """One turn of the loop: messages, silence, the ranks, the end."""
        self._poll(PAUSE)
        self._notice_silence()
        if self._ending is None:
            self._watch_ranks()
        elif not self._ending.is_alive() and self._node not in self._reports:
            self._settle()
        self._decide()

    def _poll(self, seconds: float) -> None:
        now = time.monotonic()
        if now > self._heartbeat_at:
            self._heartbeat_at = now + self._request.gang.silence / HEARTBEATS
            self._mesh.send(Message(Kind.HEARTBEAT, finished=self._node in self._finished))
        for event in self._mesh.poll(seconds):
            if isinstance(event, Received):
                self._received(event.node, event.message)
            else:
                self._closed(event)

    def _received(self, node: int, message: Message) -> None:
        if message.kind is Kind.READY:
            self._ready.add(node)
            if message.facts is not None:
                self._facts[node] = message.facts
            if message.clock is not None:
                self._skews[node] = message.clock - time.time()
        elif message.kind is Kind.HEARTBEAT and message.finished:
            self._finished.add(node)
        elif message.kind is Kind.STOP:
            self._told = True
            self._stop(cancelled=message.cancelled)
        elif message.kind is Kind.ENDED and message.report is not None:
            self._reports[node] = Arrived(time.monotonic(), message.report)
        elif message.kind is Kind.VERDICT and message.verdict is not None and node not in self._lost:
            self._heard_verdict(message.verdict)

    def _heard_verdict(self, verdict: Verdict) -> None:
        """Accept it: the other nodes have ended. Processes may be left here, if this node was frozen."""
        if self._node not in self._reports:
            self._stop(cancelled=verdict.phase is JobPhase.CANCELLED)
            if self._ending is not None:
                self._ending.join()
        self._verdict = self._verdict or verdict

    def _closed(self, event: Closed) -> None:
        if event.node in self._reports and self._verdict is not None:
            return  # it has ended after the verdict
        failure = Failure(event.node, Cause.AGENT)
        self._lose(event.node, Seen(time.monotonic(), Observed(failure, 0.0)))

    def _notice_silence(self) -> None:
        """Lose the nodes that are silent. Called after `poll`, so that a node that was frozen reads what was sent to it."""
        now = time.monotonic()
        for node in self._others - self._lost.keys():
            since = self._mesh.heard[node]
            if now - since > self._request.gang.silence:
                failure = Failure(node, Cause.SILENT, peer=self._node)
                self._lose(node, Seen(since, Observed(failure, 0.0)))

    def _lose(self, node: int, seen: Seen) -> None:
        if node in self._lost:
            return
        if node in self._reports:  # its ranks have ended, and the others have its report, too
            self._lost[node] = Seen(float("inf"), seen.observed)
            return
        self._lost[node] = seen
        self._told = True
        self._stop(cancelled=False)

    def _watch_ranks(self) -> None:
        """Notice what ends the job on this node: a failure, a cancel, or that all ranks and launchers have ended."""
        self._read_records()
        self._notice_killed_wrappers()
        self._notice_launchers()
        codes = [child.poll() for child in self._children]
        launchers.collect_orphans(self._children)
        if phases.is_stopping(self._folder):
            self._stop(cancelled=(self._folder / phases.CANCEL_MARK).exists())
        elif self._asked_to_end:
            name = signal.Signals(self._asked_to_end).name
            detail = f"ended by {name}: the machine may be shutting down"
            self._fail(Failure(self._node, Cause.AGENT, detail=detail))
        elif (not self._request.max_restarts and causes.failed_ranks(self._records)) or (
            any(codes) and not self._succeeded()
        ):
            self._stop(cancelled=False)
        elif all(code is not None for code in codes) or self._waits_at_exit_barrier():
            self._stop(cancelled=False, quiet=True)

    def _read_records(self) -> None:
        """Read the ranks' records if one has changed: each is replaced, which changes the folder."""
        with contextlib.suppress(OSError):
            changed = os.stat(self._folder / "ranks").st_mtime_ns
            if changed != self._records_changed:
                self._records_changed = changed
                self._records = jobs.rank_records(self._folder)
                if self._succeeded():
                    self._finished.add(self._node)
                    self._heartbeat_at = 0.0

    def _notice_launchers(self) -> None:
        """Keep when a launcher has failed by itself. Those of ranks that have failed follow them."""
        for child in self._children:
            code = child.poll()
            if code and child.pid not in self._launchers:
                self._launchers[child.pid] = Seen(time.monotonic(), self._launcher_failure(code))

    def _launcher_failure(self, code: int) -> Observed:
        failure = Failure(
            self._node, Cause.LAUNCHER, exit_code=128 - code if code < 0 else code,
            signal=-code if code < 0 else None,
        )  # fmt: skip
        return Observed(failure, 0.0, causes.last_lines(self._folder / "launcher.log"))

    def _notice_killed_wrappers(self) -> None:
        """Record the end of a rank whose wrapper was killed with it. An intact wrapper records it within milliseconds."""
        now = time.monotonic()
        for record in self._records:
            if record.exit_code is not None or not record.pid or processes.born(record.pid):
                continue
            if now - self._gone.setdefault(record.rank, now) > WRAPPER_SECONDS:
                jobs.settle(self._folder, [record], asked=False)

    def _succeeded(self) -> bool:
        return len(self._records) == self._request.ranks and all(one.exit_code == 0 for one in self._records)

    def _waits_at_exit_barrier(self) -> bool:
        """Whether torchrun still waits for its peers although every rank of the job has finished."""
        if not self._others | {self._node} <= self._finished:
            return False
        self._finished_at = self._finished_at or time.monotonic()
        return time.monotonic() - self._finished_at > EXIT_BARRIER

    # -- the end -----------------------------------------------------------------------------------------------

    def _fail(self, failure: Failure) -> None:
        lines = causes.last_lines(self._folder / "launcher.log") if failure.cause is Cause.LAUNCHER else ()
        self._failures.append(Seen(time.monotonic(), Observed(failure, 0.0, lines)))
        self._stop(cancelled=False)

    def _stop(self, *, cancelled: bool, quiet: bool = False) -> None:
        """End the ranks here and on all other nodes; with `quiet` only what remains of a job that has ended here."""
        if cancelled and self._cancelled_at is None:
            self._cancelled_at = time.monotonic()
        if self._stopped_at is not None:
            return
        self._notice_launchers()  # before their ranks are ended
        self._stopped_at = time.monotonic()
        if not quiet:
            self._mesh.send(Message(Kind.STOP, cancelled=cancelled))
            with contextlib.suppress(OSError):
                (self._folder / (phases.CANCEL_MARK if cancelled else phases.STOPPED_MARK)).touch()
        grace = self._request.stop_grace
        grace = 1.0 if quiet else grace if cancelled else min(grace, FAILURE_GRACE)
        self._ending = threading.Thread(
            target=processes.end, args=(self._task, grace, self._children), daemon=True
        )
        self._ending.start()

    def _settle(self) -> None:
        """Report to the others how the job ended here: no process of it is left."""
        jobs.settle(self._folder, jobs.rank_records(self._folder), asked=True)
        self._records_changed = -1
        self._read_records()
        report = self._report()
        self._reports[self._node] = Arrived(time.monotonic(), report)
        self._mesh.send(Message(Kind.ENDED, report=report))

    def _report(self) -> Report:
        stopped = self._stopped_at or time.monotonic()
        failures = [
            causes.of_rank(self._folder, self._node, record, self._kernel)
            for record in causes.failed_ranks(self._records)
            if record.at is None or record.at <= stopped
        ]
        if not failures and not self._succeeded():
            seen = [*self._failures, *self._launchers.values()]
        else:
            seen = self._failures
        failures += [replace(one.observed, ago=causes.ago_of(one.at)) for one in seen]
        own = next((one.exit_code for one in self._records if one.exit_code), None)
        cancelled = None if self._cancelled_at is None else causes.ago_of(self._cancelled_at)
        return Report(self._succeeded(), tuple(failures), cancelled, own)

    def _decide(self) -> None:
        """Decide if this is the first node that is left, and all that are left have reported."""
        left = (self._others | {self._node}) - self._lost.keys()
        if self._verdict is None and self._node == min(left) and left <= self._reports.keys():
            seen = [one for one in self._lost.values() if one.at != float("inf")]
            self._verdict = decision.verdict(self._node, self._reports, seen)
