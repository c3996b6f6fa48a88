"""The process of a job that starts its launchers, waits for them, ends what remains and records how it ended."""

from __future__ import annotations

import contextlib
import os
import resource
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

from agent import jobs, phases, processes, store
from agent.commands import activated, agent_command, program
from cloudddp.agent.protocol import TASK_VARIABLE
from cloudddp.agent.protocol.codec import decode
from cloudddp.agent.protocol.phases import JobPhase
from cloudddp.agent.protocol.start import Process, StartRequest

MAX_FILES = 1 << 20  # some programs close all descriptors up to the limit, which may be a billion
PAUSE = 0.05  # seconds between two polls of the children
NOT_STARTED = 127  # the exit code of a command that cannot be started, as in a shell

Child = subprocess.Popen  # of bytes


def main(job: str) -> int:
    """Run the job whose StartRequest is on stdin."""
    request = decode(sys.stdin.buffer.read(), StartRequest)
    folder = store.job_folder(job)
    state = phases.StateFile(
        job, request.node, JobPhase.RUNNING, started=time.time(), pid=os.getpid(),
        born=processes.born(os.getpid()), script=request.script, expected=request.ranks,
        max_restarts=request.max_restarts,
    )  # fmt: skip
    store.write(folder / phases.STATE_FILE, state)
    processes.adopt_orphans()
    _raise_limits()
    task = phases.task(folder, request.node)
    children: list[Child[bytes]] = []
    try:
        children.extend(
            _launch(folder, request, process, task)
            for process in request.processes
            if not phases.is_stopping(folder)
        )
        codes = _wait(children, task, request.stop_grace)
    except (OSError, ValueError) as error:  # ValueError: a NUL in an argument or a variable
        reason = (
            f"{error.filename or 'process'}: {error.strerror}" if isinstance(error, OSError) else str(error)
        )
        state = replace(state, error=reason)
        codes = [NOT_STARTED]
    processes.end(task, request.stop_grace, children)
    ended = jobs.outcome(folder, request.ranks, codes)
    store.write(folder / phases.STATE_FILE, replace(state, ended=time.time(), **ended))
    return 0


def _raise_limits() -> None:
    """Raise the soft limits of open files and locked memory for ranks, which inherit them.

    systemd gives sessions a soft limit of 1024 files for programs that use select(), and data loaders open more. EFA and
    RDMA register (lock) their buffers.
    """
    for kind, most in (
        (resource.RLIMIT_NOFILE, MAX_FILES),
        (resource.RLIMIT_MEMLOCK, resource.RLIM_INFINITY),
    ):
        soft, hard = resource.getrlimit(kind)
        wanted = (
            hard
            if most == resource.RLIM_INFINITY
            else most
            if hard == resource.RLIM_INFINITY
            else min(hard, most)
        )
        if soft != resource.RLIM_INFINITY and (wanted == resource.RLIM_INFINITY or wanted > soft):
            with contextlib.suppress(OSError, ValueError):
                resource.setrlimit(kind, (wanted, hard))


def _launch(folder: Path, request: StartRequest, process: Process, task: processes.Task) -> Child[bytes]:
    project = store.project_folder(request.project)
    argv = [program(word, project) for word in process.launcher[:1]] + list(process.launcher[1:])
    if process.rank:
        argv += agent_command("rank", request.job, program(process.rank[0], project), *process.rank[1:])
    python = program((process.launcher or process.rank)[0], project)
    env = {**os.environ, **activated(python), **request.env, **process.env, TASK_VARIABLE: task.mark}
    with open(folder / "launcher.log", "ab") as log:
        return subprocess.Popen(
            argv, cwd=str(project), env=env, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
            start_new_session=True,
        )  # fmt: skip


def _wait(children: list[Child[bytes]], task: processes.Task, grace: float) -> list[int]:
    """Wait for all; once one has failed, stop the others (without torchrun nothing else would)."""
    while True:
        codes = [child.poll() for child in children]
        if all(code is not None for code in codes):
            return [int(code or 0) for code in codes]
        if any(codes):
            processes.end(task, grace, children)
        _collect_orphans(children)
        time.sleep(PAUSE)


def _collect_orphans(children: list[Child[bytes]]) -> None:
    """Reap orphans that have ended, but no child that Popen waits for."""
    known = {child.pid for child in children}
    with contextlib.suppress(ChildProcessError):
        while True:
            ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            if ended is None or ended.si_pid in known:
                return
            os.waitpid(ended.si_pid, os.WNOHANG)
