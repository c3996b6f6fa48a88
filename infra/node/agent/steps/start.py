"""`start`: start a job's supervisor, detached, and reply once the nodes are connected or have given up."""

from __future__ import annotations

import contextlib
import os
import time
import traceback
from pathlib import Path
from typing import NoReturn

from agent.files import project_lock
from agent.gang import guard
from agent.jobs import phases, poweroff
from agent.node import kernel, shared_memory, store
from agent.watch import py_spy
from cloudddp.agent.protocol.gang import Unreachable
from cloudddp.agent.protocol.jobs import StateFile
from cloudddp.agent.protocol.phases import JobPhase
from cloudddp.agent.protocol.start import StartReply, StartRequest

REQUEST = StartRequest
LOG_FILE = "supervisor.log"
PAUSE = 0.01  # seconds between two polls of the supervisor
BUSY = 5.0  # seconds to wait for another sync, which may find nothing to change


def step(request: StartRequest) -> StartReply:
    shared_memory.mark_start("step")
    folder = store.job_folder(request.job)
    project = store.project_folder(request.project)
    poweroff.occupy()  # as the guard, which is a fork of this process
    phases.end_orphans()
    # No sync of another launch comes between: it is refused from now on, since this job runs.
    with project_lock.held(project, within=BUSY) as lock, store.locked("jobs"):
        lock.check(request.version)
        running = phases.running_jobs()
        if running:
            raise SystemExit(f"job {running[0]} is still running on this node")
        if phases.is_stopping(folder):
            raise SystemExit(f"job {request.job} was cancelled before it started")
        (folder / "ranks").mkdir(parents=True, exist_ok=False)
        os.chmod(folder, 0o700)
        (folder / store.STEPS_FOLDER).mkdir(mode=0o700)
        _record(request, folder)
    # Without the lock: a child would share it.
    return _joined(_start_guard(request, folder), folder)


def _record(request: StartRequest, folder: Path) -> None:
    """Record that the job starts. The request may hold the user's secrets: it is never written to the
    disk."""
    (folder / store.RESERVE).write_bytes(bytes(store.RESERVE_BYTES))
    job = phases.JobFile(request.node, request.work.log_mb, request.work.stop_grace, request.end.poweroff)
    store.write(folder / phases.JOB_FILE, job)
    (folder / phases.BEGAN).touch()
    store.write(
        folder / phases.STATE_FILE,
        StateFile(request.job, request.node, JobPhase.STARTING, boot=kernel.boot()),
    )


def _start_guard(request: StartRequest, folder: Path) -> int:
    """Start the guard as a daemon and return its pid.

    It is a fork: another interpreter would need as long as this one to start and to import the same modules.
    """
    log = os.open(folder / LOG_FILE, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    guard_pid = os.fork()
    if guard_pid == 0:
        _be_guard(request, log)
    os.close(log)
    return guard_pid


def _be_guard(request: StartRequest, log: int) -> NoReturn:
    """Run the job, detached from the SSH session, whose channel stays open as long as a process has its
    end."""
    code = 1
    try:
        os.setsid()
        os.chdir("/")
        for number, source in enumerate((os.open(os.devnull, os.O_RDONLY), log, log)):
            os.dup2(source, number)
        _close_others()
        shared_memory.mark_start("supervisor")
        guard.run(request)
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


def _close_others() -> None:
    """Close every descriptor but stdin, stdout and stderr."""
    for name in os.listdir("/proc/self/fd"):
        if int(name) > 2:
            with contextlib.suppress(OSError):  # the one that listed them
                os.close(int(name))


def _joined(guard_pid: int, folder: Path) -> StartReply:
    """Wait until the nodes are connected or have given up."""
    ended = False
    while True:
        state = store.read(folder / phases.STATE_FILE, StateFile)
        if state is None or state.state is not JobPhase.STARTING:
            unreachable = store.read(folder / phases.UNREACHABLE_FILE, Unreachable)
            platform, tool = py_spy.platform(), py_spy.shipped_digest()
            times = state.reached if state is not None else {}
            reached = {part: max(time.monotonic() - at, 0.0) for part, at in times.items()}
            return StartReply(unreachable, platform, tool, reached)
        if ended:
            log = (folder / LOG_FILE).read_text(errors="replace")
            raise SystemExit("the job's supervisor crashed: " + log[-2000:])
        time.sleep(PAUSE)
        ended = os.waitpid(guard_pid, os.WNOHANG) != (0, 0)  # after which its last state is read
