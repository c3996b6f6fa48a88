"""`setup`: run the project's setup commands, once for each content."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import select
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import BinaryIO, Optional

from agent.files import paths, shared
from agent.jobs import phases
from agent.node import docker, kernel, machine, processes, store
from agent.node.commands import activated, program, run_quietly
from agent.s3 import boto_process, data
from cloudddp.agent.protocol import TASK_VARIABLE
from cloudddp.agent.protocol.codec import MAX_TEXT, STDERR_END
from cloudddp.agent.protocol.copies import url_of
from cloudddp.agent.protocol.start import MAX_IMAGE, Container, SetupReply, SetupRequest

REQUEST = SetupRequest
CANCELLED = 130
DENIED = "Permission denied"  # in what pip writes if it may not install
OUTPUT_BYTES = 20_000  # of a command's output that are reported
PIECE = 1 << 16  # bytes
PAUSE = 0.1  # seconds between two looks at the output of a command


def step(request: SetupRequest) -> SetupReply:
    """Run the commands in the project's folder unless the same content ran here before.

    They belong to the job that is being launched: until they have ended the job is in the phase SETUP, and
    `kill` ends them. What they leave in the background afterwards belongs to no job.
    """
    folder = store.project_folder(request.project)
    stamp = store.ROOT / f"setup-{folder.name}-{_digest(request, folder)[:16]}"
    with store.locked("setup"):
        if stamp.exists() and not (request.data or request.container or request.shared):
            return SetupReply(exit_code=0)
        return _set_up(request, folder, stamp)


def _digest(request: SetupRequest, folder: Path) -> str:
    inside = [request.container.image, request.container.torch, request.python] if request.container else []
    content = hashlib.sha256(json.dumps([*request.commands, *inside]).encode())
    for name in request.inputs:
        with contextlib.suppress(OSError):
            data = paths.inside(folder, name).read_bytes()
            content.update(f"\n{name} {len(data)}\n".encode(errors="surrogateescape") + data)
    return content.hexdigest()


def _set_up(request: SetupRequest, project: Path, stamp: Path) -> SetupReply:
    folder = store.job_folder(request.job)
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    task = phases.setup_task(folder, request.node)
    kernel.set_name(kernel.RUNS_A_JOB)
    kernel.adopt_orphans()
    own = phases.SetupFile(
        request.job,
        request.node,
        request.script,
        time.time(),
        os.getpid(),
        processes.born(os.getpid()),
        boot=kernel.boot(),
    )
    store.write(task.record, own)
    with _open_log(folder) as log:
        copy = _Copy(log)
        reply = _share(request, project, task.mark, folder, copy)
        if not (reply.exit_code or reply.cancelled):
            reply = _copy_data(request, project, task.mark, folder, copy)
        if request.container and not (reply.exit_code or reply.cancelled):
            reply = _pull(request.container, project, task.mark, folder, copy)
        image = "" if reply.exit_code else reply.image
        if image and request.container:
            request = replace(request, container=replace(request.container, id=image))
        if not (reply.exit_code or reply.cancelled or stamp.exists()):
            reply = _run_all(request, project, task.mark, folder, copy)
    if reply.cancelled:
        processes.end(task, grace=1.0)
    if reply.exit_code:
        code = reply.exit_code if reply.exit_code > 0 else 128 - reply.exit_code
        with contextlib.suppress(OSError):  # a command may have deleted the whole store
            store.write(task.record, replace(own, ended=time.time(), exit_code=min(code, 255)))
        if DENIED in reply.output and request.container is None:
            return replace(reply, read_only=_read_only(_active(request, project).get("VIRTUAL_ENV", "")))
        return reply
    task.record.unlink(missing_ok=True)
    store.create_root()
    stamp.write_text("done\n")
    return replace(reply, image=image)


def _active(request: SetupRequest, project: Path) -> dict[str, str]:
    """Return the variables of the environment that is there now: a command may have created it. Where
    job.python does not exist yet, that of the Python that the image has."""
    return activated(machine.find_python(request.python, project) or machine.find_python("", project))


def _open_log(folder: Path) -> BinaryIO:
    """Open the log of the commands' output. A pipe would wait for what a command leaves in the background."""
    number = os.open(folder / phases.SETUP_LOG, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW, 0o600)
    return open(number, "r+b", buffering=0)


def _share(request: SetupRequest, project: Path, mark: str, folder: Path, copy: _Copy) -> SetupReply:
    """Mount the shared folders, and link them in the project."""
    shown = f"[[shared]] {', '.join(one.path for one in request.shared)}"
    problem = shared.missing(request.shared)
    try:
        for argv, given in () if problem or not request.shared else shared.commands(request.shared):
            reply = _run(argv, shown, project, {**os.environ, TASK_VARIABLE: mark}, folder, copy, given)
            if reply.exit_code:
                return replace(reply, data=True)
        if request.shared and not problem:
            shared.link(request.shared, project)
    except OSError as error:
        problem = f"{error.strerror or error}"
    if problem:
        return SetupReply(exit_code=1, command=shown, output=problem[:MAX_TEXT], data=True)
    return SetupReply(exit_code=0)


def _copy_data(request: SetupRequest, project: Path, mark: str, folder: Path, copy: _Copy) -> SetupReply:
    """Copy what differs of [[data]] from S3, with the Python of the job or of the image."""
    own = [found for name in (request.python, "") if (found := machine.find_python(name, project))]
    python = boto_process.find(own) if request.data else ""
    for one in request.data:
        shown = url_of(one.bucket, one.prefix)
        try:
            problem, where = boto_process.problem(own, python), data.link_folder(one, project)
        except OSError as error:
            problem = f"{error.strerror or error}"
        if problem:
            return SetupReply(exit_code=1, command=shown, output=problem[:MAX_TEXT], data=True)
        env = {**boto_process.environment(), TASK_VARIABLE: mark}
        wanted = data.request(one, where)
        reply = _run(boto_process.command(python, "download"), shown, project, env, folder, copy, wanted)
        if reply.exit_code:
            return replace(reply, data=True)
    return SetupReply(exit_code=0)


