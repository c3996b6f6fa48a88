"""Logs of ranks on hosts with their own disks."""

from __future__ import annotations

import json
import re

from support.harness import CommandLine, wait_for

# It writes 200 MB, at most 100 MB/s: what is written in half a second comes on top of the limit.
FLOOD = """
import os, time
print('began', flush=True)
for _ in range(200):
    os.write(1, (b'x' * 999 + b'\\n') * 1000)
    time.sleep(0.01)
"""
USED = "du -m ~/.cloudddp/jobs/*/ranks/0.log; stat -c 'size %s' ~/.cloudddp/jobs/*/ranks/0.log"


def test_middle_of_a_long_log_takes_no_space_on_the_disk(lab_cli: CommandLine) -> None:
    lab_cli.write("cloudddp.toml", '[job]\nlog_mb = 20\nrendezvous = "direct"\nnproc_per_node = 1\n')
    lab_cli.ok("up", "-n", "1", "-t", "g5.xlarge")
    lab_cli.write("flood.py", FLOOD)
    lab_cli.ok("launch", "-d", "flood.py")
    wait_for(lambda: json.loads(lab_cli.ok("jobs", "--json"))[0]["state"] == "succeeded", "the job has ended")
    used, size = (int(number) for number in re.findall(r"\] (?:size )?(\d+)", lab_cli.ok("exec", USED)))
    assert (used <= 20, size) == (True, 200_000_006)
    lines = lab_cli.ok("logs").splitlines()
    assert lines[0].endswith("] began")
    assert sum("dropped here" in line for line in lines) == 1
    assert 10_000 < len(lines) < 21_000
