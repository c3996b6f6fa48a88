"""A control group for each machine node, below which its systemd has its own.

systemd-nspawn puts a machine into the group `payload` below the one that it runs in. Two machines in the same
group would kill each other's processes. Standard library only.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from cloudddp.sim.linux import kernel

_ROOT = Path("/sys/fs/cgroup")
_PARENT = "cloudddp-sim"


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
    """Move this process back and remove the group with those below it; they are empty when a machine has
    ended."""
    with contextlib.suppress(OSError):
        (_ROOT / "cgroup.procs").write_text(str(os.getpid()))
    for path in (*sorted(folder.rglob("*/"), reverse=True), folder):
        with contextlib.suppress(OSError):
            path.rmdir()
