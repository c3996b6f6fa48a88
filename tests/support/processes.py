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

CLOSED = -101  # for a stream: none, as after `>&-` in a shell
Stream = int | IO[bytes] | IO[str] | None  # PIPE, DEVNULL, CLOSED, or a file


class Zygote:
    """The process that forks the others. It ends when this process closes its socket."""

    def __init__(self, *modules: str, env: Mapping[str, str] | None = None, any_path: bool = False) -> None:
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 20)
        script = str(Path(__file__).with_name("zygote.py"))
        self._env = dict(env or os.environ)
        # With `any_path` a process may have a PYTHONPATH that the zygote lacks; no sitecustomize of it is
        # imported.
        self._any_path = any_path and "PYTHONPATH" not in self._env
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, script, str(theirs.fileno()), *modules],
                pass_fds=[theirs.fileno()],
                env=self._env,
                stdin=subprocess.DEVNULL,
                # A shell that runs the tests in the background has Ctrl-C ignored, and that is inherited.
                preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
            )

    def can_fork(self, argv: Sequence[str], env: Mapping[str, str]) -> bool:
        """Return whether a fork can replace this process: the interpreter's own settings are equal, nothing
        is too large."""
        ours, its = ({k: v for k, v in e.items() if k.startswith("PYTHON")} for e in (self._env, env))
        if self._any_path:
            its.pop("PYTHONPATH", None)
        return ours == its and all(len(text) < 10_000 for text in (*argv, *env.values()))

    def start(
        self,
        argv: Sequence[str],
        cwd: Path,
        env: Mapping[str, str],
        *,
        session: bool = False,
        stdin: Stream = subprocess.DEVNULL,
        stdout: Stream = subprocess.PIPE,
        stderr: Stream = subprocess.PIPE,
    ) -> Process:
        """Start `python ARGV`."""
        streams, ours = (stdin, stdout, stderr), []
        answer, answer_end = os.pipe()
        with contextlib.ExitStack() as stack:
            nothing = stack.enter_context(open(os.devnull, "r+b", buffering=0))  # noqa: PTH123
            given = []
            for stream in streams:
                if stream == subprocess.PIPE:
                    ours_end, theirs = os.pipe()
                    stack.callback(os.close, theirs)
                    ours.append(ours_end)
                else:
                    ours.append(None)
                    theirs = nothing.fileno() if stream in (CLOSED, subprocess.DEVNULL) else _number(stream)
                given.append(theirs)
            stack.callback(os.close, answer_end)
            request = {
                "argv": list(argv),
                "cwd": str(cwd),
                "env": dict(env),
                "session": session,
                "closed": [number for number, stream in enumerate(streams) if stream == CLOSED],
            }
            socket.send_fds(self._socket, [json.dumps(request).encode()], [*given, answer_end])
        return Process([sys.executable, *argv], ours[1], ours[2], answer)


def _number(stream: Stream) -> int:
    assert stream is not None
    return stream if isinstance(stream, int) else stream.fileno()


@functools.cache
def zygote() -> Zygote:
    """Return the zygote of this test process that has imported cloudddp."""
    return Zygote("tests.support.warm")


class Process:
    """A process that is not a child of this one: a pipe reports its end.

    `peak_memory` is its largest resident size in bytes once it has ended. It includes what the fork shares
    with the zygote, so it is never smaller than that of the same program started alone.
    """

    def __init__(self, args: list[str], out: int | None, err: int | None, answer: int) -> None:
        self.args = args
        self.returncode: int | None = None
        self.peak_memory: int | None = None
        self.stdout, self.stderr = (None if pipe is None else _reader(pipe) for pipe in (out, err))
        self._answer = answer
        self._answered = b""
        self._readers: list[threading.Thread] = []
        self._read: list[str] = ["", ""]
        self._lock = threading.RLock()
        while b"\n" not in self._answered:
            self._read_answer()
        first, _, self._answered = self._answered.partition(b"\n")
        self.pid = int(first)

    def _read_answer(self) -> None:
        data = os.read(self._answer, 64)
        assert data, "the zygote has ended"
        self._answered += data

    def poll(self) -> int | None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self.wait(0)
        return None

    def wait(self, timeout: float | None = None) -> int:
        end = None if timeout is None else time.monotonic() + timeout
        while self.returncode is None:
            left = None if end is None else max(0.0, end - time.monotonic())
            buffered = b"\n" in self._answered  # the exit code may have arrived with the pid
            readable = buffered or select.select([self._answer], [], [], left)[0]
            with self._lock:
                if self.returncode is not None:
                    break
                if not readable:
                    raise subprocess.TimeoutExpired(self.args, timeout or 0)
                if b"\n" not in self._answered:
                    self._read_answer()
                if b"\n" in self._answered:
                    code, peak = self._answered.split()
                    self.returncode, self.peak_memory = int(code), int(peak) << 10
                    os.close(self._answer)
        return self.returncode

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        end = None if timeout is None else time.monotonic() + timeout
        if not self._readers:
            for place, stream in enumerate((self.stdout, self.stderr)):
                if stream is not None:
                    self._readers.append(
                        threading.Thread(target=self._drain, args=(place, stream), daemon=True)
                    )
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


def _reader(pipe: int) -> IO[str]:
    return io.open(pipe, encoding="utf-8", errors="surrogateescape")  # noqa: UP020
