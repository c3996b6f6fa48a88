"""The node's OpenSSH server, which can be stopped, started and killed without affecting the rest of the node.

A separate process starts it: in the lab of an ordinary user, sshd runs in a user namespace below that of pid
1, which the seccomp filter of pid 1 does not let it create.
"""

from __future__ import annotations

import os
import select
import signal
import threading
from collections.abc import Callable
from pathlib import Path

UNITS = ("ssh.service", "sshd.service")
_COMMAND = ("/usr/sbin/sshd", "-D", "-e")
_STOP_SECONDS = 3.0
_MAX_MESSAGE = 2000  # bytes of an error


class Sshd:
    """Create it while the process has one thread. `prepare` runs first in the process that starts sshd;
    `redirect` runs in sshd's own process before exec, and opens its log.
    """

    def __init__(self, *, prepare: Callable[[], None], redirect: Callable[[], None]) -> None:
        self._lock = threading.Lock()
        self._process = -1  # a pidfd: the pid may be reused
        requests, self._requests = os.pipe()
        self._replies, replies = os.pipe()
        if os.fork() == 0:
            _run_starter(requests, replies, prepare, redirect)
        os.close(requests)
        os.close(replies)

    @property
    def descriptors(self) -> tuple[int, ...]:
        """Descriptors that must stay open."""
        return (self._requests, self._replies, self._process)

    @property
    def running(self) -> bool:
        return self._process >= 0 and not select.select([self._process], [], [], 0)[0]

    def await_ready(self) -> None:
        """Return when the starter process has run `prepare`. Raises RuntimeError with its error."""
        if (reply := os.read(self._replies, _MAX_MESSAGE)) != b"ready":
            raise RuntimeError(reply.decode(errors="replace"))

    def start(self) -> str:
        """Start sshd unless it is running. Return an error message or ''."""
        with self._lock:
            if self.running:
                return ""
            try:
                os.write(self._requests, b"\n")
                pid = os.read(self._replies, _MAX_MESSAGE)
                process = os.pidfd_open(int(pid))
            except (OSError, ValueError):
                return "Job for ssh.service failed."
            if self._process >= 0:
                os.close(self._process)
            self._process = process
        return ""

    def stop(self) -> str:
        """Stop sshd. Sessions continue, as with Debian's KillMode=process."""
        with self._lock:
            for number in (signal.SIGTERM, signal.SIGKILL):
                if self.running:
                    self._send(number)
                    select.select([self._process], [], [], _STOP_SECONDS)
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
    requests: int, replies: int, prepare: Callable[[], None], redirect: Callable[[], None]
) -> None:
    """Start sshd once for each byte in `requests`. Never returns."""
    try:
        Path("/proc/self/comm").write_text("ssh-starter")
        prepare()
        os.write(replies, b"ready")
        while os.read(requests, 1):
            started, own = os.pipe()  # closed by exec: as with Type=notify, what comes next sees sshd itself
            intermediate = os.fork()  # so that sshd becomes a child of pid 1, which reaps it
            if intermediate == 0:
                if os.fork() == 0:
                    _exec_sshd(own, redirect)
                os._exit(0)
            os.close(own)
            os.waitpid(intermediate, 0)
            pid = b""
            while data := os.read(started, _MAX_MESSAGE):
                pid += data
            os.close(started)
            os.write(replies, pid or b"?")
    except Exception as error:
        os.write(replies, str(error).encode(errors="replace")[:_MAX_MESSAGE] or b"?")
    finally:
        os._exit(1)


def _exec_sshd(started: int, redirect: Callable[[], None]) -> None:
    """Write the pid to `started`, which exec closes."""
    try:
        os.setsid()
        os.environ["PATH"] = "/usr/sbin:/usr/bin:/sbin:/bin"
        redirect()
        os.write(started, str(os.getpid()).encode())
        os.closerange(3, started)
        os.closerange(started + 1, 256)
        os.execv(_COMMAND[0], _COMMAND)  # noqa: S606
    finally:
        os._exit(1)
