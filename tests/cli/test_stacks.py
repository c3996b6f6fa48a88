"""`stacks`, and jobs that stall, on two nodes."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from support.jobs import direct, written

pytestmark = pytest.mark.skipif(not Path(sys.executable).with_name("py-spy").exists(), reason="needs py-spy")

HANG = """
import os, time
def load_batch():
    time.sleep(600)
def wait_for_others(pipe):
    os.read(pipe, 1)
print('began', flush=True)
load_batch() if os.environ["RANK"] == "1" else wait_for_others(os.pipe()[0])
"""
SENTENCE = "rank 0 is in wait_for_others (hang.py:6); rank 1 is in load_batch (hang.py:4)"


def test_stacks_of_a_running_job(cli: Any) -> None:
    direct(cli, nodes=2)
    cli.write("hang.py", HANG)
    cli.ok("launch", "-d", "hang.py")
    written(cli, "began")
    shown = cli.ok("stacks")
    assert shown.splitlines()[0] == SENTENCE
    assert "rank 1 on node 1:" in shown
    found = json.loads(cli.ok("stacks", "--json"))
    assert found["summary"] == SENTENCE
    assert [(one["rank"], one["node"], one["function"]) for one in found["ranks"]] == [
        (0, 0, "wait_for_others"),
        (1, 1, "load_batch"),
    ]
    cli.ok("cancel")
    assert "(cancelled): no rank runs, and none has left a dump" in cli.fails(1, "stacks")
