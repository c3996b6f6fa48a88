"""A rank that writes 256 MB without a line break: no process of the agent takes memory for it."""

from __future__ import annotations

import contextlib
import subprocess
from pathlib import Path
from typing import Any

from support.agentnode import Node, until
from support.gangs import parent_of

from cloudddp.agent.protocol.codec import encode
from cloudddp.agent.protocol.jobs import MAX_LINE, MAX_LINES

SIZE = 1 << 28
MEMORY = 64 << 20  # bytes that a process of the agent may take
WRITE = """
import os, time
piece = b'x' * (1 << 20)
for _ in range(1 << 8):
    os.write(1, piece)
open("written", "w").close()
while not os.path.exists("go"): time.sleep(0.02)
raise SystemExit(3)
"""


def peak(pid: int) -> int:
    """Return the most memory that a process has taken, in bytes."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) << 10


def assert_followed(node: Node, **selection: Any) -> None:
    """Follow the log of the rank within bounded memory."""
    process = node.popen("follow", stderr=subprocess.DEVNULL)
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(encode(node.following(wait=False, **selection)) + b"\n")
    process.stdin.close()
    taken, received = [0], 0
    while data := process.stdout.read(1 << 16):  # what it has not written yet keeps it from ending
        received += len(data)
        with contextlib.suppress(OSError, StopIteration):
            taken.append(peak(process.pid))
    assert process.wait() == 0
    assert received > 0
    assert 0 < max(taken) < MEMORY


def test_huge_lines_take_no_memory_of_the_agent(node: Node) -> None:
    """64 MiB are kept, and the verdict has the last lines."""
    node.start(WRITE, log_mb=64)
    until((node.project / "written").exists)
    log = node.folder() / "ranks" / "0.log"
    assert log.stat().st_size == SIZE
    until(lambda: log.stat().st_blocks * 512 <= 72 << 20)
    for selection in ({}, {"tail": 1_000_000}, {"since": 3600.0}):
        assert_followed(node, **selection)
    wrapper = parent_of(node.rank_pid())
    supervisor = parent_of(wrapper)
    assert max(map(peak, (wrapper, supervisor, parent_of(supervisor)))) < MEMORY
    (node.project / "go").touch()
    verdict = node.ended().verdict
    assert verdict is not None
    assert verdict.exit_code == 3
    assert sum(map(len, verdict.last_lines)) <= MAX_LINE * MAX_LINES
