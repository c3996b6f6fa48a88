"""Other programs on this node, and this one."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Optional, Union

from cloudddp.agent.protocol.start import SetupRequest, StartRequest

_running: list[Callable[[], None]] = []  # what kills each program that has not ended


def run_quietly(argv: list[str], timeout: float = 20.0, *, partly: bool = False) -> str:
    """Return a program's stdout, or '' where it is missing, fails, or takes longer than `timeout` seconds.
    With `partly`, also what a program wrote that failed."""
    return started(argv, timeout, partly=partly)()


def started(argv: list[str], timeout: float = 20.0, *, partly: bool = False) -> Callable[[], str]:
    """Start a program, and return a function that waits for its end and returns what `run_quietly` would."""
    try:
        process = subprocess.Popen(
            argv, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
        )
    except OSError:
        return str
    _running.append(process.kill)

    def output() -> str:
        with process:
            try:
                out, _ = process.communicate(timeout=timeout)
            except subprocess.TimeoutExpired:
                process.kill()
                return ""
            finally:
                _running.remove(process.kill)
        return out.decode(errors="replace") if partly or process.returncode == 0 else ""

    return output


def succeeds(argv: list[str], timeout: float, *, cwd: Optional[str] = None) -> bool:
    """Run a program without input and output; return whether it exited with 0 in time."""
    silent = subprocess.DEVNULL
    try:
        done = subprocess.run(
            argv, stdin=silent, stdout=silent, stderr=silent, timeout=timeout, cwd=cwd, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return False
    return done.returncode == 0


def kill_running() -> None:
    """Kill the programs that are still asked: this process is about to end."""
    for kill in _running:
        kill()


def program(word: str, folder: Path) -> str:
    """Return the path of a program: `~` is the home folder, and a relative path is below `folder`."""
    return os.path.join(folder, os.path.expanduser(word)) if "/" in word else word


def variables(request: Union[SetupRequest, StartRequest], project: Path) -> dict[str, str]:
    """Return the variables that a job was given: where [[data]] is, and those of the user, which win."""
    return {**{name: str(project / path) for name, path in request.paths.items()}, **request.env}


def activated(python: str) -> dict[str, str]:
    """Return the variables with which the programs of a Python's environment (pip, torchrun, ninja) are found
    first.

    The Deep Learning AMI has its environment in /opt/pytorch and not on PATH; the system's pip refuses to
    install there (PEP 668). {} for a Python that is the first on PATH anyway.
    """
    folder, path = os.path.dirname(python), os.environ.get("PATH", os.defpath)
    if not folder or shutil.which(os.path.basename(python)) == python:
        return {}
    variables = {"PATH": os.pathsep.join((folder, path))}
    if os.path.exists(os.path.join(folder, "..", "pyvenv.cfg")):
        variables["VIRTUAL_ENV"] = os.path.dirname(folder)
    return variables


def agent_command(*words: str, python: str = sys.executable) -> list[str]:
    """Return the command that runs this agent: isolated from the user's environment and without
    site-packages."""
    return [python, "-IS", "-X", "utf8", os.path.abspath(sys.argv[0]), *words]
