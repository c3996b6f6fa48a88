"""To which nodes `launch` sends py-spy."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cloudddp.agent.protocol.start import StartReply
from cloudddp.errors import NodeError
from cloudddp.job import tools
from cloudddp.ssh.fleet import Outcome
from cloudddp.ssh.running import Result

pytestmark = pytest.mark.skipif(not Path(sys.executable).with_name("py-spy").exists(), reason="needs py-spy")


class Nodes:
    """A runner that notes what each node gets; node 9 does not answer."""

    def __init__(self, *nodes: int) -> None:
        self.nodes = nodes
        self.sent: list[int] = []

    def run(self, node: int, command: str, **_: Any) -> Result:
        assert " tool" in command
        if node == 9:
            raise NodeError("node 9: not connected")
        self.sent.append(node)
        return Result(0, b"{}", b"")

    def each(self, work: Callable[[int], Any], **_: Any) -> Outcome[Any]:
        outcome: Outcome[Any] = Outcome()
        for node in self.nodes:
            try:
                outcome.values[node] = work(node)
            except NodeError as error:
                outcome.errors[node] = error
        return outcome


def test_py_spy_goes_to_nodes_of_the_same_kind_that_lack_it() -> None:
    tool = tools.local()
    assert tool is not None
    lines: list[str] = []
    runner: Any = Nodes(0, 1, 2, 3, 9)
    started = {
        0: StartReply(1, platform=tool.platform),
        1: StartReply(1, platform=tool.platform, tool=tool.digest),
        2: StartReply(1, platform=tool.platform, tool="0" * 64),
        3: StartReply(1, platform="linux-riscv64"),
        9: StartReply(1, platform=tool.platform),
    }
    tools.send_where_missing(runner, started, lines.append)
    assert runner.sent == [0, 2]
    assert lines[0] == "sending py-spy to 3 nodes, for the stacks of a job that stalls"
    assert lines[1] == "warning: py-spy was not sent, so that stacks may be less exact: node 9: not connected"


def test_nothing_is_sent_where_no_node_lacks_it() -> None:
    tool = tools.local()
    assert tool is not None
    lines: list[str] = []
    runner: Any = Nodes(0, 1)
    known = StartReply(1, platform=tool.platform, tool=tool.digest)
    tools.send_where_missing(runner, {0: known, 1: StartReply(1, platform="linux-riscv64")}, lines.append)
    assert (runner.sent, lines) == ([], [])
