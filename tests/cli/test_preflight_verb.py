"""`preflight` on three nodes, one of which is slow."""

from __future__ import annotations

import json
import sys
from typing import Any

import pytest
from support.jobs import direct, homes, nodes_of, written

# On node 2: each all-reduce waits, as on a slow network. The thread waits for the import of torch.
SLOW = """
import sys, threading, time
def slow():
    while not hasattr(sys.modules.get("torch.distributed"), "all_reduce"):
        time.sleep(0.01)
    module = sys.modules["torch.distributed"]
    real = module.all_reduce
    module.all_reduce = lambda *args, **options: (time.sleep(0.2), real(*args, **options))[1]
threading.Thread(target=slow, daemon=True).start()
"""
ON_HOSTS = """
[job]
container = "pytorch/pytorch:2.9.1-cuda12.8-cudnn9-runtime"
python = "/opt/conda/bin/python"
[setup]
run = ["touch installed"]
[[shared]]
path = "shared"
"""


def left(cli: Any) -> list[str]:
    """Return what jobs have left on the nodes: records, files in the project, and processes."""
    found = [str(path) for home in homes(cli) for path in home.glob(".cloudddp/jobs/*")]
    found += [str(path) for home in homes(cli) for path in home.glob("project/*")]
    return found + [str(node["processes"]) for node in nodes_of(cli) if len(node["processes"]) > 1]


def test_checks_without_a_job(cli: Any) -> None:
    direct(cli, nodes=2)
    done = cli("preflight")
    assert (done.returncode, done.stdout) == (
        0,
        "2 nodes: connected to each other, alike, without defects\n",
    )
    assert left(cli) == []
    assert cli.ok("jobs", "--json").strip() == "[]"
    cli.write("cloudddp.toml", ON_HOSTS)
    assert json.loads(cli.ok("preflight", "--json"))["measured"] == []
    assert left(cli) == []
    (cli.cwd / "cloudddp.toml").unlink()

    cli.write("wait.py", "import time\nprint('began', flush=True)\ntime.sleep(600)\n")
    cli.ok("launch", "-d", "wait.py")
    written(cli, "began")
    assert "is still running on node 0" in cli.fails(1, "preflight")
    assert len(json.loads(cli.ok("jobs", "--json"))) == 1
    cli.ok("cancel")


def test_defective_node_fails_the_check(cli: Any) -> None:
    direct(cli, nodes=2)
    for number, home in enumerate(homes(cli)):
        program = home / "python"  # reports another version of Python on one node
        program.write_text(
            f'#!/bin/sh\n[ $2 = -c ] && [ {number} = 1 ] && exit 1\nexec {sys.executable} "$@"\n'
        )
        program.chmod(0o755)
    err = cli.fails(1, "preflight", CLOUDDDP_PYTHON="~/python")
    assert "the nodes are not fit for a job: Python differs" in err
    assert left(cli) == []
    for home in homes(cli):
        (home / "python").unlink()


@pytest.mark.torch
def test_slow_node_is_named(cli: Any) -> None:
    pytest.importorskip("torch")
    direct(cli, nodes=3)
    for number in range(3):
        folder = "slow" if number == 2 else "usual"
        text = f'#!/bin/sh\nPYTHONPATH=$HOME/{folder} exec {sys.executable} "$@"'
        cli.ok("exec", "--node", str(number), "--", f"printf %s '{text}' > ~/python; chmod +x ~/python")
    for home in homes(cli):
        (home / "slow").mkdir()
        (home / "slow" / "sitecustomize.py").write_text(SLOW)
    done = cli.exits(1, "preflight", "--bandwidth", "--json", CLOUDDDP_PYTHON="~/python")
    assert "node 2 is slow: its fastest pair has" in done.stderr
    found = json.loads(done.stdout)
    assert found["slow_nodes"] == [2]
    assert [one["nodes"] for one in found["measured"]] == [[0, 1], [0, 2], [1, 2], [0, 1, 2]]
    assert (found["nodes"], found["instance_type"]) == (3, "g5.12xlarge")
    assert left(cli) == []
    assert "no job has been launched" in cli("pull").stderr
