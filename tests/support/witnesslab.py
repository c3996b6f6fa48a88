"""A lab for programs by other authors, which run inside its network, each from its own environment.

It starts the programs, and ends processes that they leave behind. `make witness` creates the environments
(requirements-NAME.txt); without them these tests are skipped.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from support.harness import ROOT, cannot

from cloudddp.simulator import control

IMAGE_PARAMETER = (
    "/aws/service/deeplearning/ami/x86_64/oss-nvidia-driver-gpu-pytorch-2.12-ubuntu-24.04/latest/ami-id"
)
TIMEOUT = 300  # a hang guard, not a measurement
MARK = "CLOUDDDP_WITNESS"


@dataclass(frozen=True, slots=True)
class Lab:
    """A running lab, and a folder that is the HOME of the programs in it."""

    sim: control.Simulator
    folder: Path
    env: dict[str, str]

    def __call__(self, *command: str, check: bool = True) -> subprocess.CompletedProcess[str]:
        """Run a command inside the lab's network, with `cloudddp sim exec`, as users do."""
        # The program has its own Python, which must not find our packages.
        inside = [sys.executable, "-m", "cloudddp", "sim", "exec", "--", "env", "-u", "PYTHONPATH", *command]
        done = subprocess.run(
            inside,
            env=self.env,
            cwd=self.folder,
            text=True,
            timeout=TIMEOUT,
            check=False,
            stdin=subprocess.DEVNULL,
            capture_output=True,
        )
        if check:
            assert done.returncode == 0, (
                f"{' '.join(command)}: exit {done.returncode}\n{done.stdout}{done.stderr}"
            )
        return done

    def states(self) -> list[str]:
        """The states of the instances that the simulator has not terminated."""
        return [str(node["state"]) for node in control.nodes(self.sim)]


def witness(name: str, program: str) -> str:
    """Return the path of a program; skip the test if its environment does not exist."""
    path = ROOT / ".venv-witness" / name / "bin" / program
    if not path.exists():
        cannot(f"no {program} in .venv-witness: `make witness` installs it")
    return str(path)


def end_marked(mark: str) -> None:
    """End the background processes of a program, such as OpenSSH's shared connections."""
    wanted = f"{MARK}={mark}".encode()
    deadline = time.monotonic() + 30
    while left := [pid for pid in _pids() if wanted in _environ(pid)]:
        assert time.monotonic() < deadline, f"processes {left} do not end"
        for pid in left:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
        time.sleep(0.05)


def _pids() -> list[int]:
    return [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdecimal()]


def _environ(pid: int) -> list[bytes]:
    try:
        return (Path("/proc") / str(pid) / "environ").read_bytes().split(b"\0")
    except OSError:
        return []
