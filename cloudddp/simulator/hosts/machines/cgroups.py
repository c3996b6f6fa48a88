"""A control group for each machine node, below which its systemd has its own.

systemd-nspawn puts a machine into the group `payload` below the one that it runs in. Two machines in the same
group would kill each other's processes. Standard library only.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterable
from pathlib import Path

from cloudddp.simulator.linux import kernel

_ROOT = Path("/sys/fs/cgroup")
_PARENT = "cloudddp-sim"
_KILL_SECONDS = 10.0  # for killed processes to be gone


def enter(name: str) -> Path:
    """Move this process to a new group of the unified hierarchy, mounted if needed. Return its folder.

    Call it in a mount namespace of its own. Raises OSError.
    """
    if not (_ROOT / "cgroup.procs").exists():  # legacy or hybrid hierarchies, as in many containers
        kernel.mount("cgroup2", _ROOT, "cgroup2", kernel.MS_NOSUID | kernel.MS_NODEV | kernel.MS_NOEXEC)
    folder = _ROOT / _PARENT / name
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "cgroup.procs").write_text(str(os.getpid()))
    return folder


def leave(folder: Path) -> None:
    """Move this process back, and remove the group with those below it."""
    with contextlib.suppress(OSError):
        (_ROOT / "cgroup.procs").write_text(str(os.getpid()))
    _remove(folder)


def clean_up(names: Iterable[str]) -> None:
    """End what runs in groups whose boot process was killed, and remove them. No error where the computer
    does not show the unified hierarchy."""
    mounts = (line.split() for line in Path("/proc/self/mounts").read_text().splitlines())
    mounted = next((Path(words[1]) for words in mounts if words[2] == "cgroup2"), None)
    for folder in (mounted / _PARENT / name for name in names) if mounted else ():
        with contextlib.suppress(OSError):  # it is gone, or the kernel is older than cgroup.kill (5.14)
            (folder / "cgroup.kill").write_text("1")
            deadline = time.monotonic() + _KILL_SECONDS
            while "populated 1" in (folder / "cgroup.events").read_text() and time.monotonic() < deadline:
                time.sleep(0.01)
        _remove(folder)


def _remove(folder: Path) -> None:
    """Remove a group and those below it; those that still have processes stay."""
    for path in (*sorted(folder.rglob("*/"), reverse=True), folder):
        with contextlib.suppress(OSError):
            path.rmdir()
