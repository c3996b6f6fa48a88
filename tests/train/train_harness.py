"""How the tests of `train/` start it: as real processes, on loopback and the CPU only, each with a deadline.

It must not know what a test expects of them. Nothing is forked from the test process: torch's threads do not
survive a fork.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
HANG = 100.0  # seconds; a guard against hanging, never an expectation
_OF_A_JOB = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def environment(**extra: object) -> dict[str, str]:
    """The environment of a rank that sees no GPU and talks over loopback only."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if name not in _OF_A_JOB and not name.startswith(("TORCHELASTIC", "PYTHONPATH"))
    }
    loopback = "lo0" if sys.platform == "darwin" else "lo"
    fixed = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "GLOO_SOCKET_IFNAME": loopback}
    return {**kept, **fixed, **{name: str(value) for name, value in extra.items()}}


def start(argv: list[object], *, cwd: Path, **env: object) -> subprocess.Popen[str]:
    """`python ARGV` in a session of its own."""
    return subprocess.Popen(
        [sys.executable, *map(str, argv)],
        cwd=cwd,
        env=environment(**env),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def finish(process: subprocess.Popen[str]) -> subprocess.CompletedProcess[str]:
    """Wait for the process. Whatever it started is gone afterwards, also when it hangs."""
    try:
        out, err = process.communicate(timeout=HANG)
    finally:
        kill_session(process)
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)


def kill_session(process: subprocess.Popen[str]) -> None:
    """End the process and its children."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
    process.wait()


def python(*argv: object, cwd: Path = ROOT, **env: object) -> subprocess.CompletedProcess[str]:
    """What `python ARGV` did."""
    return finish(start(list(argv), cwd=cwd, **env))


def torchrun(ranks: int, *argv: object, cwd: Path = ROOT, **env: object) -> subprocess.CompletedProcess[str]:
    """What torchrun with `ranks` ranks on this machine did."""
    own = ["--standalone", "--local-addr=127.0.0.1", f"--nproc-per-node={ranks}"]
    return python("-m", "torch.distributed.run", *own, *argv, cwd=cwd, **env)


def by_hand(
    starts: list[tuple[list[object], dict[str, object]]], *, cwd: Path = ROOT
) -> list[subprocess.CompletedProcess[str]]:
    """What several processes did that were started side by side without torchrun, from (argv, environment)."""
    processes = []
    try:
        processes = [start(argv, cwd=cwd, **env) for argv, env in starts]
        return [finish(process) for process in processes]
    finally:
        for process in processes:
            kill_session(process)


def free_port() -> int:
    """A TCP port of loopback that nothing listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
