"""Starts the trainer and the check scripts of tests/train as real processes, on loopback and the CPU only.

Python programs of the repository are forked from a process that has imported torch (support/zygote.py), since
that import is most of what a short run costs; other programs are started as usual. Nothing is forked from the
test process itself: torch's threads do not survive a fork. Every wait has a deadline.
"""

from __future__ import annotations

import functools
import importlib.util
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

from support import processes

ROOT = Path(__file__).resolve().parents[3]
MAIN = ROOT / "train" / "main.py"
CHECKS = Path(__file__).with_name("checks")
HANG = 200.0  # seconds; a guard against hanging, never an expectation; pytest's 300 stay above it
PRELOADED = (
    "torch._dynamo",
    "torch.distributed.checkpoint.state_dict",
    "torch.distributed.pipelining",
    "torch.distributed.run",
    "torch.utils.data._utils.worker",
    "train.run",
    "train.distributed.spawn",
)
TORCHRUN = ("-m", "torch.distributed.run")
FORKED_TORCHRUN = CHECKS / "forked_torchrun.py"
# Flags of a run that has five steps per epoch and takes a second.
TINY = (
    *("--dataset", "synthetic", "--synthetic-size", 40, "--image-size", 8, "--batch-size", 8),
    *("--epochs", 2, "--lr", 0.1, "--no-tensorboard"),
)
_RANK_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_running: set[Run] = set()
_reserved: list[socket.socket] = []  # reserve ports until this process ends


class Run:
    """A program that was started, in a session of its own."""

    def __init__(self, process: subprocess.Popen[str] | processes.Process) -> None:
        self._process = process
        self.pid = process.pid
        self.stdout = self.stderr = ""
        _running.add(self)

    @property
    def code(self) -> int | None:
        """The exit code, or minus the signal that killed it; None while it runs."""
        return self._process.poll()

    def ended(self) -> bool:
        return self.code is not None

    def wait(self) -> int:
        """Return the exit code. `stdout` and `stderr` are complete then, and its child processes are gone."""
        try:
            if self in _running:
                self.stdout, self.stderr = self._process.communicate(timeout=HANG)
                _running.discard(self)
        finally:
            self.kill_session()
        code = self.code
        assert code is not None
        return code

    def read_line(self) -> str:
        """Return the next line of stdout. Not after `wait`."""
        assert self._process.stdout is not None
        return self._process.stdout.readline()

    def signal(self, number: int) -> None:
        self._process.send_signal(number)

    def signal_session(self, number: int) -> None:
        """Send a signal to it and the processes that it started."""
        try:
            os.killpg(self.pid, number)
        except ProcessLookupError:
            pass

    def kill_session(self) -> None:
        """Kill it and the processes that it started, without waiting for their end."""
        self.signal_session(signal.SIGKILL)


def kill_all() -> None:
    """Kill what failed tests have left running."""
    for run in list(_running):
        run.kill_session()
        run.wait()


