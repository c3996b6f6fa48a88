"""A computer that slept: a client that was stopped for longer than its time limits connects again before it
judges."""

from __future__ import annotations

import signal
import time
from pathlib import Path
from typing import Any

from support.jobs import direct, lines_by_rank, written

# Of the time limits: a connection counts as broken after 4 s, and a node as lost after 4 s without a new one,
# which on a busy computer may take a second.
SCALE = 0.2
ASLEEP = 40 * SCALE
TICKS = """
import os, pathlib, sys, time
ended = pathlib.Path(sys.argv[1])  # of rank 1, which may start later and is killed when rank 0 fails
for tick in range(24):
    print("tick", tick, flush=True)
    time.sleep(0.1)
if os.environ["RANK"] == "1":
    ended.touch()
    sys.exit()
while not ended.exists():
    time.sleep(0.05)
sys.exit(3)
"""


def test_job_that_ended_meanwhile_is_read_to_its_end(cli: Any, tmp_path: Path) -> None:
    direct(cli, nodes=2)
    cli.write("ticks.py", TICKS)
    process = cli.start("launch", "ticks.py", str(tmp_path / "ended"), CLOUDDDP_TIME_SCALE=str(SCALE))
    written(cli, "tick 3", 1)
    process.send_signal(signal.SIGSTOP)
    time.sleep(ASLEEP)
    process.send_signal(signal.SIGCONT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 3, err
    shown = lines_by_rank(out)
    assert [len(shown.get(rank, [])) for rank in range(2)] == [24, 24], err
    # A new connection may take longer than the 3 s after which a node counts as quiet.
    assert "--replace" not in err
