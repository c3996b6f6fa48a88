"""The launchers of a job: torchrun, or the wrapper of each rank where ranks start directly."""

from __future__ import annotations

import contextlib
import os
import re
import resource
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from agent.node import docker, kernel, processes, store
from agent.node.commands import activated, agent_command, program, variables
from cloudddp.agent.protocol import ATTEMPT_VARIABLE, SUPERVISOR_VARIABLE, TASK_VARIABLE
from cloudddp.agent.protocol.start import Process, StartRequest

DUMPS, PIPES = "flight-recorder", "pipes"  # in a job's folder
PIPE = "TORCH_NCCL_DEBUG_INFO_PIPE_FILE"
MAX_FILES = 1 << 20  # some programs close all descriptors up to the limit, which may be a billion

Child = subprocess.Popen  # of bytes


def launch(
    request: StartRequest, process: Process, task: processes.Task, *, attempt: int, torch: str = ""
) -> Child[bytes]:
    """Start a launcher. It is asked to end when this process ends. Raises OSError, ValueError.

    Each attempt has a rendezvous id of its own: torchrun would find the members of the last one.
    """
    project, folder = store.project_folder(request.project), store.job_folder(request.job)
    work = request.work
    python = program((process.launcher or process.rank)[0], project)
    argv = [program(word, project) for word in process.launcher[:1]] + list(process.launcher[1:])
    if attempt:
        argv = [f"{word}-{attempt}" if word.startswith("--rdzv-id=") else word for word in argv]
    if process.rank:
        own = python if work.container else sys.executable  # the image may have it elsewhere
        words = (program(process.rank[0], project), *process.rank[1:])
        argv += agent_command("rank", request.job, *words, python=own)
    base = {} if work.container else {**os.environ, **activated(python)}
    given = {**base, **variables(work, project), **process.env}
    env = {**given, **flight_recorder(folder, torch, given), TASK_VARIABLE: task.mark}
    env[ATTEMPT_VARIABLE] = str(attempt)
    env[SUPERVISOR_VARIABLE] = kernel.name(os.getpid())
    if work.container:
        argv, env = docker.command(work.container, argv, project, env, folder)
    with open(folder / "launcher.log", "ab") as log:
        return subprocess.Popen(
            argv,
            # Nothing was sent to the nodes before the first `cloudddp preflight`.
            cwd=str(project if project.is_dir() else Path.home()),
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
            preexec_fn=kernel.death_signal(signal.SIGTERM),
        )


def flight_recorder(folder: Path, torch: str, given: Mapping[str, str]) -> dict[str, str]:
    """Return the variables with which NCCL's flight recorder writes its dumps into the job's folder. What the
    user has `given`, under any of the names, stays.

    The names changed (pytorch/pytorch#143446). A torch that knows a new one warns of the old one in every
    rank. Both are set where the version is unknown, or needs both: the pipe of 2.8 to 2.10 looks at the old
    size (ProcessGroupNCCL.hpp). gloo has no pipe: its ranks dump only if the script asks for it.
    """
    for name in (DUMPS, PIPES):
        (folder / name).mkdir(mode=0o700, exist_ok=True)
    # Name, old name, value, and the first version that needs no old name.
    settings = [
        ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE", "2000", (2, 11)),
        ("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE", str(folder / DUMPS / "rank_"), (2, 8)),
        # Where it is not set, ProcessGroupNCCL of 2.13, which reads the old name only, takes "1".
        ("TORCH_FR_DUMP_ON_TIMEOUT", "TORCH_NCCL_DUMP_ON_TIMEOUT", "1", (2, 13)),
        # Through it a dump is asked for.
        (PIPE, PIPE, str(folder / PIPES / "rank_"), (0, 0)),
    ]
    found = re.match(r"(\d+)\.(\d+)", torch)
    version = (int(found[1]), int(found[2])) if found else (0, 0)
    return {
        name: value
        for new, old, value, since in settings
        if not given.keys() & {new, old}
        for name in ((new,) if version >= since else (new, old))
    }


def raise_limits() -> None:
    """Raise the soft limits of open files and locked memory for ranks, which inherit them.

    systemd gives sessions a soft limit of 1024 files for programs that use select(), and data loaders open
    more. EFA and RDMA register (lock) their buffers.
    """
    for kind, most in (
        (resource.RLIMIT_NOFILE, MAX_FILES),
        (resource.RLIMIT_MEMLOCK, resource.RLIM_INFINITY),
    ):
        soft, hard = resource.getrlimit(kind)
        limits = [one for one in (hard, most) if one != resource.RLIM_INFINITY]
        wanted = min(limits, default=resource.RLIM_INFINITY)
        if soft != resource.RLIM_INFINITY and (wanted == resource.RLIM_INFINITY or wanted > soft):
            with contextlib.suppress(OSError, ValueError):
                resource.setrlimit(kind, (wanted, hard))


def collect_orphans(children: Sequence[Child[bytes]]) -> None:
    """Reap orphans that have ended, but no child that Popen waits for."""
    known = {child.pid for child in children}
    with contextlib.suppress(ChildProcessError):
        while True:
            ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            if ended is None or ended.si_pid in known:
                return
            os.waitpid(ended.si_pid, os.WNOHANG)
