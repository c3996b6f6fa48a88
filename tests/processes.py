"""Processes forked by zygote.py, with the methods of subprocess.Popen that the tests use."""

from __future__ import annotations

import contextlib
import functools
import io
import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO


class Zygote:
    """The process that forks the others; it ends with this one, whose socket it listens to."""

    def __init__(self, *modules: str, env: Mapping[str, str] | None = None) -> None:
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 20)
        script = str(Path(__file__).with_name("zygote.py"))
        self._env = dict(env or os.environ)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, script, str(theirs.fileno()), *modules],
                pass_fds=[theirs.fileno()],
                env=self._env,
                stdin=subprocess.DEVNULL,
                # A shell that runs the tests in the background has Ctrl-C ignored, and that is inherited.
                preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
            )

    def can_be(self, argv: Sequence[str], env: Mapping[str, str]) -> bool:
        """Whether a fork can be this process: not where the interpreter would begin otherwise, or all is too large."""
        ours, its = ({k: v for k, v in e.items() if k.startswith("PYTHON")} for e in (self._env, env))
        return ours == its and all(len(text) < 10_000 for text in (*argv, *env.values()))

    def start(
        self, argv: Sequence[str], cwd: Path, env: Mapping[str, str], *, session: bool = False
    ) -> Process:
        """Start `python ARGV`; stdin is empty."""
        pipes = [os.pipe() for _ in range(3)]
        with open(os.devnull, "rb") as nothing:  # noqa: PTH123
            given = [nothing.fileno(), *(write for _, write in pipes)]
            wish = {"argv": list(argv), "cwd": str(cwd), "env": dict(env), "session": session}
            socket.send_fds(self._socket, [json.dumps(wish).encode()], given)
        for _, write in pipes:
            os.close(write)
        out, err, answer = (read for read, _ in pipes)
        return Process([sys.executable, *argv], out, err, answer)


@functools.cache
def zygote() -> Zygote:
    """The one of this test process for `cloudddp`."""
    return Zygote("tests.warm")


class Process:
    """A process that is not this one's child: its end is told by a pipe."""

    def __init__(self, args: list[str], out: int, err: int, answer: int) -> None:
        self.args = args
        self.returncode: int | None = None
        self.stdout: IO[str] = io.open(out, encoding="utf-8")  # noqa: SIM115, UP020
        self.stderr: IO[str] = io.open(err, encoding="utf-8")  # noqa: SIM115, UP020
        self._answer = answer
        self._said = b""
        self._readers: list[threading.Thread] = []
        self._read: list[str] = ["", ""]
        self._lock = threading.RLock()
        while b"\n" not in self._said:
            self._hear()
        first, _, self._said = self._said.partition(b"\n")
        self.pid = int(first)

    def _hear(self) -> None:
        said = os.read(self._answer, 64)
        assert said, "the zygote has ended"
        self._said += said

    def poll(self) -> int | None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self.wait(0)
        return None

    def wait(self, timeout: float | None = None) -> int:
        end = None if timeout is None else time.monotonic() + timeout
        while self.returncode is None:
            left = None if end is None else max(0.0, end - time.monotonic())
            heard = b"\n" in self._said  # the code may have come with the pid
            readable = heard or select.select([self._answer], [], [], left)[0]
            with self._lock:
                if self.returncode is not None:
                    break
                if not readable:
                    raise subprocess.TimeoutExpired(self.args, timeout or 0)
                if b"\n" not in self._said:
                    self._hear()
                if b"\n" in self._said:
                    self.returncode = int(self._said)
                    os.close(self._answer)
        return self.returncode

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        end = None if timeout is None else time.monotonic() + timeout
        if not self._readers:
            for place, stream in enumerate((self.stdout, self.stderr)):
                self._readers.append(threading.Thread(target=self._drain, args=(place, stream), daemon=True))
                self._readers[-1].start()
        for reader in self._readers:
            reader.join(None if end is None else max(0.0, end - time.monotonic()))
            if reader.is_alive():
                raise subprocess.TimeoutExpired(self.args, timeout or 0, *map(str.encode, self._read))
        self.wait(None if end is None else max(0.0, end - time.monotonic()))
        return self._read[0], self._read[1]

    def _drain(self, place: int, stream: IO[str]) -> None:
        while text := stream.readline():
            self._read[place] += text
        stream.close()

    def send_signal(self, number: int) -> None:
        with self._lock:
            if self.poll() is None:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)
