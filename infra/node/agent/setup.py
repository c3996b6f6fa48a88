"""`setup`: run the project's setup commands, once for each content."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import subprocess
import tempfile
import time
from pathlib import Path

from agent import files, kernel, machine, phases, processes, store
from agent.commands import activated
from cloudddp.agent.protocol import TASK_VARIABLE
from cloudddp.agent.protocol.codec import MAX_TEXT
from cloudddp.agent.protocol.start import SetupReply, SetupRequest

REQUEST = SetupRequest
CANCELLED = 130
DENIED = "Permission denied"  # in what pip writes if it may not install
OUTPUT_BYTES = 20_000  # of a command's output that are reported


def step(request: SetupRequest) -> SetupReply:
    """Run the commands in the project's folder unless the same content ran here before.

    They belong to the job that is being launched: until they have ended the job is in the phase SETUP, and `kill` ends
    them. What they leave in the background afterwards belongs to no job.
    """
    folder = store.project_folder(request.project)
    stamp = store.ROOT / f"setup-{folder.name}-{_digest(request, folder)[:16]}"
    with store.locked("setup"):
        if stamp.exists():
            return SetupReply(exit_code=0)
        return _set_up(request, folder, stamp)


def _digest(request: SetupRequest, folder: Path) -> str:
    content = hashlib.sha256(json.dumps(request.commands).encode())
    for name in request.inputs:
        with contextlib.suppress(OSError):
            data = files.inside(folder, name).read_bytes()
            content.update(f"\n{name} {len(data)}\n".encode(errors="surrogateescape") + data)
    return content.hexdigest()


def _set_up(request: SetupRequest, project: Path, stamp: Path) -> SetupReply:
    folder = store.job_folder(request.job)
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    task = phases.setup_task(folder, request.node)
    kernel.set_name(kernel.RUNS_A_JOB)
    kernel.adopt_orphans()
    # Where job.python does not exist yet, because a command creates it: the Python that the image has.
    active = activated(machine.find_python(request.python, project) or machine.find_python("", project))
    env = {**os.environ, **active, **request.env, TASK_VARIABLE: task.mark}
    own = phases.SetupFile(
        request.job, request.node, request.script, time.time(), os.getpid(), processes.born(os.getpid())
    )
    store.write(task.record, own)
    try:
        for command in request.commands:
            code, output = _run(command, project, env, folder)
            if phases.is_stopping(folder):
                processes.end(task, grace=1.0)
                return SetupReply(exit_code=CANCELLED, command=command[:MAX_TEXT], cancelled=True)
            if code:
                return SetupReply(
                    exit_code=code, command=command[:MAX_TEXT], output=output,
                    read_only=_read_only(active.get("VIRTUAL_ENV", "")) if DENIED in output else "",
                )  # fmt: skip
    finally:
        task.record.unlink(missing_ok=True)  # a command may have deleted the whole store
    store.create_root()
    stamp.write_text("done\n")
    return SetupReply(exit_code=0)


def _read_only(environment: str) -> str:
    """Return the folder of a virtual environment if this user may not install into it, else ''."""
    folders = list(Path(environment).glob("lib/python3*/site-packages")) if environment else []
    return "" if all(os.access(folder, os.W_OK) for folder in folders) else environment


def _run(command: str, project: Path, env: dict[str, str], folder: Path) -> tuple[int, str]:
    """Run a command, unless the job has been cancelled; return its exit code and the end of its output."""
    with (
        tempfile.TemporaryFile() as output
    ):  # a pipe would wait for what the command leaves in the background
        with store.locked("jobs"):  # `kill` either finds the process or comes first
            if phases.is_stopping(folder):
                return CANCELLED, ""
            child = subprocess.Popen(
                ["bash", "-c", command], cwd=project, env=env, stdin=subprocess.DEVNULL, stdout=output,
                stderr=subprocess.STDOUT,
            )  # fmt: skip
        code = child.wait()
        output.seek(0, os.SEEK_END)  # the offset is shared, but a command may have opened the file anew
        output.seek(max(output.tell() - OUTPUT_BYTES, 0))
        return code, output.read().decode(errors="replace")
