"""The simulators of a test process, which must not outlive it, also when it is killed."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path


def running(base: Path) -> list[Path]:
    """Return the homes of the simulators below a folder whose servers run."""
    found = set()
    for process in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            words = process.read_text(errors="replace").split("\0")
            homes = [after for word, after in pairwise(words) if word == "--home"]
            found |= {Path(home) for home in homes if home.startswith(f"{base}/")}
    return sorted(found)


@contextlib.contextmanager
def stopped_after_this_process(base: Path) -> Iterator[None]:
    """Have a process wait for the end of this one inside the block, and stop its simulators then. xdist kills workers whose
    run was interrupted, and then no fixture is torn down."""
    folders = [str(Path(__file__).parents[1]), str(Path(__file__).parents[2])]
    code = f"import sys; sys.path[:0] = {folders}; sys.stdin.read(); from support import simulators; simulators.stop(sys.argv[1])"
    process = subprocess.Popen(
        [sys.executable, "-c", code, str(base)], stdin=subprocess.PIPE, start_new_session=True
    )
    try:
        yield
    finally:
        process.kill()
        process.communicate()


def stop(base: str) -> None:
    from cloudddp.sim import control

    for home in running(Path(base)):
        control.stop(home)
