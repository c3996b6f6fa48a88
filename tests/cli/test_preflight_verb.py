"""`preflight`: the checks of a launch without a job, and the bandwidth between nodes."""

from __future__ import annotations

import json
import sys
from typing import Any

import pytest
from support.jobs import direct, homes, nodes_of, written

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
    cli.write("cloudddp.toml", ON_HOSTS)
    assert json.loads(cli.ok("preflight", "--json"))["measured"] == []
    assert left(cli) == []
    (cli.cwd / "cloudddp.toml").unlink()

    cli.write("wait.py", "import time\nprint('began', flush=True)\ntime.sleep(600)\n")
    cli.ok("launch", "-d", "wait.py")
    written(cli, "began")
    assert "is still running on node 0" in cli.fails(1, "preflight")
    assert len([path for path in left(cli) if "/jobs/" in path]) == 2


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
def test_bandwidth_is_measured(cli: Any) -> None:
    """tests/unit/test_bandwidth.py has which node is slow."""
    pytest.importorskip("torch")
    direct(cli, nodes=2)
    found = json.loads(cli.ok("preflight", "--bandwidth", "--json"))
    assert found["slow_nodes"] == []
    assert [one["nodes"] for one in found["measured"]] == [[0, 1]]
    assert (found["nodes"], found["instance_type"]) == (2, "g5.12xlarge")
    assert left(cli) == []
    assert "no job has been launched" in cli("pull").stderr
