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
from agent.jobs import phases, poweroff
from agent.node import docker, kernel, machine, processes, store
from agent.node.commands import activated, program, variables
from agent.s3 import boto_process
from cloudddp.agent.protocol import TASK_VARIABLE
from cloudddp.agent.protocol.codec import MAX_TEXT, STDERR_END
from cloudddp.agent.protocol.copies import url_of
from cloudddp.agent.protocol.frozen import frozen
from cloudddp.agent.protocol.jobs import StateFile
from cloudddp.agent.protocol.phases import JobPhase
from cloudddp.agent.protocol.start import Container, SetupReply, SetupRequest

REQUEST = SetupRequest
CANCELLED = 130
CLOSED = "no answer; the security groups of the file system must admit TCP port 2049 (NFS) or 988 (Lustre)"
DENIED = "Permission denied"  # in what pip writes if it may not install
OUTPUT_BYTES = 20_000  # of a command's output that are reported
PIECE = 1 << 16  # bytes
PAUSE = 0.1  # seconds between two looks at the output of a command


def step(request: SetupRequest) -> SetupReply:
    """Run the commands in the project's folder unless the same content ran here before.

    They belong to the job that is being launched: until they have ended the job is in the phase SETUP, and
    `kill` ends them. What they leave in the background afterwards belongs to no job.
    """
    project = store.project_folder(request.project)
    with store.locked("setup"):
        every_time = request.shared or request.data or request.container
        if not every_time and _is_done(request, project):
            return SetupReply(exit_code=0)
        return _set_up(request, project)


def _content(request: SetupRequest, project: Path) -> str:
    """Return a digest of the commands and of what they read."""
    content = hashlib.sha256(json.dumps([*request.commands, request.python]).encode())
    for name in request.inputs:
        with contextlib.suppress(OSError), open(paths.inside(project, name), "rb") as file:
            content.update(f"\n{name} {os.fstat(file.fileno()).st_size}\n".encode(errors="surrogateescape"))
            while piece := file.read(PIECE):
                content.update(piece)
    return content.hexdigest()


def _stamp(request: SetupRequest, project: Path) -> Path:
    """Return the file with the digest for which the commands have run last in this image. There is one for
    all digests: a run for another one has replaced what was installed before."""
    image = [request.container.image, request.container.torch] if request.container else []
    return store.ROOT / f"setup-{project.name}-{hashlib.sha256(json.dumps(image).encode()).hexdigest()[:16]}"


def _is_done(request: SetupRequest, project: Path) -> bool:
    try:
        return _stamp(request, project).read_text() == _content(request, project)
    except (OSError, ValueError):
        return False


@frozen
class _Setup:
    """A setup that runs: `folder` is that of the job, and its processes have the `mark`."""

    request: SetupRequest
    project: Path
    folder: Path
    mark: str
    copy: _Copy


def _set_up(request: SetupRequest, project: Path) -> SetupReply:
    folder = store.job_folder(request.job)
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    task = phases.setup_task(folder, request.node)
    poweroff.occupy()
    kernel.adopt_orphans()
    own = StateFile(
        request.job,
        request.node,
        JobPhase.SETUP,
        time.time(),
        pid=os.getpid(),
        born=processes.born(os.getpid()),
        script=request.script,
        boot=kernel.boot(),
    )
    store.write(task.record, own)
    with _open_log(folder) as log:
        setup = _Setup(request, project, folder, task.mark, _Copy(log))
        # [setup] may install the Lustre client: it runs before the mount if that is missing.
        mount_after_setup = "mount.lustre" in shared.missing(request.shared) and bool(request.commands)
        failed = (None if mount_after_setup else _share(setup)) or _copy_data(setup) or _pull(setup)
        if request.container and not failed:
            image = docker.id_of(request.container.image) or request.container.image
            request = replace(request, container=replace(request.container, image=image))
        stamp, content = _stamp(request, project), _content(request, project)
        if not (failed or _is_done(request, project)):
            stamp.unlink(missing_ok=True)  # a run that fails may have removed what was installed before
            failed = _run_all(replace(setup, request=request))
        if mount_after_setup and not failed:
            failed = _share(setup)
    if failed is None:
        task.record.unlink(missing_ok=True)
        store.create_root()
        stamp.write_text(content)
        return SetupReply(exit_code=0, image=request.container.image if request.container else "")
    if failed.cancelled:
        processes.end(task, grace=1.0)
    code = failed.exit_code if failed.exit_code > 0 else 128 - failed.exit_code
    with contextlib.suppress(OSError):  # a command may have deleted the whole store
        phase = JobPhase.CANCELLED if failed.cancelled else JobPhase.FAILED
        store.write(task.record, replace(own, state=phase, ended=time.time(), exit_code=min(code, 255)))
    if DENIED in failed.output and request.container is None:
        return replace(failed, read_only=_read_only(_active(request, project).get("VIRTUAL_ENV", "")))
    return failed


def _active(request: SetupRequest, project: Path) -> dict[str, str]:
    """Return the variables of the environment that is there now: a command may have created it. Where
    job.python does not exist yet, that of the Python that the image has."""
    return activated(machine.find_python(request.python, project) or machine.find_python("", project))


