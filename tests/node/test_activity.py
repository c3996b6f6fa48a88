"""What counts as activity of a rank."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

from agent.node import store
from agent.watch.activity import Activity
from cloudddp.agent.protocol.jobs import RankRecord

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the agent needs /proc")

# Uses as many ticks of CPU time as it is asked to.
WORKS = """
import os, sys
def ticks():
    return round(sum(os.times()[:2]) * os.sysconf('SC_CLK_TCK'))
for line in sys.stdin:
    until = ticks() + int(line)
    while ticks() < until: pass
    print('done', flush=True)
"""


@pytest.mark.parametrize(("ticks", "is_active"), [(1, False), (40, True)])
def test_a_single_tick_of_cpu_time_is_no_activity(tmp_path: Path, ticks: int, is_active: bool) -> None:
    """The kernel counts whole ticks of 10 ms: one in a short interval says nothing about a rank that only
    waits."""
    (tmp_path / "ranks").mkdir()
    activity = Activity(tmp_path, limit=3.0)
    interval = activity._interval
    with subprocess.Popen(
        [sys.executable, "-c", WORKS], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
    ) as child:
        assert child.stdin is not None
        assert child.stdout is not None
        child.stdin.write("1\n")
        assert child.stdout.readline() == "done\n"
        store.write(tmp_path / "ranks" / "0.json", RankRecord(0, None, None, pid=child.pid))
        time.sleep(interval)
        assert activity.idle() > interval  # the first look at this process
        looked = time.monotonic()
        child.stdin.write(f"{ticks}\n")
        assert child.stdout.readline() == "done\n"
        time.sleep(max(interval - (time.monotonic() - looked), 0))
        assert (activity.idle() < interval) is is_active
        child.stdin.close()
