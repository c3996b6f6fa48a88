"""The processes of a test process, which must not outlive it, also when it is killed."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from itertools import pairwise
from pathlib import Path

# An environment variable, by which descendants are found that have no other path of the folder.
FOLDER = "TEST_PROCESS_FOLDER"
# Looks at all processes, a second apart, that must find none: one of them may be starting another.
QUIET = 3
TIMEOUT = 300.0


def running(base: Path) -> list[Path]:
    """Return the homes of the simulators below a folder whose servers run."""
    found = set()
    for process in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            words = process.read_text(errors="replace").split("\0")
            homes = [after for word, after in pairwise(words) if word == "--home"]
            found |= {Path(home) for home in homes if home.startswith(f"{base}/")}
    return sorted(found)


def mentioning(base: Path) -> list[int]:
    """Return the other processes whose arguments or environment name a folder or something in it."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            texts = (process / "cmdline").read_bytes() + (process / "environ").read_bytes()
            if any(f"{base}{end}".encode() in texts for end in "/\0"):
                found.append(int(process.name))
    return [pid for pid in found if pid != os.getpid()]


def stop_after_this_process(base: Path) -> subprocess.Popen[bytes]:
    """Return a process that waits for the end of this one, and then ends all that this one has started.

    xdist kills workers whose run was interrupted, and then no fixture is torn down, or not to its end.
    """
    folders = [str(Path(__file__).parents[1]), str(Path(__file__).parents[2])]
    code = (
        f"import sys; sys.path[:0] = {folders}; sys.stdin.read()\n"
        "from support import simulators; simulators.stop(sys.argv[1])"
    )
    os.environ[FOLDER] = str(base)
    argv = [sys.executable, "-c", code, str(base)]
    return subprocess.Popen(argv, stdin=subprocess.PIPE, start_new_session=True)


def stop(base: str) -> None:
    """Stop the simulators of a test process that has ended, then kill its other processes."""
    from cloudddp.simulator import control

    deadline, quiet = time.monotonic() + TIMEOUT, 0
    while quiet < QUIET and time.monotonic() < deadline:
        for home in running(Path(base)):
            control.stop(home)
        left = mentioning(Path(base))
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        quiet = 0 if left else quiet + 1
        time.sleep(1)
