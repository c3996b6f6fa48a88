"""How a rank's wrapper ends it: signals are forwarded, and where the agent was killed, the wrapper does the agent's part.

The kernel signals the wrapper when its parent ends (PR_SET_PDEATHSIG), but that parent may be a launcher that lives on
although the agent is dead, and a signal alone does not end a rank that ignores it. So the wrapper looks once a second
whether guard or supervisor run: where neither does, it asks the rank to end, and kills it after the job's grace.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from pathlib import Path
from typing import Any, Optional

from agent import phases, processes

FORWARDED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
HANDLED = (*FORWARDED, signal.SIGALRM)  # which no other thread than the main one may get
INTERVAL = 1.0  # seconds between two looks
PAUSE = 0.05  # seconds between two looks at what a rank has left behind
LONGEST_GRACE = 910.0  # seconds: longer than any setting of stop_grace or save_minutes


class RankEnd:
    """Ends the rank `child` of the job in `folder`. `forwarded` holds the signals that it was sent."""

    def __init__(self, child: subprocess.Popen[bytes], folder: Path, grace: float) -> None:
        self.forwarded: set[int] = set()
        self._child = child
        self._folder = folder
        self._grace = grace
        self._asked_at: Optional[float] = None
        self._gone_at: Optional[float] = None  # when the agent was first seen to be gone
        self._family: dict[int, str] = {}  # pid -> born, of the rank's processes
        for number in FORWARDED:
            signal.signal(number, self._forward)
        signal.signal(signal.SIGALRM, self._look)
        signal.setitimer(signal.ITIMER_REAL, INTERVAL, INTERVAL)

    def _forward(self, received: int, _: Any = None) -> None:
        """Forward each signal once."""
        if received in self.forwarded:
            return
        self.forwarded.add(received)
        self._asked_at = self._asked_at or time.monotonic()
        self._remember()
        self._child.send_signal(received)

    def _look(self, *_: Any) -> None:
        now = time.monotonic()
        if phases.agent_runs(self._folder):
            if self._asked_at is not None and now - self._asked_at > LONGEST_GRACE:
                self._child.kill()
            return
        self._gone_at = self._gone_at or now
        self._forward(signal.SIGTERM)
        if now - self._gone_at > self._grace:
            self._remember()
            self._send(signal.SIGKILL)

    def finish(self) -> None:
        """The rank has ended. Where the agent is gone, end what it has left behind: nobody else would."""
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        if phases.agent_runs(self._folder):
            return
        deadline = (self._gone_at or time.monotonic()) + self._grace
        self._send(signal.SIGTERM)
        while self._runs() and time.monotonic() < deadline:
            time.sleep(PAUSE)
        self._send(signal.SIGKILL)

    def _remember(self) -> None:
        """Keep which processes the rank has: once it has ended they cannot be found by descent."""
        for pid in processes.tree(self._child.pid):
            self._family.setdefault(pid, processes.born(pid))

    def _runs(self) -> bool:
        return any(processes.runs(pid, born) for pid, born in self._family.items())

    def _send(self, number: signal.Signals) -> None:
        for pid, born in self._family.items():
            if processes.runs(pid, born):
                with contextlib.suppress(OSError):
                    os.kill(pid, number)
