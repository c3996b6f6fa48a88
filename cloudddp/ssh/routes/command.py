"""A proxy command: a program per connection whose stdin and stdout are the stream to the node's SSH server.

As OpenSSH's ProxyCommand: run by the user's shell with `exec` (ssh's tokens were replaced before). It ends
with the connection. paramiko.ProxyCommand is not used: its recv waits for a full buffer, it never reads the
program's stderr, so that a talkative program blocks, it splits the command itself instead of the shell, and
it never reaps.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import socket
import subprocess
import threading
from collections.abc import Callable, Mapping, Sequence
from math import inf

from cloudddp.config.timing import Timing
from cloudddp.errors import ConnectError, inert
from cloudddp.ssh.target import NodeSocket, Target
from cloudddp.text import one_line

_KEPT = 4096  # bytes of what the program writes to stderr
_END_SECONDS = 3.0  # for the program to end after SIGTERM
_EXIT_SECONDS = 2.0  # for the program to exit after it has closed its output
_SILENT_SECONDS = 0.1  # for one that has not
# The shell's "not found" and "not executable"; the AWS CLI's "invalid usage" and "no valid configuration"
# (https://docs.aws.amazon.com/cli/latest/userguide/cli-usage-returncodes.html).
_PERMANENT = (126, 127, 252, 253)
_DENIED = ("AccessDenied", "ExpiredToken", "UnrecognizedClient")


class ProxyCommand:
    """A route by one command line, for one node. `environment` is added to that of this process."""

    def __init__(self, command: str, environment: Mapping[str, str]) -> None:
        self.silent_hint = f"does the proxy command connect? {inert(one_line(command, 300))}"
        self._command = command
        self._environment = dict(environment)

    def open(self, _target: Target, _timeout: float, limits: Timing) -> NodeSocket:
        shell = os.environ.get("SHELL") or "/bin/sh"
        return ProcessStream([shell, "-c", f"exec {self._command}"], self._environment, limits.dead)

    def explain(self, target: Target, stream: NodeSocket) -> ConnectError | None:
        assert isinstance(stream, ProcessStream)  # noqa: S101
        code, error, sent = stream.exit_code(), stream.last_error(), stream.greeting()
        if code is None and stream.speaks_ssh:
            return None
        if code is not None:
            what = f"was ended by signal {-code}" if code < 0 else f"exited with {code}"
        else:
            what = f"does not speak SSH: it sent {sent}" if sent else "is silent"
        denied = code is not None and any(word in error for word in _DENIED)
        return ConnectError(
            f"{target.label}: the proxy command {what}" + (f": {error}" if error else ""),
            hint=self.silent_hint,
            patience=0.0 if denied or code in _PERMANENT else inf,
            silent=code is None and not sent,
        )

    def openssh_options(self, _target: Target) -> list[str]:
        given = shlex.join(f"{name}={value}" for name, value in self._environment.items())
        return [f"ProxyCommand={f'env {given} {self._command}'.replace('%', '%%')}"]


class ProcessStream(NodeSocket):
    """A program whose stdin and stdout are one end of a pair of sockets; this is the other end."""

    def __init__(
        self,
        command: Sequence[str],
        environment: Mapping[str, str],
        dead: float,
        *,
        on_start: Callable[[], None] = lambda: None,
    ) -> None:
        """`on_start` is called once, when the first byte has come, or none will."""
        self._on_start = on_start
        self._has_started = threading.Lock()  # taken by whichever thread reports it
        ours, theirs = socket.socketpair()
        super().__init__(ours, dead)
        with theirs:
            self._process = subprocess.Popen(
                command,
                stdin=theirs.fileno(),
                stdout=theirs.fileno(),
                stderr=subprocess.PIPE,
                # With a lower SHLVL, bash reads ~/.bashrc where its stdin is a socket.
                env={**os.environ, "SHLVL": "1", **environment},
                # Ctrl-C is for cloudddp, which may still need the connection to stop a job.
                start_new_session=True,
            )
        self._is_stopped = False  # by us
        self._errors = bytearray()
        self._listener = threading.Thread(target=self._listen, daemon=True)
        self._listener.start()

    def recv(self, size: int) -> bytes:
        try:
            return super().recv(size)
        finally:
            if self.first or self.has_ended:
                self._report_start()

    def close(self) -> None:
        """End the program, in the background if it takes time."""
        if not self._closed:
            self._report_start()
            if not self.has_ended and self._process.poll() is None:
                self._is_stopped = True  # one that has ended by itself keeps its exit code
                self._signal(signal.SIGTERM)  # here: this process may end before a thread of it runs
            super().close()
            threading.Thread(target=self._end, daemon=True).start()

    def _end(self) -> None:
        try:
            self._process.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            self._signal(signal.SIGKILL)
            self._process.wait()

    def _signal(self, number: signal.Signals) -> None:
        """Send a signal to the program and what it has started."""
        if self._process.poll() is None:
            with contextlib.suppress(OSError):
                os.killpg(self._process.pid, number)

    def _report_start(self) -> None:
        if self._has_started.acquire(blocking=False):
            self._on_start()

    def exit_code(self) -> int | None:
        """Return the program's exit code if it has ended by itself: paramiko closes the stream of one that is
        silent or does not speak SSH."""
        try:
            code = self._process.wait(_EXIT_SECONDS if self.has_ended else _SILENT_SECONDS)
        except subprocess.TimeoutExpired:
            return None
        return None if self._is_stopped else code

    def last_error(self) -> str:
        """Return the last line that the program has written to stderr, safe to print."""
        lines = [line for line in self.errors().splitlines() if line.strip()]
        return one_line(lines[-1], 300) if lines else ""

    def errors(self) -> str:
        """Return the end of what the program has written to stderr, as it is."""
        if self.has_ended or self._closed:
            self._listener.join(_EXIT_SECONDS)
        return bytes(self._errors).decode(errors="replace")

    def _listen(self) -> None:
        assert self._process.stderr is not None  # noqa: S101
        with self._process.stderr as pipe:
            while data := os.read(pipe.fileno(), 1024):
                self._errors += data
                del self._errors[:-_KEPT]
