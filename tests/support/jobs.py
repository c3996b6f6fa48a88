"""Jobs of tests: nodes for them, scripts, their lines by rank, and their processes on the nodes."""

from __future__ import annotations

import contextlib
import json
import re
from pathlib import Path
from typing import Any

from support.harness import wait_for

from cloudddp.simulator import control

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


WRITE = """
import os
def write(name, text='x'):
    os.makedirs(os.path.dirname(name) or '.', exist_ok=True)
    with open(name, 'w') as file: file.write(text)
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
    done = cli("jobs", "--json")
    assert done.stdout, done.stderr
    return dict(json.loads(done.stdout)[-1])


def nodes_of(cli: Any) -> list[dict[str, Any]]:
    """Return the records of the cluster's nodes from the simulator's server: no process is started."""
    simulator = control.find(Path(cli.env["CLOUDDDP_HOME"]))
    assert simulator is not None
    return [node for node in control.nodes(simulator) if node["cluster"] == cli.cluster]


def homes(cli: Any) -> list[Path]:
    """Return the home folders of the cluster's nodes, as this computer sees them."""
    return [Path(node["home"]) for node in nodes_of(cli) if node["home"]]


def written(cli: Any, text: str, count: int = 2, *, job: str = "*") -> None:
    """Wait until the ranks of a job, by default the newest, have written a text this often.

    This reads the logs on the disks of the nodes, because each `cloudddp logs` starts a Python on every node.
    """

    def are_written() -> bool:
        folders = [path for home in homes(cli) for path in home.glob(f".cloudddp/jobs/{job}")]
        newest = max((path.name for path in folders), default="")
        logs = [log for path in folders if path.name == newest for log in path.glob("ranks/*.log")]
        return sum(log.read_text(errors="replace").count(text) for log in logs) >= count

    wait_for(are_written, f"the ranks have written {text!r} {count} times")


def processes(cli: Any) -> int:
    """Return how many processes run on the cluster's nodes, as the simulator counts them."""
    return sum(len(node["processes"]) for node in nodes_of(cli))


def still_running(cli: Any, word: str) -> list[str]:
    """Return the command lines on the cluster's nodes that contain a word, of ranks or of setup commands."""
    lines = []
    for pid in (pid for node in nodes_of(cli) for pid in node["processes"]):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            lines.append(Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode())
    return [line for line in lines if word in line]
