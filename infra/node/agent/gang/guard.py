"""The parent of a job's supervisor: where that is killed, or has stopped, it ends the node's ranks and
records it.

It also sends the notifications of the job, copies the results to S3 when the job has ended, if that was asked
for, and sends the newest snapshot to a node that stays before this one ends. If the guard is killed, too, the
kernel still ends the ranks: each process of the job asked for a signal at the death of its parent.
"""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, Optional

from agent.gang import decision, step, supervisor
from agent.jobs import job_record, phases, poweroff
from agent.jobs.notify import Notifier
from agent.node import kernel, processes, store
from agent.node.shared_memory import SupervisorHeartbeat
from cloudddp.agent.protocol.jobs import Cause, Failure, StateFile, Verdict
from cloudddp.agent.protocol.phases import JobPhase
from cloudddp.agent.protocol.sentences import signal_name
from cloudddp.agent.protocol.start import OnStall, StartRequest

ENDED_BY = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
LOOK = 1.0  # seconds between two looks at a supervisor that runs
LATE = 3.0  # seconds by which a heartbeat may be late, and this process in its own looks
REAP = 5.0  # seconds for a supervisor that was killed to end: one that waits for a disk may not


def run(request: StartRequest) -> None:
    """Run a job on this node to its end, in this process and a child."""
    folder = store.job_folder(request.job)
    began = time.monotonic()
    kernel.adopt_orphans()
    guard, heartbeat = os.getpid(), SupervisorHeartbeat()
    notifier = Notifier(request)
    child = os.fork()
    if child == 0:
        code = 1
        try:
            kernel.die_with_parent(signal.SIGTERM, guard)
            code = supervisor.run(request, heartbeat, notifier)
        except Exception as error:
            heartbeat.crashed(error)
            traceback.print_exc()
        finally:
            with contextlib.suppress(OSError):  # a full disk
                sys.stderr.flush()
            os._exit(code)
    asked_to_end = _forward(child)
    why = _wait(child, heartbeat, request.gang.silence, notifier.take) or heartbeat.error
    if not phases.has_ended(folder):
        with contextlib.suppress(OSError):  # a full disk: what follows matters more
            _end_ranks(folder, request, why)
            print(f"the supervisor has ended: {why}", file=sys.stderr, flush=True)
    state = phases.recorded(folder)
    if state is None or state.started is None:
        return
    notifier.conclude()
    if not asked_to_end:
        for number in ENDED_BY:
            signal.signal(number, signal.SIG_DFL)  # a shutdown must not wait for copies
    transfer = copy = None
    if request.snapshots is not None and request.snapshots.patterns and not asked_to_end:
        from agent.share import handover  # which a job without snapshots need not import

        transfer = handover.start(request, began)
    end = request.end
    if end.results is not None and not asked_to_end:
        from agent.s3 import copies  # 35 ms, likewise

        ends, _ = poweroff.deadline(end.deadline, began)
        copy = functools.partial(copies.copy, request, end.results, ends)
    first = phases.first_failure(folder)
    has_stalled = first is not None and first.cause is Cause.STALL
    wait = end.keep if has_stalled and request.watch.on_stall is OnStall.DOWN else end.poweroff
    if wait is not None:  # what is not in S3 can still be pulled
        poweroff.replan(request.job, wait if copy is None else max(wait, end.keep))
    if copy is not None and copy() and wait is not None:
        poweroff.replan(request.job, wait, own=True)
    if transfer is not None:
        transfer.join()
    while notifier.runs and not asked_to_end:
        time.sleep(LOOK)
    poweroff.let_end(request.job)


def _forward(child: int) -> list[int]:
    """Forward requests to end: the machine may be shutting down. Return the list of those that come."""
    asked: list[int] = []

    def forward(number: int, _: Any) -> None:
        asked.append(number)
        with contextlib.suppress(ProcessLookupError):
            os.kill(child, number)

    for number in ENDED_BY:
        signal.signal(number, forward)
    return asked


def _wait(child: int, heartbeat: SupervisorHeartbeat, patience: float, look: Callable[[], None]) -> str:
    """Wait for the supervisor, `look` at what it passes on, and reap the orphans of one that was killed. Kill
    one that does not run its loop although this process runs. Return how it was killed; otherwise ''."""
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGCHLD])  # sigtimedwait takes it
    try:
        looked = frozen = time.monotonic()
        while (code := _exit_code(child)) is None:
            signal.sigtimedwait([signal.SIGCHLD], LOOK)
            look()
            now = time.monotonic()
            if now - looked > LOOK + LATE:  # this process has not run, either: perhaps the whole node
                frozen = now
            looked = now
            if now > max(heartbeat.until, frozen + patience) + LATE:
                os.kill(child, signal.SIGKILL)
                while _exit_code(child) is None and time.monotonic() < now + REAP:
                    signal.sigtimedwait([signal.SIGCHLD], LOOK)
                return f"it did nothing for {now - heartbeat.until + patience:.0f} s, so it was killed"
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGCHLD])
    return f"it was killed by {signal_name(-code)}" if code < 0 else ""


def _exit_code(child: int) -> Optional[int]:
    """Reap what has ended; return the child's exit code, -N after signal N; None while it runs."""
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return 0
        if pid == child:
            return os.waitstatus_to_exitcode(status)
        if pid == 0:
            return None


def _end_ranks(folder: Path, request: StartRequest, error: str) -> None:
    """End the ranks, and record that the supervisor was killed, or its `error`. Raises OSError."""
    task = phases.task(folder, request.node, own=True)
    processes.end(task, min(request.work.stop_grace, step.FAILURE_GRACE))
    verdict = Verdict(JobPhase.FAILED, 1, request.node, Failure(request.node, Cause.AGENT, detail=error))
    if phases.cancelled_at(folder) is not None:  # as a supervisor would decide
        verdict = Verdict(JobPhase.CANCELLED, decision.CANCELLED, request.node)
    job_record.end_own(request, store.read(folder / phases.STATE_FILE, StateFile), verdict)