def environment(**extra: object) -> dict[str, str]:
    """Return the environment of a rank that sees no GPU and uses loopback only."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if name not in _RANK_VARIABLES and not name.startswith(("TORCHELASTIC", "PYTHONPATH"))
    }
    loopback = "lo0" if sys.platform == "darwin" else "lo"
    fixed = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "GLOO_SOCKET_IFNAME": loopback}
    return {**kept, **fixed, **{name: str(value) for name, value in extra.items()}}


@functools.cache
def _zygote() -> processes.Zygote:
    return processes.Zygote(*PRELOADED, env=environment(), any_path=True)


def start(*argv: object, cwd: Path = ROOT, **env: object) -> Run:
    """Start `python ARGV`. Check scripts can import `train` and `support`."""
    words = [str(word) for word in argv]
    if Path(words[0]).is_relative_to(CHECKS):
        path = [str(env.get("PYTHONPATH", "")), str(ROOT), str(ROOT / "tests")]
        env = {**env, "PYTHONPATH": os.pathsep.join(filter(None, path))}
    own = environment(**env)
    ours = words[0] == "-c" or Path(words[0]).is_relative_to(ROOT)
    ours |= words[0] == "-m" and (words[1].startswith(("train.", "bench.")) or words[1] == TORCHRUN[1])
    if ours and _zygote().can_fork(words, own):
        return Run(_zygote().start(words, cwd, own, session=True))
    return start_cold(*argv, cwd=cwd, **env)


def start_cold(*argv: object, cwd: Path = ROOT, **env: object) -> Run:
    """Start `python ARGV` with a new interpreter."""
    process = subprocess.Popen(
        [sys.executable, *(str(word) for word in argv)],
        cwd=cwd,
        env=environment(**env),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    return Run(process)


def run(*argv: object, cwd: Path = ROOT, **env: object) -> Run:
    """Start `python ARGV` and wait for it."""
    return wait(start(*argv, cwd=cwd, **env))[0]


def wait(*runs: Run) -> list[Run]:
    """Wait for all, and kill the others if one hangs."""
    try:
        for one in runs:
            one.wait()
    finally:
        for one in runs:
            one.kill_session()
    return list(runs)


def torchrun(ranks: int, *argv: object, cwd: Path = ROOT, **env: object) -> Run:
    """Run torchrun with `ranks` ranks on this machine, which it starts with new interpreters."""
    return wait(start_torchrun(ranks, *argv, cwd=cwd, **env))[0]


def start_torchrun(ranks: int, *argv: object, cwd: Path = ROOT, **env: object) -> Run:
    return start(*TORCHRUN, *_one_node(ranks), *argv, cwd=cwd, **env)


def forked_torchrun(ranks: int, *argv: object, **env: object) -> Run:
    """Run torchrun with `ranks` ranks on this machine, which are forked from its agent."""
    return wait(start(FORKED_TORCHRUN, *_one_node(ranks), *argv, **env))[0]


def _one_node(ranks: int) -> list[str]:
    return ["--standalone", "--local-addr=127.0.0.1", f"--nproc-per-node={ranks}"]


def start_train(*flags: object, **env: object) -> Run:
    return start("-m", "train.main", *flags, **env)


def start_ranks(world_size: int, *argv: object, **env: object) -> list[Run]:
    """Start `world_size` ranks that meet through environment variables; a single one is started without
    any."""
    if world_size == 1:
        return [start(*argv, **env)]
    shared = rendezvous(world_size)
    return [start(*argv, **{**shared, "RANK": rank, "LOCAL_RANK": rank, **env}) for rank in range(world_size)]


def train_ranks(world_size: int, *flags: object, **env: object) -> list[Run]:
    return start_ranks(world_size, "-m", "train.main", *flags, **env)


def run_ranks(world_size: int, *argv: object, **env: object) -> list[Run]:
    """Run ranks as `start_ranks` does, and require that each succeeds."""
    return succeeded(start_ranks(world_size, *argv, **env))


def succeeded(runs: list[Run]) -> list[Run]:
    """Wait for all, and require that each succeeds."""
    wait(*runs)
    assert [one.code for one in runs] == [0] * len(runs), "".join(one.stdout + one.stderr for one in runs)
    return runs


def rendezvous(world_size: int) -> dict[str, object]:
    """Return the variables that ranks started without torchrun share."""
    return {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port(), "WORLD_SIZE": world_size}


def free_port() -> int:
    """Return a loopback TCP port that nothing listens on.

    On Linux it stays reserved: the rank that gets it listens there only a second or two later, and meanwhile
    the ranks of other tests listen and connect.
    """
    holder = socket.socket()
    # torch's store sets this option, too: then it may listen there beside a socket that does not listen.
    holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    holder.bind(("127.0.0.1", 0))
    port = int(holder.getsockname()[1])
    if sys.platform == "linux":
        _reserved.append(holder)
    else:
        holder.close()  # elsewhere it would receive connections meant for the store
    return port


def is_listening(port: int) -> bool:
    """Return whether something listens on this loopback TCP port."""
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def until(condition: Callable[[], object], what: str) -> None:
    """Wait until `condition` returns something true."""
    deadline = time.monotonic() + HANG
    while not condition():
        assert time.monotonic() < deadline, f"did not happen: {what}"
        time.sleep(0.002)


def imported(path: Path) -> ModuleType:
    """Return a script as a module."""
    spec = importlib.util.spec_from_file_location(f"script_{path.stem}", path)
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
