"""py-spy on this node: where it is, getting it, and the stacks of a process.

It reads the memory of another process (ptrace). Ubuntu allows that to the process's ancestors only
(kernel.yama.ptrace_scope = 1), so it is repeated with sudo where it was refused.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
from pathlib import Path

from agent.node import kernel, store
from agent.node.commands import outcome, run_quietly
from agent.watch import stack_dump
from cloudddp.agent.protocol.stacks import MAX_TOOL, TOOLS

NAME = "py-spy"
INSTALLED = "tools/installed"  # below the agent's folder
INSTALL_SECONDS = 60.0
STUCK = "it waits for a disk or a file server, so that py-spy cannot read its stack"
DUMP_SECONDS = 40.0  # of one attempt; symbols of libtorch take two on an idle machine
REFUSED = ("Permission", "permission", "Operation not permitted", "root")


def shipped() -> Path:
    """Return where the laptop puts py-spy."""
    return store.project_folder(TOOLS) / NAME


def platform() -> str:
    """Return what kind of program runs on this node, such as linux-x86_64."""
    return f"linux-{os.uname().machine}"


def shipped_digest() -> str:
    """Return the SHA-256 of what the laptop has put here, '' if that is nothing."""
    try:
        return hashlib.sha256(store.read_bytes(shipped(), MAX_TOOL)).hexdigest()
    except OSError:
        return ""


def find(python: str) -> str:
    """Return the path of py-spy, '' if it is missing: the laptop's, or that of an environment of Python, or
    pip's."""
    beside = [Path(python).with_name(NAME)] if "/" in python else []
    places = [shipped(), *beside, store.ROOT / INSTALLED / "bin" / NAME]
    return next((str(one) for one in places if os.access(one, os.X_OK)), shutil.which(NAME) or "")


def install(python: str) -> str:
    """Get py-spy with the pip of a Python, into a folder of its own: the job's environment stays as it is
    (PEP 668 does not concern --target). Return its path, '' where that fails: there is no pip, or the network
    is closed."""
    if found := find(python):
        return found
    folder = store.ROOT / INSTALLED
    options = """
        --quiet --no-deps --only-binary :all: --upgrade --disable-pip-version-check --timeout 5 --retries 0
    """.split()
    command = [python or "python3", "-m", "pip", "install", *options, "--target", str(folder), NAME]
    with contextlib.suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        run_quietly(command, INSTALL_SECONDS)
    return find(python)


def dump(tool: str, pid: int) -> tuple[list[stack_dump.Thread], str]:
    """Return the threads of a process, with native frames where possible; or none, and the reason."""
    reason = ""
    for words in (["--native"], []):
        for sudo in ([], ["sudo", "-n"]):
            command = [*sudo, tool, "dump", "--pid", str(pid), "--json", *words]
            output, reason = _run(command)
            if output:
                try:
                    return stack_dump.parse(output), ""
                except (ValueError, RecursionError) as error:
                    reason = f"the output of {NAME} cannot be read: {error}"
            if sudo or not any(word in reason for word in REFUSED):
                break
        if kernel.stat(pid)[:1] == ["D"]:  # nothing stops it, and so no other attempt would end in time
            return [], STUCK
    return [], reason


def _run(command: list[str]) -> tuple[str, str]:
    """Return a command's output, and the last line of its errors if it fails."""
    code, out, errors = outcome(command, DUMP_SECONDS)
    if code == 0:
        return out, ""
    lines = errors.strip().splitlines() or [f"{NAME} exited with {code}"]
    return "", next(
        (line for line in reversed(lines) if "reason" in line.lower() or "rror" in line), lines[-1]
    )
