"""`launch` sends py-spy to the nodes that lack it: once from this computer, and from node to node."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from support.localsync import LocalCluster

from cloudddp.agent.protocol.stacks import TOOLS
from cloudddp.agent.protocol.start import StartReply
from cloudddp.job import py_spy

pytestmark = pytest.mark.skipif(not Path(sys.executable).with_name("py-spy").exists(), reason="needs py-spy")


def send(cluster: LocalCluster, started: dict[int, StartReply]) -> list[str]:
    lines: list[str] = []
    py_spy.Sending(cluster.runner, cluster.cluster, started, lines.append).wait()
    return [str(line) for line in lines]


def test_py_spy_goes_to_nodes_of_the_same_kind_that_lack_it(tmp_path: Path) -> None:
    tool = py_spy.local()
    assert tool is not None
    cluster = LocalCluster(tmp_path, 5)
    lines = send(
        cluster,
        {
            0: StartReply(1, platform=tool.platform),
            1: StartReply(1, platform=tool.platform, tool=tool.digest),
            2: StartReply(1, platform=tool.platform, tool="0" * 64),
            3: StartReply(1, platform="linux-riscv64"),
            4: StartReply(1, platform=tool.platform),
        },
    )
    assert lines == ["sending py-spy to 3 nodes, to read the stacks of a job that stalls"]
    programs = [node.home / TOOLS / "py-spy" for node in cluster.nodes]
    assert [path.exists() for path in programs] == [True, False, True, False, True]
    assert programs[4].read_bytes() == tool.path.read_bytes()
    assert subprocess.run([programs[4], "--version"], capture_output=True, check=True).stdout.startswith(
        b"py-spy"
    )
    assert cluster.sent < 1.02 * tool.path.stat().st_size


def test_node_that_cannot_take_it_is_a_warning(tmp_path: Path) -> None:
    tool = py_spy.local()
    assert tool is not None
    cluster = LocalCluster(tmp_path, 2)
    (cluster.nodes[1].home / TOOLS).write_text("a file where the folder should be")
    lines = send(cluster, {node: StartReply(1, platform=tool.platform) for node in range(2)})
    assert lines[-1].startswith("warning: could not send py-spy; stacks may be less exact: node 1: ")
    assert (cluster.nodes[0].home / TOOLS / "py-spy").exists()
