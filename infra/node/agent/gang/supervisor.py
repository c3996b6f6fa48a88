"""A job on one node: starts its ranks once all nodes are connected, ends them when the gang has to end,
records the end.

One thread serves the connections to the other nodes (peers.py, mesh.py), looks at the ranks (attempt.py), and
decides; a second one ends processes, which may take as long as the ranks need to save.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Optional

from agent.gang import decision
from agent.gang.joining import Joining
from agent.gang.mesh import Mesh, Received
from agent.gang.peers import Peers
from agent.jobs import job_record, phases, poweroff
from agent.node import commands, kernel, processes
from agent.node.shared_memory import SupervisorHeartbeat, last_line
from agent.ranks import attempt, causes, launchers
from agent.ranks.attempt import Attempt, Look
from agent.watch import isolation, notices, stragglers
from agent.watch.stall import Stall
from cloudddp.agent.protocol.gang import Kind, Message
from cloudddp.agent.protocol.pace import Straggler
from cloudddp.agent.protocol.phases import JobPhase
from cloudddp.agent.protocol.stall import LeftStall
from cloudddp.agent.protocol.start import OnStall, StartRequest
from cloudddp.agent.protocol.verdict import Cause, Failure, Verdict

if TYPE_CHECKING:
    from agent.share.spread import Spread

PAUSE = 0.05  # seconds between two looks at the ranks
FIRST_DECIDES = 5.0  # seconds for the first node to say why the ranks do not start, as it knows it, too
# Seconds from SIGTERM to SIGKILL at most, once a rank has failed: the others cannot go on.
FAILURE_GRACE = 2.0
EXIT_BARRIER = 10.0  # seconds that torchrun may wait for the others after every rank of the job has finished
LEFTOVERS_GRACE = 1.0  # seconds for processes that ranks have left behind
LAST_WORDS = 2.0  # seconds for the verdict to reach the others


def run(request: StartRequest, heartbeat: SupervisorHeartbeat) -> int:
    """Run the job on this node to its verdict. Return the exit code of this process, whose guard watches the
    `heartbeat`."""
    kernel.adopt_orphans()
    launchers.raise_limits()
    try:
        mesh = Mesh(request.node, request.gang)
    except OSError as error:
        job_record.refuse(request, f"cannot listen for the other nodes: {error.strerror}")
        return 1
    with contextlib.closing(mesh):
        return _Supervisor(request, mesh, heartbeat).run()


class _Supervisor:
    def __init__(self, request: StartRequest, mesh: Mesh, heartbeat: SupervisorHeartbeat) -> None:
        self._request = request
        self._heartbeat = heartbeat
        self._node = request.node
        self._wake = mesh.wake
        self._record = job_record.JobRecord(request)
        self._peers = Peers(request, mesh)
        self._verdict: Optional[Verdict] = None
        self._is_joined = False  # the job has begun on all nodes
        self._cancelled_at: Optional[float] = None
        self._guard = os.getppid()
        self._asked_to_end = 0  # the signal that asked this process to end
        self._budget = decision.Budget(request.retries, stalls=request.on_stall is OnStall.RESTART)
        self._notices = notices.Watch(request.deadline, request.save)
        self._begin(0)

    def _begin(self, number: int) -> None:
        """Forget what is known of the last attempt."""
        self._peers.begin(number)
        self._attempt = Attempt(self._request, self._record.folder, number)
        self._is_launched = False  # the launchers of this attempt were started
        self._spread = self._new_spread(number)
        self._begin_watch()
        self._stragglers = stragglers.Watch(self._node, self._record.folder, self._request.straggler_seconds)
        self._is_stopping = False  # the ranks of all nodes are being ended
        self._over_by = float("inf")  # when that is over on all nodes at the latest, by the monotonic clock

    def _begin_watch(self) -> None:
        """Count the time in which ranks do nothing, or do not connect, from now on."""
        self._stall = Stall(self._node, self._record.folder, self._request.stall_minutes)
        self._isolation = isolation.Watch(self._node, self._request.gang.peers, self._request.alone_seconds)

    def _new_spread(self, number: int) -> Optional[Spread]:
        """Return what copies the newest snapshot, or the shared files, to the nodes that lack it, before
        ranks start."""
        search = self._request.snapshots
        if search is None or len(self._request.gang.peers) == 1 or (search.restarts_only and not number):
            return None
        from agent.share.spread import Spread  # 40 ms, which other jobs need not take

        return Spread(self._request, search)

    def run(self) -> int:
        """Run the job to its verdict. An error of this process is sent to the others before it ends the
        process."""
        try:
            return self._run()
        except Exception as error:
            self._peers.send(Message(Kind.CRASHED, error=last_line(error)))
            self._peers.flush(LAST_WORDS)
            raise
        finally:
            commands.kill_running()

    def _run(self) -> int:
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, self._on_signal)
        # The end of a launcher is noticed at once: its ranks end because of it, and those of other nodes
        # because of them.
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(self._wake.fileno(), warn_on_full_buffer=False)
        self._record.starting()
        if not self._join():
            return 1
        self._launch()
        while self._verdict is None:
            self._turn()
        self._record.end(self._verdict)
        self._peers.send(Message(Kind.VERDICT, verdict=self._verdict))
        self._peers.flush(LAST_WORDS)
        return 0

    def _on_signal(self, number: int, _: Any) -> None:
        self._asked_to_end = number

    # -- the beginning ---------------------------------------------------------------------------------------

    def _join(self) -> bool:
        """Connect to all other nodes, in both directions; return whether the ranks can start."""
        joining = Joining(self._request, self._peers, on_facts=lambda: self._wake.send(b"\0"))
        while not joining.is_done:
            self._receive(PAUSE)
            joining.announce()
            by_another = self._attempt.stopped_at is not None or self._verdict is not None
            asked = self._record.is_stopping or self._asked_to_end
            if by_another or asked or self._peers.lost or joining.is_late:
                self._give_up(joining)
                return False
        problems = joining.problems()
        if problems:
            self._wait_for_the_first()
            self._give_up(joining, problems)
        return not problems

    def _wait_for_the_first(self) -> None:
        """Let the first node decide: all have the same verdict then."""
        deadline = time.monotonic() + FIRST_DECIDES
        while self._node != min(self._peers.left) and self._verdict is None and time.monotonic() < deadline:
            self._receive(PAUSE)
            if self._record.is_stopping or self._asked_to_end:
                return

    def _give_up(self, joining: Joining, problems: tuple[str, ...] = ()) -> None:
        """End before any rank was started."""
        if self._record.is_cancelled:
            message = Message(Kind.STOP, cancelled=True)
            verdict = Verdict(JobPhase.CANCELLED, decision.CANCELLED, self._node)
        else:
            missing, verdict = joining.give_up(self._verdict, asked=self._why_asked(), problems=problems)
            self._record.unreachable(missing)
            message = Message(Kind.VERDICT, verdict=verdict)
        self._peers.send(message)
        self._peers.flush(LAST_WORDS)
        self._record.end(verdict)

    def _launch(self) -> None:
        """Start the ranks of an attempt, or first what they continue from."""
        self._is_joined = True
        self._record.running(self._attempt.number)
        if self._spread is not None:
            self._spread.start()
        else:
            self._start_ranks()

    def _start_ranks(self) -> None:
        self._is_launched = True
        own = self._peers.facts.get(self._node)
        self._attempt.launch(torch=own.torch if own else "")
        if self._attempt.error:
            self._record.cannot_start(self._attempt.error)
        elif not self._attempt.number:
            poweroff.begin(self._request.job, self._request.poweroff)

    # -- messages --------------------------------------------------------------------------------------------

    def _receive(self, seconds: float) -> None:
        """Wait for messages for up to `seconds`, and act on them."""
        self._heartbeat.beat(self._request.gang.silence)
        if self._peers.is_heartbeat_due:
            self._peers.send_heartbeat(self._stall.idle(), self._stragglers.paces())
        for event in self._peers.poll(seconds):
            if isinstance(event, Received):
                self._act(event.node, event.message)
            elif self._is_joined:
                self._stop(cancelled=False)

    def _act(self, node: int, message: Message) -> None:
        """Do what a message of another node asks for."""
        if message.kind is Kind.HEARTBEAT:
            self._stall.heard_idle(node, message.idle)
            self._stragglers.heard(node, message.paces)
        elif message.kind is Kind.STALLED:
            self._stall.gather()
        elif message.kind is Kind.STACKS:
            self._stall.heard_stacks(node, message.stacks)
        elif message.kind is Kind.LEFT and message.stall is not None:
            job_record.keep_stall(self._record.folder, message.stall)
        elif message.kind is Kind.STRAGGLERS:
            self._keep_stragglers(message.stragglers)
        elif message.kind in (Kind.SNAPSHOT, Kind.COPIED):
            if self._spread is not None:
                self._spread.act(node, message)
        elif message.kind is Kind.STOP:
            self._stop(cancelled=message.cancelled, token=message.token, grace=message.grace)
        elif message.kind is Kind.RESTART and message.verdict is not None:
            self._restart(message.verdict)
        elif message.kind is Kind.VERDICT and message.verdict is not None:
            self._accept(message.verdict)

    def _accept(self, verdict: Verdict) -> None:
        """Accept a verdict: the others have ended. Processes may be left here, if this node was frozen."""
        if self._is_joined and self._node not in self._peers.reports:
            self._stop(cancelled=verdict.phase is JobPhase.CANCELLED)
            longest = self._request.stop_grace + processes.GIVE_UP_SECONDS
            self._heartbeat.beat(longest + self._request.gang.silence)
            self._attempt.join()
        self._verdict = self._verdict or verdict

    # -- while it runs ---------------------------------------------------------------------------------------

    def _turn(self) -> None:
        """One turn of the loop: messages, silence, the ranks, the end."""
        self._receive(PAUSE)
        if self._peers.lose_silent():
            self._stop(cancelled=False)
        if self._attempt.stopped_at is None:
            self._watch()
        elif self._attempt.is_over:
            self._watch_others()
            if time.monotonic() > self._over_by:
                self._over_by = time.monotonic() + self._request.gang.silence
                self._peers.lose_stuck()
        self._decide()

    def _watch(self) -> None:
        """Notice what ends the job here: a failure, a cancel, or that all ranks and launchers have ended."""
        look = self._attempt.look() if self._is_launched else Look.RUNNING
        if self._attempt.succeeded:
            self._peers.finish()
        if self._record.is_stopping:
            self._stop(cancelled=self._record.is_cancelled)
        elif self._asked_to_end:
            self._attempt.fail(Failure(self._node, Cause.AGENT, detail=self._why_asked()))
            self._stop(cancelled=False)
        elif look is Look.FAILED:
            self._stop(cancelled=False)
        elif look is Look.RUNNING and (notice := self._notices.due()) is not None:
            self._obey(notice)
        elif self._spread is not None and not self._is_launched:
            self._watch_spread(self._spread)
        elif look is Look.ENDED or self._peers.all_finished_for() > EXIT_BARRIER:
            self._attempt.end(LEFTOVERS_GRACE)
        else:
            self._watch_stall()
            self._watch_stragglers()
            if text := self._isolation.found(self._attempt.running_ranks):
                job_record.note(self._record.folder, text)

    def _watch_spread(self, spread: Spread) -> None:
        """Start the ranks once every node has the newest snapshot."""
        for message in spread.turn():
            self._peers.send(message)
        if spread.error:
            self._attempt.fail(Failure(self._node, Cause.SNAPSHOT, detail=spread.error))
            self._stop(cancelled=False)
        elif spread.is_done:
            spread.close()
            self._begin_watch()
            self._start_ranks()

    def _watch_others(self) -> None:
        """Report the end of this node's ranks. If they ended by themselves, watch those of the others."""
        if self._node not in self._peers.reports:
            cancelled = None if self._cancelled_at is None else causes.ago_of(self._cancelled_at)
            self._peers.report(self._attempt.report(cancelled))
        if not self._is_stopping:
            if self._record.is_stopping:
                self._stop(cancelled=self._record.is_cancelled)
            else:
                self._watch_stall()

    def _watch_stall(self) -> None:
        """Notice that no rank of any node does anything. The first node declares it, and decides what
        follows."""
        peers = self._peers
        is_first = self._node == min(peers.left)
        if is_first and not peers.all_finished and self._stall.is_due(peers.left - {self._node}):
            peers.send(Message(Kind.STALLED))
            self._stall.gather()
        found = self._stall.gathered()
        if found is not None:
            peers.send(Message(Kind.STACKS, stacks=found))
        if (over := self._stall.over()) is not None:
            self._keep_stall(over)
        stalled = self._stall.conclusion(peers.left) if is_first else None
        if stalled is None:
            return
        job_record.note(self._record.folder, f"stalled: {stalled.failure.detail}")
        self._stall.noted()
        if self._request.on_stall is OnStall.LEAVE:
            self._keep_stall(self._stall.leave(stalled.failure.detail))
            return
        self._attempt.fail(stalled.failure, stalled.last_lines)
        peers.reports.pop(self._node, None)  # it lacks this failure
        self._stop(cancelled=False)

    def _keep_stall(self, left: LeftStall) -> None:
        job_record.keep_stall(self._record.folder, left)
        self._peers.send(Message(Kind.LEFT, stall=left))

    def _watch_stragglers(self) -> None:
        """Notice ranks that are slower than the others. The first node compares them."""
        changed = self._stragglers.changed() if self._node == min(self._peers.left) else None
        if changed is not None:
            self._peers.send(Message(Kind.STRAGGLERS, stragglers=changed))
            self._keep_stragglers(changed)

    def _keep_stragglers(self, known: tuple[Straggler, ...]) -> None:
        if self._stragglers.keep(known):
            self._stall.noted()

    def _why_asked(self) -> str:
        """Return why this process was asked to end, '' if it was not."""
        if not self._asked_to_end:
            return ""
        if os.getppid() != self._guard:
            return "its parent was killed"
        return f"ended by {signal.Signals(self._asked_to_end).name}: the machine may be shutting down"

    # -- the end ---------------------------------------------------------------------------------------------

    def _obey(self, notice: notices.Notice) -> None:
        """Tell the ranks of all nodes to save: this node is about to end."""
        self._attempt.fail(notice.failure(self._node))
        self._stop(cancelled=False, grace=notice.grace(self._request.stop_grace))

    def _stop(self, *, cancelled: bool, token: str = "", grace: Optional[float] = None) -> None:
        """End the ranks here and on all other nodes. `grace`: seconds in which they may save."""
        if cancelled and self._cancelled_at is None:
            self._cancelled_at = self._record.time_of_cancel()
        own = self._request.stop_grace
        limit = grace if grace is not None else own if cancelled else min(own, FAILURE_GRACE)
        if self._spread is not None and not self._is_launched:
            self._spread.close()
        self._attempt.end(limit, saving=grace is not None)
        if self._is_stopping:
            return
        self._is_stopping = True
        slowest = limit + processes.GIVE_UP_SECONDS + self._request.gang.silence
        self._over_by = time.monotonic() + slowest
        self._record.mark_stop(cancelled=cancelled, token=token)
        token = phases.cancel_token(self._record.folder)
        self._peers.send(Message(Kind.STOP, cancelled=cancelled, token=token, grace=grace))

    def _decide(self) -> None:
        """Decide if this is the first node that is left, and all that are left have reported."""
        peers = self._peers
        is_first = self._node == min(peers.left)
        if self._verdict is not None or not is_first or not peers.left <= peers.reports.keys():
            return
        verdict = decision.verdict(self._node, peers.reports, peers.losses)
        verdict = replace(verdict, restarts=self._attempt.number)
        if verdict.phase is JobPhase.FAILED and not peers.lost:
            steps = [one.report.step for one in peers.reports.values() if one.report.step is not None]
            refusal = self._budget.refusal(verdict, max(steps, default=None))
            if refusal is None:
                peers.send_restart(Message(Kind.RESTART, verdict=verdict))
                self._restart(verdict)
                return
            verdict = replace(verdict, refusal=refusal)
        self._verdict = replace(verdict, at=time.time())

    def _restart(self, verdict: Verdict) -> None:
        """Start the ranks again, after no process of the last attempt is left on any node."""
        number = self._attempt.number + 1
        attempt.clear(self._record.folder)
        job_record.note(self._record.folder, decision.restart_note(number, verdict), launcher=True)
        self._begin(number)
        self._launch()
