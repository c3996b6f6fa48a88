"""Jobs of tests: nodes for them, scripts, their lines by rank, and their processes on the nodes."""

from __future__ import annotations

import contextlib
import json
import re
from pathlib import Path
from typing import Any

SLEEPERS = """
import os, sys, time
rank = int(os.environ["RANK"])
print(f"rank {rank} began", flush=True)
while not os.path.exists("go"):
    time.sleep(0.05)
if rank == 3:
    print("about to fail", flush=True)
    sys.exit(7)
time.sleep(600)
"""


def direct(cli: Any, *, nodes: int = 1, ranks: int | str = 1) -> None:
    """Have nodes, and let jobs start their ranks without torchrun."""
    cli.env.update(CLOUDDDP_RENDEZVOUS="direct", CLOUDDDP_NPROC_PER_NODE=str(ranks), CLOUDDDP_STOP_GRACE="1")
    cli.nodes(nodes)


def lines_by_rank(text: str) -> dict[int, list[str]]:
    """Return the lines of each rank from merged logs."""
    logs: dict[int, list[str]] = {}
    for line in text.splitlines():
        if found := re.match(r"\[rank (\d+) \| node (\d+)\] (.*)", line):
            logs.setdefault(int(found.group(1)), []).append(found.group(3))
    return logs


def newest(cli: Any) -> dict[str, Any]:
    """Return the newest job as `jobs --json` lists it, which exits with 1 where a node is lost or boots."""
    return dict(json.loads(cli("jobs", "--json").stdout)[-1])


def processes(cli: Any) -> int:
    """Return how many processes run on the cluster's nodes, as the simulator counts them."""
    ids = {
        n["instance_id"]
        for c in json.loads(cli.ok("ls", "--json"))
        if c["cluster"] == cli.cluster
        for n in c["nodes"]
    }
    shown = json.loads(cli.ok("sim", "status", "--json"))["nodes"]
    return sum(len(node["processes"]) for node in shown if node["instance_id"] in ids)


def still_running(cli: Any, word: str) -> list[str]:
    """Return the command lines on the cluster's nodes that contain a word, of ranks or of setup commands."""
    ids = {node["instance_id"] for node in json.loads(cli.ok("status", "--json"))[0]["nodes"]}
    nodes = [n for n in json.loads(cli.ok("sim", "status", "--json"))["nodes"] if n["instance_id"] in ids]
    lines = []
    for pid in (pid for node in nodes for pid in node["processes"]):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            lines.append(Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode())
    return [line for line in lines if word in line]