def _open_log(folder: Path) -> BinaryIO:
    """Open the log of the commands' output. A pipe would wait for what a command leaves in the background."""
    number = os.open(folder / phases.SETUP_LOG, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW, 0o600)
    return open(number, "r+b", buffering=0)


# Each part returns None, or how it failed.


def _share(setup: _Setup) -> Optional[SetupReply]:
    """Mount the shared folders, and link them in the project."""
    folders = setup.request.shared
    shown = f"[[shared]] {', '.join(folder.path for folder in folders)}"
    try:
        for argv, given in shared.commands(folders) if folders else ():
            if failed := _run(setup, argv, shown, dict(os.environ), given):
                problem = CLOSED if failed.exit_code in shared.TOO_LATE else failed.output
                return replace(failed, output=problem, data=True)
        if folders:
            shared.link(folders, setup.project)
    except OSError as error:
        problem = str(error.strerror or error)[:MAX_TEXT]
        return SetupReply(exit_code=1, command=shown, output=problem, data=True)
    return None


def _copy_data(setup: _Setup) -> Optional[SetupReply]:
    """Copy what differs of [[data]] from S3, with the Python of the job or of the image."""
    request, project = setup.request, setup.project
    own = [found for name in (request.python, "") if (found := machine.find_python(name, project))]
    for one in request.data:
        shown = url_of(one.bucket, one.prefix)
        try:
            argv = boto_process.command(own, "download")
        except boto_process.CannotStart as error:
            return SetupReply(exit_code=1, command=shown, output=str(error)[:MAX_TEXT], data=True)
        wanted = json.dumps({**vars(one), "project": str(project)}).encode()
        if failed := _run(setup, argv, shown, boto_process.environment(), wanted):
            return replace(failed, data=True)
    return None


def _pull(setup: _Setup) -> Optional[SetupReply]:
    """Pull the image unless the node has it."""
    if (container := setup.request.container) is None:
        return None
    docker.allow()
    if docker.id_of(container.image):
        return None
    argv, env = ["bash", "-c", docker.pull(container.image)], boto_process.environment()
    failed = _run(setup, argv, f"docker pull {container.image}", env)
    return failed and replace(failed, image=container.image)


def _run_all(setup: _Setup) -> Optional[SetupReply]:
    """Run the commands, and whether ranks can run in the container, which a command may have made so."""
    request, project, container = setup.request, setup.project, setup.request.container
    for command in request.commands:
        image = {"CLOUDDDP_IMAGE_PYTHON": machine.find_python("", project)}  # whatever environment is active
        base = {} if container else {**os.environ, **image, **_active(request, project)}
        env = {**base, **variables(request, project)}
        if failed := _run(setup, ["bash", "-c", command], command, env, inside=container):
            if container and failed.output.startswith("docker: "):
                return replace(failed, image=container.image)
            return failed
    if container is None:
        return None
    python = program(request.python or "python3", project)
    words = [python, "-c", docker.CHECK, *(["torch"] if container.torch else [])]
    failed = _run(setup, words, python, {}, inside=container)
    return failed and replace(failed, image=container.image)


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
        if not self._closed:
            looker = select.poll()
            looker.register(sys.stderr.fileno(), 0)
            self._closed = any(event & (select.POLLERR | select.POLLHUP) for _, event in looker.poll(0))
        if self._closed:
            kernel.set_name(kernel.SETUP_ALONE)


def _read_only(environment: str) -> str:
    """Return the folder of a virtual environment if this user may not install into it, else ''."""
    folders = list(Path(environment).glob("lib/python3*/site-packages")) if environment else []
    return "" if all(os.access(folder, os.W_OK) for folder in folders) else environment


def _run(
    setup: _Setup,
    argv: list[str],
    shown: str,
    env: dict[str, str],
    given: bytes = b"",
    inside: Optional[Container] = None,
) -> Optional[SetupReply]:
    """Run a program, unless the job has been cancelled, `inside` a container if there is one; return None, or
    how it failed, with the end of its output. `given` is its stdin."""
    copy, env = setup.copy, {**env, TASK_VARIABLE: setup.mark}
    if inside:
        argv, env = docker.command(inside, argv, setup.project, env, setup.folder)
    begin = os.fstat(copy.log.fileno()).st_size
    with store.locked("jobs"):  # `kill` either finds the process or comes first
        if phases.is_stopping(setup.folder):
            return SetupReply(exit_code=CANCELLED, command=shown[:MAX_TEXT], cancelled=True)
        child = subprocess.Popen(
            argv,
            cwd=setup.project,
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
    if phases.is_stopping(setup.folder):
        return SetupReply(exit_code=CANCELLED, command=shown[:MAX_TEXT], cancelled=True)
    if not code:
        return None
    end = os.fstat(copy.log.fileno()).st_size
    first = max(begin, end - OUTPUT_BYTES)
    output = os.pread(copy.log.fileno(), max(end - first, 0), first).decode(errors="replace")
    return SetupReply(exit_code=code, command=shown[:MAX_TEXT], output=output)
