"""A computer that slept: a client that was stopped for longer than its time limits connects again before it
judges."""

from __future__ import annotations

import signal
import time
from typing import Any

import pytest
from support.jobs import direct, lines_by_rank, written

SCALE = 0.05  # of the time limits: a connection counts as broken after 1.5 s
ASLEEP = 60 * SCALE
TICKS = """
import os, sys, time
for tick in range(24):
    print("tick", tick, flush=True)
    time.sleep(0.1)
sys.exit(int(sys.argv[1]) if os.environ["RANK"] == "0" else 0)
"""


@pytest.mark.parametrize(("nodes", "code"), [(1, 0), (2, 0), (2, 3)])
def test_job_that_ended_meanwhile_is_read_to_its_end(cli: Any, nodes: int, code: int) -> None:
    direct(cli, nodes=nodes)
    cli.write("ticks.py", TICKS)
    process = cli.start("launch", "ticks.py", str(code), CLOUDDDP_TIME_SCALE=str(SCALE))
    written(cli, "tick 3", 1)
    process.send_signal(signal.SIGSTOP)
    time.sleep(ASLEEP)
    process.send_signal(signal.SIGCONT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == code, err
    shown = lines_by_rank(out)
    assert [len(shown.get(rank, [])) for rank in range(nodes)] == [24] * nodes, err
    # A new connection may take longer than the 0.75 s after which a node counts as quiet.
    assert "--replace" not in err
