"""`start`: start a job's supervisor, detached, and reply once it runs."""

from __future__ import annotations

import contextlib
import os
import subprocess
import time
from pathlib import Path

from agent import phases, store
from agent.commands import agent_command
from cloudddp.agent.protocol.codec import encode
from cloudddp.agent.protocol.gang import Unreachable
from cloudddp.agent.protocol.phases import JobPhase
from cloudddp.agent.protocol.start import StartReply, StartRequest

REQUEST = StartRequest
PAUSE = 0.01  # seconds between two polls of the supervisor


def step(request: StartRequest) -> StartReply:
    folder = store.job_folder(request.job)
    with store.locked("jobs"):
        running = phases.running_jobs()
        if running:
            raise SystemExit(f"job {running[0]} is still running on this node")
        if phases.is_stopping(folder):
            raise SystemExit(f"job {request.job} was cancelled before it started")
        (folder / "ranks").mkdir(parents=True, exist_ok=False)
        os.chmod(folder, 0o700)
        return _start_supervisor(request, folder)


def _start_supervisor(request: StartRequest, folder: Path) -> StartReply:
    """The request may hold the user's secrets: it goes through a pipe, never to the disk."""
    (folder / store.RESERVE).write_bytes(bytes(store.RESERVE_BYTES))
    store.write(folder / phases.JOB_FILE, phases.JobFile(request.node, request.ranks, request.log_mb))
    (folder / phases.BEGAN).touch()
    state_file = folder / phases.STATE_FILE
    store.write(state_file, phases.StateFile(request.job, request.node, JobPhase.STARTING))
    log_file = folder / "supervisor.log"
    with open(log_file, "ab") as log:
        supervisor = subprocess.Popen(
            agent_command("guard", request.job), stdin=subprocess.PIPE, stdout=log, stderr=log,
            start_new_session=True, close_fds=True, cwd="/",
        )  # fmt: skip
    if supervisor.stdin is not None:
        with contextlib.suppress(BrokenPipeError), supervisor.stdin:  # a crash is reported below
            supervisor.stdin.write(encode(request))
    while True:
        state = store.read(state_file, phases.StateFile)
        if state is None or state.state is not JobPhase.STARTING:
            return StartReply(supervisor.pid, store.read(folder / phases.UNREACHABLE_FILE, Unreachable))
        if supervisor.poll() is not None:
            raise SystemExit("the job's supervisor crashed: " + log_file.read_text(errors="replace")[-2000:])
        time.sleep(PAUSE)
