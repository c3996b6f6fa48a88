"""A command on a pseudo-terminal of 80 columns that can be closed like a window."""

from __future__ import annotations

import contextlib
import os
import pty
import select
import signal
import termios
import time
from pathlib import Path
from typing import Any

from support.harness import TIMEOUT, until
from support.processes import zygote


class Terminal:
    """Runs a command on a pseudo-terminal. `seen` is what it has printed."""

    def __init__(
        self, cli: Any, *words: str, term: str = "xterm", program: tuple[str, ...] = ("-m", "cloudddp")
    ) -> None:
        self.ours, theirs = pty.openpty()
        termios.tcsetwinsize(theirs, (24, 80))
        self.process = zygote().start(
            (*program, *words),
            cli.cwd,
            {**cli.env, "TERM": term},
            session=True,
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
        )
        os.close(theirs)
        self.seen = b""

    def read_until(self, words: bytes) -> None:
        """Read until these words were printed, wherever the lines are wrapped."""
        ends = time.monotonic() + TIMEOUT
        while b" ".join(words.split()) not in b" ".join(self.seen.split()):
            ready, _, _ = select.select([self.ours], [], [], max(0.0, ends - time.monotonic()))
            assert ready, self.seen
            self.seen += os.read(self.ours, 1000)

    def wait_until_it_reads(self) -> None:
        """Wait until the process sleeps, after a question was seen. CPython's input() swallows the exception
        of a signal that comes in the microseconds after it has written a prompt."""
        status = Path(f"/proc/{self.process.pid}/stat")
        until(lambda: status.read_text().rpartition(")")[2].split()[0] == "S")

    def read_to_the_end(self) -> tuple[int, str]:
        """Return the exit code and everything that the command has printed."""
        with contextlib.suppress(OSError):  # EIO: the other end was closed
            while piece := os.read(self.ours, 1 << 16):
                self.seen += piece
        os.close(self.ours)
        return self.process.wait(TIMEOUT), self.seen.decode()

    def close(self) -> int:
        """Close the window. It is not a controlling terminal, so the kernel sends no SIGHUP: send it here."""
        os.close(self.ours)
        self.process.send_signal(signal.SIGHUP)
        return self.process.wait(TIMEOUT)
