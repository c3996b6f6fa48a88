"""The node's SSH server, which can be stopped, started and killed without affecting the rest of the node.

A process of its own starts it: where an ordinary user made the lab, sshd is in a user namespace below that of pid 1,
which pid 1 itself may not enter once it is confined.
"""

from __future__ import annotations

import os
import select
import signal
import threading
from collections.abc import Callable
from pathlib import Path

UNITS = ("ssh.service", "sshd.service")
_PROGRAM = ("/usr/sbin/sshd", "-D", "-e")
_END_SECONDS = 3.0
_LONGEST_WORD = 2000


class Sshd:
    """Create it while the process has one thread. `prepare` runs first in the process that starts sshd; `redirect`
    runs in sshd's own process, before exec, and opens its log.
    """

    def __init__(self, *, prepare: Callable[[], None], redirect: Callable[[], None]) -> None:
        self._lock = threading.Lock()
        self._process = -1  # a pidfd: its pid may be another's after its end
        orders, self._orders = os.pipe()
        self._answers, answers = os.pipe()
        if os.fork() == 0:
            _run_starter(orders, answers, prepare, redirect)
        os.close(orders)
        os.close(answers)

    @property
    def descriptors(self) -> tuple[int, ...]:
        """What must stay open."""
        return (self._orders, self._answers, self._process)

    @property
    def running(self) -> bool:
        return self._process >= 0 and not select.select([self._process], [], [], 0)[0]

    def await_ready(self) -> None:
        """Return when the other process has prepared itself. Raises RuntimeError saying why it cannot."""
        if (said := os.read(self._answers, _LONGEST_WORD)) != b"ready":
            raise RuntimeError(said.decode(errors="replace"))

    def start(self) -> str:
        """Start it, unless it runs; returns '' or what is wrong."""
        with self._lock:
            if self.running:
                return ""
            try:
                os.write(self._orders, b"\n")
                pid = os.read(self._answers, _LONGEST_WORD)
                process = os.pidfd_open(int(pid))
            except (OSError, ValueError):
                return "Job for ssh.service failed."
            if self._process >= 0:
                os.close(self._process)
            self._process = process
        return ""

    def stop(self) -> str:
        """End it; sessions go on, as with Debian's KillMode=process."""
        with self._lock:
            for number in (signal.SIGTERM, signal.SIGKILL):
                if self.running:
                    self._send(number)
                    select.select([self._process], [], [], _END_SECONDS)
        return ""

    def reload(self) -> str:
        with self._lock:
            if not self.running:
                return "ssh.service is not active, cannot reload."
            self._send(signal.SIGHUP)
        return ""

    def _send(self, number: int) -> None:
        try:
            signal.pidfd_send_signal(self._process, number)
        except OSError:
            pass  # it has ended meanwhile


def _run_starter(
    orders: int, answers: int, prepare: Callable[[], None], redirect: Callable[[], None]
) -> None:
    """Be the process that starts sshd, once for each byte in `orders`; never returns."""
    try:
        Path("/proc/self/comm").write_text("ssh-starter")
        prepare()
        os.write(answers, b"ready")
        while os.read(orders, 1):
            between = os.fork()  # so that sshd becomes a child of pid 1, which reaps it
            if between == 0:
                if os.fork() == 0:
                    _exec_sshd(answers, redirect)
                os._exit(0)
            os.waitpid(between, 0)
    except Exception as error:
        os.write(answers, str(error).encode(errors="replace")[:_LONGEST_WORD] or b"?")
    finally:
        os._exit(1)


def _exec_sshd(answers: int, redirect: Callable[[], None]) -> None:
    try:
        os.setsid()
        os.environ["PATH"] = "/usr/sbin:/usr/bin:/sbin:/bin"
        redirect()
        os.write(answers, str(os.getpid()).encode())
        os.closerange(3, 256)
        os.execv(_PROGRAM[0], _PROGRAM)  # noqa: S606
    finally:
        os._exit(1)
