"""Other programs on this node, and this one."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Optional, TypeVar, Union

from agent.node import kernel
from cloudddp.agent.protocol.start import SetupRequest, Work

T = TypeVar("T")


def run_quietly(argv: list[str], timeout: float = 20.0, *, partly: bool = False) -> str:
    """Return a program's stdout, '' where it fails (unless `partly`), or takes longer than `timeout` s."""
    code, out, _ = outcome(argv, timeout)
    return out if partly or code == 0 else ""


def outcome(
    argv: list[str], seconds: float, *, given: str = "", env: Optional[Mapping[str, str]] = None
) -> tuple[Optional[int], str, str]:
    """Run a program and return its exit code, stdout and stderr; or None and why, where it was not started or
    took longer than so many seconds. `given` is its stdin. It ends with this process."""
    try:
        done = subprocess.run(
            argv,
            input=given.encode(),
            capture_output=True,
            cwd="/",
            env=env,
            timeout=seconds,
            check=False,
            preexec_fn=kernel.death_signal(signal.SIGKILL),
        )
    except subprocess.TimeoutExpired:
        return None, "", f"{argv[0]} took longer than {seconds:g} s"
    except OSError as error:
        return None, "", f"{argv[0]}: {error.strerror}"
    return done.returncode, done.stdout.decode(errors="replace"), done.stderr.decode(errors="replace")


def later(find: Callable[[], T]) -> Callable[..., Optional[T]]:
    """Call a function in a thread. Return a function that waits, for as many seconds as it is given, and
    returns what the first one has returned; None where that takes longer, or has failed."""
    found: list[T] = []
    thread = threading.Thread(target=lambda: found.append(find()), daemon=True)
    thread.start()

    def wait(seconds: Optional[float] = None) -> Optional[T]:
        thread.join(seconds)
        return found[0] if found else None

    return wait


def program(word: str, folder: Path) -> str:
    """Return the path of a program: `~` is the home folder, and a relative path is below `folder`."""
    return os.path.join(folder, os.path.expanduser(word)) if "/" in word else word


def variables(given: Union[SetupRequest, Work], project: Path) -> dict[str, str]:
    """Return the variables that a job was given: where [[data]] is, and those of the user, which win."""
    return {**{name: str(project / path) for name, path in given.paths.items()}, **given.env}


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
    """Return the command that runs this agent: without the user's environment and site-packages."""
    return [python, "-IS", "-X", "utf8", os.path.abspath(sys.argv[0]), *words]
