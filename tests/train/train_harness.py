"""How the tests of `train/` start it: as real processes, on loopback and the CPU only, each with a deadline.

It must not know what a test expects of them. Nothing is forked from the test process: torch's threads do not
survive a fork.
"""

from __future__ import annotations

import functools
import itertools
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import processes

ROOT = Path(__file__).resolve().parents[2]
HANG = 200.0  # seconds; a guard against hanging, never an expectation; the 300 of pytest stay above it
_KEPT: list[socket.socket] = []  # what keeps ports, to the end of this process
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


@functools.cache
def zygote() -> processes.Zygote:
    """The one of this test process: it has imported torch, which is most of what a short run costs."""
    imported = ("torch._dynamo", "torch.distributed.checkpoint.state_dict", "train.trainer")
    return processes.Zygote(*imported, "torch.distributed.elastic.multiprocessing.errors", env=environment())


def start(argv: list[object], *, cwd: Path, **env: object) -> subprocess.Popen[str] | processes.Process:
    """`python ARGV` in a session of its own; the trainer and scripts of the tests are forked (zygote.py)."""
    words, own = [str(word) for word in argv], environment(**env)
    ours = words[:2] == ["-m", "train.main"] or Path(words[0]).is_relative_to(ROOT)
    if ours and zygote().can_be(words, own):
        return zygote().start(words, cwd, own, session=True)
    return subprocess.Popen(
        [sys.executable, *words],
        cwd=cwd,
        env=own,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def finish(process: subprocess.Popen[str] | processes.Process) -> subprocess.CompletedProcess[str]:
    """Wait for the process. Whatever it started is gone afterwards, also when it hangs."""
    try:
        out, err = process.communicate(timeout=HANG)
    finally:
        kill_session(process)
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)


def kill_session(process: subprocess.Popen[str] | processes.Process) -> None:
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


def job(world: int, *argv: object) -> list[subprocess.CompletedProcess[str]]:
    """What the ranks of a job did that was started without torchrun; each has succeeded."""
    meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port(), "WORLD_SIZE": world}
    places = [{**meeting, "RANK": rank, "LOCAL_RANK": rank} for rank in range(world)] if world > 1 else [{}]
    ranks = by_hand([(list(argv), place) for place in places])
    for done in ranks:
        assert done.returncode == 0, done.stdout + done.stderr
    return ranks


def free_port() -> int:
    """A TCP port of loopback that nothing listens on, nor comes to by chance before the rank that is told it: that
    takes a second or two, in which the ranks of other tests listen and connect."""
    probe = socket.socket()
    # torch's store sets it as well: then it may listen there beside a socket that does not.
    probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    probe.bind(("127.0.0.1", 0))
    port = int(probe.getsockname()[1])
    if sys.platform == "linux":
        _KEPT.append(probe)
    else:
        probe.close()  # here it would be sent what is meant for the store
    return port


def until(done: Callable[[], object], what: str) -> None:
    """Wait until `done` returns something true."""
    deadline = time.monotonic() + HANG
    while not done():
        assert time.monotonic() < deadline, f"never happened: {what}"
        time.sleep(0.002)


class Zygote:
    """Starts processes in a tenth of the time, by forking them from one that has imported torch: train_zygote.py.
    `close` ends it and whatever it started."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._numbers = itertools.count()
        self._started: list[Forked] = []
        self._server = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("train_zygote.py"))],
            cwd=ROOT,
            env=environment(),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def start(self, *argv: object, run: str = "train.main", **env: object) -> Forked:
        """A process, in a session of its own, that calls `main` of the module `run` with `argv`."""
        output = str(self._folder / f"output{next(self._numbers)}")
        words = [str(word) for word in argv]
        wish = {"run": run, "argv": words, "env": {k: str(v) for k, v in env.items()}, "output": output}
        started = Forked(self, self.ask(wish), Path(output))
        self._started.append(started)
        return started

    def ranks(self, world: int, *argv: object, run: str = "train.main", **env: object) -> list[Forked]:
        """`world` ranks that meet through environment variables; a single one is started without any."""
        if world == 1:
            return [self.start(*argv, run=run, **env)]
        shared = {"WORLD_SIZE": world, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port(), **env}
        return [self.start(*argv, run=run, RANK=rank, LOCAL_RANK=rank, **shared) for rank in range(world)]

    def ask(self, wish: dict[str, object]) -> int | None:
        """The server's answer."""
        assert self._server.stdin is not None and self._server.stdout is not None
        self._server.stdin.write(json.dumps(wish) + "\n")
        self._server.stdin.flush()
        return json.loads(self._server.stdout.readline())

    def close(self) -> None:
        for started in self._started:
            if started.code is None:
                started.kill_session()
        kill_session(self._server)


class Forked:
    """A process that a Zygote started."""

    def __init__(self, zygote: Zygote, pid: int | None, output: Path) -> None:
        assert pid is not None
        self._zygote = zygote
        self._output = output
        self.pid = pid
        self.code: int | None = None

    def ended(self) -> bool:
        """Whether it has ended; then `code` is its exit code, or minus the signal that ended it."""
        if self.code is None:
            self.code = self._zygote.ask({"poll": self.pid})
        return self.code is not None

    def wait(self) -> int:
        """Its exit code."""
        until(self.ended, f"process {self.pid} ended")
        assert self.code is not None
        return self.code

    def signal(self, number: int) -> None:
        if not self.ended():  # not reaped by then, so the number is still its own
            os.kill(self.pid, number)

    def kill_session(self) -> None:
        """End it and what it started, at once."""
        if not self.ended():
            os.killpg(self.pid, signal.SIGKILL)

    @property
    def stdout(self) -> str:
        return self._output.with_suffix(".out").read_text()

    @property
    def stderr(self) -> str:
        return self._output.with_suffix(".err").read_text()


def listening(port: int) -> bool:
    """Whether something listens on this TCP port of loopback."""
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0
