"""A command on a pseudo-terminal that can be closed like a window."""

from __future__ import annotations

import os
import pty
import signal
from typing import Any

from support.harness import TIMEOUT
from support.processes import zygote


class Terminal:
    """Runs a command on a pseudo-terminal. `seen` is what it has printed."""

    def __init__(self, cli: Any, *words: str, term: str = "xterm") -> None:
        self.ours, theirs = pty.openpty()
        self.process = zygote().start(
            ("-m", "cloudddp", *words),
            cli.cwd,
            {**cli.env, "TERM": term},
            session=True,
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
        )
        os.close(theirs)
        self.seen = b""

    def read_until(self, word: bytes) -> None:
        while word not in self.seen:
            self.seen += os.read(self.ours, 1000)

    def close(self) -> int:
        """Close the window. It is not a controlling terminal, so the kernel sends no SIGHUP: send it here."""
        os.close(self.ours)
        self.process.send_signal(signal.SIGHUP)
        return self.process.wait(TIMEOUT)