def _pull(container: Container, project: Path, mark: str, folder: Path, copy: _Copy) -> SetupReply:
    """Pull the image unless the node has it; return its id."""
    docker.allow()
    ask = [docker.program(), "image", "inspect", "--format={{.Id}}", container.image]
    reply, found = SetupReply(exit_code=0), run_quietly(ask).strip()
    if not found:
        argv, shown = ["bash", "-c", docker.pull(container.image)], f"docker pull {container.image}"
        env = {**boto_process.environment(), TASK_VARIABLE: mark}
        reply = _run(argv, shown, project, env, folder, copy)
        found = container.image if reply.exit_code else run_quietly(ask).strip()
    return replace(reply, image=found[:MAX_IMAGE])


def _run_all(request: SetupRequest, project: Path, mark: str, folder: Path, copy: _Copy) -> SetupReply:
    places = {name: str(project / path) for name, path in request.paths.items()}
    for command in request.commands:
        own = {} if request.container else {**os.environ, **_active(request, project)}
        env = {**own, **places, **request.env, TASK_VARIABLE: mark}
        argv, env = _contained(request, ["bash", "-c", command], project, env, folder)
        reply = _run(argv, command, project, env, folder, copy)
        if reply.exit_code:
            if request.container is not None and reply.output.startswith("docker: "):
                reply = replace(reply, image=request.container.image)
            return reply
    if request.container is None:
        return SetupReply(exit_code=0)
    python = program(request.python or "python3", project)
    words = [python, "-c", docker.CHECK, *(["torch"] if request.container.torch else [])]
    argv, env = _contained(request, words, project, {TASK_VARIABLE: mark}, folder)
    shown = f"docker run {request.container.image} {python}"
    return replace(_run(argv, shown, project, env, folder, copy), image=request.container.image)


def _contained(
    request: SetupRequest, argv: list[str], project: Path, env: dict[str, str], folder: Path
) -> tuple[list[str], dict[str, str]]:
    """Return a command, and its environment, as it runs in the job's container, if it has one."""
    if request.container is None:
        return argv, env
    name = docker.note(folder, f"cloudddp-{request.job}-setup-{time.monotonic_ns()}")
    own = {**docker.user_variables(), **docker.PIP, **env}
    return docker.command(request.container, argv, project, own, name), {**os.environ, **own}


class _Copy:
    """Copies the log to stderr while it grows: whoever launches the job sees what its setup does."""

    def __init__(self, log: BinaryIO) -> None:
        self.log = log
        self._copied = os.fstat(log.fileno()).st_size
        self._closed = False

    def update(self) -> None:
        """Copy what was added. A connection that is gone does not end the setup."""
        while not self._closed:
            data = os.pread(self.log.fileno(), PIECE, self._copied)
            if not data:
                return
            self._copied += len(data)
            try:
                sys.stderr.buffer.write(data.replace(STDERR_END, b""))
                sys.stderr.buffer.flush()
            except OSError:
                self._closed = True

    def leave_with_the_client(self) -> None:
        """Where the connection is gone, let the node power off as it is planned for a job that is never
        started: nobody is left that would start this one. Until then the setup goes on, since a launch may be
        repeated."""
        if self._is_alone():
            kernel.set_name(kernel.SETUP_ALONE)

    def _is_alone(self) -> bool:
        if not self._closed:
            looker = select.poll()
            looker.register(sys.stderr.fileno(), 0)
            self._closed = any(event & (select.POLLERR | select.POLLHUP) for _, event in looker.poll(0))
        return self._closed


def _read_only(environment: str) -> str:
    """Return the folder of a virtual environment if this user may not install into it, else ''."""
    folders = list(Path(environment).glob("lib/python3*/site-packages")) if environment else []
    return "" if all(os.access(folder, os.W_OK) for folder in folders) else environment


def _run(
    argv: list[str],
    shown: str,
    project: Path,
    env: dict[str, str],
    folder: Path,
    copy: _Copy,
    given: bytes = b"",
) -> SetupReply:
    """Run a program, unless the job has been cancelled; return its exit code and the end of its output.
    `given` is its stdin."""
    begin = os.fstat(copy.log.fileno()).st_size
    with store.locked("jobs"):  # `kill` either finds the process or comes first
        if phases.is_stopping(folder):
            return SetupReply(exit_code=CANCELLED, command=shown[:MAX_TEXT], cancelled=True)
        child = subprocess.Popen(
            argv,
            cwd=project,
            env=env,
            stdin=subprocess.PIPE if given else subprocess.DEVNULL,
            stdout=copy.log,
            stderr=subprocess.STDOUT,
        )
    if child.stdin is not None:
        with contextlib.suppress(BrokenPipeError), child.stdin as stdin:  # less than a pipe holds
            stdin.write(given)
    code: Optional[int] = None
    while code is None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            code = child.wait(PAUSE)
        copy.update()
        copy.leave_with_the_client()
    if phases.is_stopping(folder):
        return SetupReply(exit_code=CANCELLED, command=shown[:MAX_TEXT], cancelled=True)
    if not code:
        return SetupReply(exit_code=0)
    end = os.fstat(copy.log.fileno()).st_size
    first = max(begin, end - OUTPUT_BYTES)
    output = os.pread(copy.log.fileno(), max(end - first, 0), first).decode(errors="replace")
    return SetupReply(exit_code=code, command=shown[:MAX_TEXT], output=output)
