"""Where the results of each node go: no file of one node takes the place of another node's."""

from __future__ import annotations

from pathlib import Path

import pytest

from cloudddp.agent.protocol.results import JobFiles, NewFiles, NewFilesReply, NewPath
from cloudddp.operations.results import folders_of

NOTHING = NewFiles(0, 0, ())


def reply(*names: str, zero: bool = False) -> NewFilesReply:
    new = NewFiles(len(names), 1, tuple(NewPath(name, 1, 1) for name in names))
    return NewFilesReply(0, True, zero, (), (JobFiles("20261127-101500-5d1e", new, NOTHING),))


@pytest.mark.parametrize(
    ("replies", "folders"),
    [
        ({0: reply("out/", zero=True)}, {0: "."}),
        ({0: reply("out/", zero=True), 1: reply("out/")}, {0: ".", 1: "node1"}),
        ({0: reply(), 1: reply("out/", zero=True)}, {1: "."}),
        ({0: reply(zero=True), 1: reply("out/")}, {1: "node1"}),
        # Rank 0 has written a folder of the name that node 1's files get.
        ({0: reply("node1/", zero=True), 1: reply("out/")}, {0: "node0", 1: "node1"}),
        ({0: reply("node1/out/a.pt", zero=True), 1: reply("out/")}, {0: "node0", 1: "node1"}),
        ({0: reply("node2/", zero=True), 1: reply("out/")}, {0: ".", 1: "node1"}),
        ({0: reply("node1/", zero=True), 1: reply()}, {0: "."}),
    ],
)
def test_folder_of_each_node(replies: dict[int, NewFilesReply], folders: dict[int, str]) -> None:
    to = Path("results/job")
    assert folders_of(replies, to) == {node: to / name for node, name in folders.items()}
