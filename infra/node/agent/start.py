"""`start`: start a job's supervisor, detached, and reply once it runs."""

from __future__ import annotations

import contextlib
import os
import subprocess
import time
from pathlib import Path

from agent import phases, poweroff, py_spy, store
from agent.commands import agent_command
from cloudddp.agent.protocol.codec import encode
from cloudddp.agent.protocol.gang import Unreachable
from cloudddp.agent.protocol.phases import JobPhase
from cloudddp.agent.protocol.start import StartReply, StartRequest

REQUEST = StartRequest
LOG_FILE = "supervisor.log"
PAUSE = 0.01  # seconds between two polls of the supervisor


def step(request: StartRequest) -> StartReply:
    folder = store.job_folder(request.job)
    with store.locked("jobs"):
        running = phases.running_jobs()
        if running:
            raise SystemExit(f"job {running[0]} is still running on this node")
        if phases.is_stopping(folder):
            raise SystemExit(f"job {request.job} was cancelled before it started")
        poweroff.forget()
        (folder / "ranks").mkdir(parents=True, exist_ok=False)
        os.chmod(folder, 0o700)
        (folder / store.STEPS_FOLDER).mkdir(mode=0o700)
        supervisor = _start_supervisor(request, folder)
    return _joined(supervisor, folder)  # takes as long as the other nodes need: a cancel must not wait for it


def _start_supervisor(request: StartRequest, folder: Path) -> subprocess.Popen[bytes]:
    """The request may hold the user's secrets: it goes through a pipe, never to the disk."""
    (folder / store.RESERVE).write_bytes(bytes(store.RESERVE_BYTES))
    store.write(
        folder / phases.JOB_FILE,
        phases.JobFile(request.node, request.ranks, request.log_mb, request.stop_grace, request.poweroff),
    )
    (folder / phases.BEGAN).touch()
    state_file = folder / phases.STATE_FILE
    store.write(state_file, phases.StateFile(request.job, request.node, JobPhase.STARTING))
    with open(folder / LOG_FILE, "ab") as log:
        supervisor = subprocess.Popen(
            agent_command("guard", request.job), stdin=subprocess.PIPE, stdout=log, stderr=log,
            start_new_session=True, close_fds=True, cwd="/",
        )  # fmt: skip
    if supervisor.stdin is not None:
        with contextlib.suppress(BrokenPipeError), supervisor.stdin:  # a crash is reported below
            supervisor.stdin.write(encode(request))
    return supervisor


def _joined(supervisor: subprocess.Popen[bytes], folder: Path) -> StartReply:
    """Wait until the nodes are connected or have given up."""
    while True:
        state = store.read(folder / phases.STATE_FILE, phases.StateFile)
        if state is None or state.state is not JobPhase.STARTING:
            unreachable = store.read(folder / phases.UNREACHABLE_FILE, Unreachable)
            return StartReply(supervisor.pid, unreachable, py_spy.platform(), py_spy.shipped_digest())
        if supervisor.poll() is not None:
            log = (folder / LOG_FILE).read_text(errors="replace")
            raise SystemExit("the job's supervisor crashed: " + log[-2000:])
        time.sleep(PAUSE)
