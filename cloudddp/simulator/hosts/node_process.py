"""Starts a node's boot module, exchanges lines with it while the node boots, and ends the node."""

from __future__ import annotations

import contextlib
import errno
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from cloudddp.simulator.guest.log import printable
from cloudddp.simulator.linux import processes

_BOOT_SECONDS = 60.0  # for one step of the boot; only a computer that swaps takes so long
_OOM_SCORE = "500"  # of 1000, so that the kernel kills nodes before the user's own programs
_REPEAT_SECONDS = 2.0
_POWER_OFF = signal.SIGRTMIN + 4  # to systemd as pid 1 (systemd(1)): start poweroff.target
_HALT_SECONDS = 10.0  # for a killed node to be gone, before another way is tried
_PACKAGE_PARENT = Path(__file__).parents[3]  # the folder that has the package `cloudddp`


class NodeProcess:
    """A node that has booted: the process of the boot module, and the node's pid 1."""

    def __init__(self, process: subprocess.Popen[bytes], init: processes.Handle) -> None:
        self.process = process
        self.init = init

    @property
    def pid(self) -> int:
        return self.process.pid

    def wait(self) -> int:
        """Return the exit status of the boot module (on_node.EXIT_STATUS)."""
        status = self.process.wait()
        self.init.kill()  # if the boot module was killed: a machine's pid 1 would live on
        self.init.close()
        return status

    def power_off(self, seconds: float) -> bool:
        """Ask systemd as pid 1 to power off, unless `seconds` is 0. Return whether the node has ended within
        them, or was not asked."""
        if not seconds:
            return True
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            self.init.send(_POWER_OFF)  # again: at the beginning of its boot systemd does not receive it
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(_REPEAT_SECONDS)
                return True
        return False

    def kill(self) -> None:
        """Kill pid 1, with which the kernel ends the node; if that takes too long, the boot module. Raises
        TimeoutError."""
        self.init.kill()
        try:
            self.process.wait(_HALT_SECONDS)
        except subprocess.TimeoutExpired:
            self.process.kill()
            try:
                self.process.wait(_HALT_SECONDS)
            except subprocess.TimeoutExpired:
                raise TimeoutError(f"process {self.init.pid} does not end") from None


def boot(
    module: str,
    description: str,
    *,
    home: Path,
    instance_id: str,
    log: Path,
    attach: Callable[[int], None],
) -> NodeProcess:
    """Boot a node by a module that gets its description. `attach` connects the network namespace of a pid.

    The module answers `namespaces ready` and, after `network ready`, `pid PID PARENT` of the node's pid 1.
    Its exit status says how the node has ended (on_node.EXIT_STATUS). Raises OSError with the last line of
    `log`.
    """
    process = _start(module, home, instance_id, log)
    try:
        Path(f"/proc/{process.pid}/oom_score_adj").write_text(_OOM_SCORE)
        _send(process, description)
        _expect(process, "namespaces ready")
        attach(process.pid)
        _send(process, "network ready")
        pid, parent = map(int, _expect(process, "pid ").split())
        init = processes.Handle(pid, parent=parent)
    except BaseException as error:
        if isinstance(error, ProcessLookupError):  # pid 1 has failed, and its error is being logged
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_HALT_SECONDS)
        process.kill()
        process.wait()
        if isinstance(error, OSError):
            raise OSError(error.errno or errno.EIO, f"{error}: {last_line(log)}") from None
        raise
    return NodeProcess(process, init)


def last_line(log: Path) -> str:
    """Return the last line that a boot module has logged, which may quote what the node has written."""
    try:
        lines = log.read_text(errors="replace").strip().splitlines()
    except OSError:
        lines = []
    return printable(lines[-1]) if lines else "no reason was logged"


def _start(module: str, home: Path, instance_id: str, log: Path) -> subprocess.Popen[bytes]:
    with log.open("ab") as stderr:
        return subprocess.Popen(
            [sys.executable, "-S", "-P", "-m", module],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=stderr,
            env={
                "PATH": "/usr/sbin:/usr/bin:/sbin:/bin",
                "PYTHONPATH": str(_PACKAGE_PARENT),
                processes.HOME_MARK: str(home),
                processes.NODE_MARK: instance_id,
            },
            cwd="/",
            start_new_session=True,
        )


def _send(process: subprocess.Popen[bytes], line: str) -> None:
    assert process.stdin is not None  # noqa: S101
    process.stdin.write(line.encode() + b"\n")
    process.stdin.flush()


def _expect(process: subprocess.Popen[bytes], prefix: str) -> str:
    """Read a line that starts with `prefix`, and return the rest of it. Raises OSError for anything else."""
    assert process.stdout is not None  # noqa: S101
    if not select.select([process.stdout], [], [], _BOOT_SECONDS)[0]:
        raise OSError(errno.ETIMEDOUT, "the node does not boot")
    line = process.stdout.readline().decode().rstrip("\n")
    if not line.startswith(prefix):
        raise OSError(errno.EIO, "the node cannot boot")
    return line.removeprefix(prefix)
