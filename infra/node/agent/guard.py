"""The parent of a job's supervisor: where that is killed, it ends the node's ranks and records it.

It also powers the node off after a job that was launched with --down. If the guard is killed, too, the kernel still ends the ranks: each process of the job asked for a signal at the death of
its parent.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from agent import phases, poweroff, prctl, processes, store, supervisor
from cloudddp.agent.protocol.phases import JobPhase
from cloudddp.agent.protocol.start import StartRequest
from cloudddp.agent.protocol.verdict import Cause, Failure, Verdict

ENDED_BY = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


def run(request: StartRequest) -> None:
    """Run a job on this node to its end, in this process and a child."""
    folder = store.job_folder(request.job)
    prctl.adopt_orphans()
    own = os.getpid()
    child = os.fork()
    if child == 0:
        code = 1
        try:
            prctl.die_with_parent(signal.SIGTERM, own)
            code = supervisor.run(request)
        finally:
            sys.stderr.flush()
            os._exit(code)
    _forward(child)
    _wait(child)
    if not phases.has_ended(folder):
        _record(folder, request)
    state = phases.recorded(folder)
    if request.poweroff is not None and state is not None and state.started is not None:
        poweroff.after(request.job, request.poweroff)


def _forward(child: int) -> None:
    """Forward a request to end: the machine may be shutting down."""

    def forward(number: int, _: Any) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(child, number)

    for number in ENDED_BY:
        signal.signal(number, forward)


def _wait(child: int) -> None:
    """Wait for the supervisor, and reap the orphans of one that was killed."""
    while True:
        try:
            pid, _ = os.wait()
        except ChildProcessError:
            return
        if pid == child:
            return


def _record(folder: Path, request: StartRequest) -> None:
    """End the ranks, and record that the supervisor was killed. The others have seen its connections close."""
    task = phases.task(folder, request.node)
    processes.end(task, min(request.stop_grace, supervisor.FAILURE_GRACE))
    failure = Failure(request.node, Cause.AGENT)
    verdict = Verdict(JobPhase.FAILED, 1, request.node, failure)
    store.write(folder / phases.VERDICT_FILE, verdict)
    state = store.read(folder / phases.STATE_FILE, phases.StateFile)
    if state is not None:
        ended = replace(state, state=JobPhase.FAILED, ended=time.time(), exit_code=1)
        store.write(folder / phases.STATE_FILE, ended)
