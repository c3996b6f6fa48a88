"""What a pull leaves out: it is not recorded as pulled, and links are followed on the node, within limits."""

from __future__ import annotations

import itertools
import os
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from support import file_modes
from support.agentnode import Node
from support.packed import Sent, sent

from agent.files import scan, tree
from agent.files.selection import NewFile, choose
from agent.files.tree import Found
from agent.node import store
from cloudddp.agent.protocol.file_steps import LeftOut, PackRequest
from cloudddp.agent.protocol.phases import JobPhase
from cloudddp.agent.protocol.results import MAX_LEFT, LeftFile, NewFilesRequest, PulledRequest

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the agent needs /proc")

WRITE = (
    "import os\n"
    "def write(name, text='x'):\n"
    "    os.makedirs(os.path.dirname(name) or '.', exist_ok=True)\n"
    "    with open(name, 'w') as file: file.write(text)\n"
    "far = os.path.abspath('../far')\n"
    "def link(target, name):\n"
    "    os.makedirs(os.path.dirname(name) or '.', exist_ok=True); os.symlink(target, name)\n"
)


def ran(node: Node, code: str) -> None:
    node.start(WRITE + code)
    assert node.follow("job-1").state.phase is JobPhase.SUCCEEDED


def packed(node: Node, *paths: str, everything: bool = False) -> Sent:
    return sent(node, PackRequest("p", paths or ("runs",), all=everything))


def new(node: Node, *outputs: str) -> dict[str, int]:
    reply = node.call(NewFilesRequest("p", outputs or ("runs",), ()))
    found = [path for one in reply.jobs for path in (*one.outputs.paths, *one.others.paths)]
    return {path.name: path.files for path in found}


def test_link_to_files_on_the_node_is_followed(node: Node) -> None:
    """Inside and outside the project, to a folder and a file, with links in it; a link without results is
    named, and one inside the outputs is kept."""
    ran(
        node,
        "write(far + '/a'); write(far + '2/b'); write('elsewhere/c'); write('runs/d')\n"
        "link('a', far + '/last'); link(far + '/a', far + '/absolute'); link('../far2', far + '/more')\n"
        "link('../../far', 'runs/far'); link('../../far/a', 'runs/a'); link('../elsewhere', 'runs/in')\n"
        "link('d', 'runs/last')\n",
    )
    below = {"a": "x", "last": "-> a", "absolute": "-> a", "more/b": "x"}
    expected = {f"runs/far/{name}": found for name, found in below.items()}
    expected |= {"runs/a": "x", "runs/in/c": "x", "runs/d": "x", "runs/last": "-> d"}
    assert new(node)["runs"] == len(expected)
    found = packed(node)
    assert found.files == expected
    assert found.lost == []


def test_outputs_that_are_a_link_are_followed(node: Node) -> None:
    ran(node, "write(far + '/a'); link(far, 'runs')")
    assert packed(node).files == {"runs/a": "x"}


def test_link_without_results_is_named_and_not_counted(node: Node) -> None:
    targets = (
        "/proc",
        "/sys/kernel",
        "/dev",
        "/dev/null",
        "../..",
        ".",
        "..",
        "../.cloudddp",
        "l8",
        "/nowhere",
    )
    ran(node, f"write('runs/a')\nfor k, target in enumerate({targets!r}): link(target, f'runs/l{{k}}')")
    found = packed(node)
    assert set(found.files) <= {"runs/a", *(f"runs/l{k}" for k in range(10))}
    assert found.files["runs/a"] == "x"
    assert found.lost == []


def test_link_to_a_data_set_brings_only_what_the_job_wrote_there(node: Node) -> None:
    far = node.home / "far"
    for name in ("old/1", "old/2", "3"):
        (far / name).parent.mkdir(parents=True, exist_ok=True)
        (far / name).write_text("old")
    ran(node, "link(far, 'runs/data'); write(far + '/new/log')")
    found = packed(node)
    assert found.files == {"runs/data/new/log": "x"}
    assert found.out == [
        LeftOut("runs/data", f"a link to {far}: 3 files below it are older than the first job", counts=False)
    ]
    assert len(packed(node, "runs/data", everything=True).files) == 4


def test_folder_with_more_old_files_than_are_checked_counts_as_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A result may be among those that were not checked."""
    (tmp_path / "project").mkdir()
    (tmp_path / "far").mkdir()
    (tmp_path / "project" / "data").symlink_to(tmp_path / "far")
    for name in range(4):
        (tmp_path / "far" / str(name)).touch()
    out: list[tuple[str, bool]] = []

    def left_out(name: str, reason: str, *, counts: bool = True) -> None:
        out.append((name, counts))

    for most in (4, 2):
        monkeypatch.setattr(tree, "MAX_OLD", most)
        assert len([*tree.Tree(str(tmp_path / "project"), ["."], left_out, since=1 << 62).below(".")]) == 1
    assert out == [("data", False), ("data", True)]


def test_search_among_old_files_has_a_time_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "ROOT", tmp_path / "state")
    (tmp_path / "project").mkdir()
    (tmp_path / "far").mkdir()
    for name in range(5):
        (tmp_path / "far" / str(name)).touch()
    (tmp_path / "project" / "data").symlink_to(tmp_path / "far")
    clock = itertools.count()
    monkeypatch.setattr(scan, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    found = scan.Scan(tmp_path / "project", (), (), 1 << 62, seconds=4)
    assert [*found] == []
    assert found.late


def test_cycle_of_links_ends(node: Node) -> None:
    ran(
        node,
        "write(far + '/a/x'); link(far + '/b', far + '/a/b'); link('../a', far + '/b/a'); link(far, 'runs')",
    )
    assert packed(node).files == {"runs/a/x": "x", "runs/b/a": "-> ../a", "runs/a/b": "-> ../b"}
    for k in range(1, 13):
        (node.home / f"deep{k}").mkdir()
        (node.home / f"deep{k}" / "next").symlink_to(f"../deep{k + 1}")
    (node.project / "chain").symlink_to(node.home / "deep1")
    assert packed(node, "chain").lost == ["chain" + "/next" * 8]


def test_what_was_left_out_is_not_pulled(node: Node) -> None:
    ran(node, "write('runs/a'); write('runs/b/1'); write('runs/b/2')")
    at = node.call(NewFilesRequest("p", ("runs",), ())).time_ns + 10**9
    node.call(PulledRequest("p", ("runs",), at, (LeftFile("runs/b", "no space"), LeftFile("runs/gone", "?"))))
    reply = node.call(NewFilesRequest("p", ("runs",), ()))
    assert [(one.outputs.files, one.others.files) for one in reply.jobs] == [(2, 0)]
    assert reply.left == (LeftFile("runs/b", "no space"),)
    node.call(PulledRequest("p", ("runs/b/1",), at))
    assert new(node) == {"runs": 2}, "the folder was left out"
    node.call(PulledRequest("p", ("runs/b",), at))
    assert new(node) == {}
    many = tuple(LeftFile(f"runs/{k}", "?") for k in range(MAX_LEFT))
    node.call(PulledRequest("p", ("runs",), at, many))
    node.call(PulledRequest("p", ("other",), at, (LeftFile("other/x", "?"),)))
    assert new(node) == {"runs": 3}, "more than are remembered: nothing counts as pulled"


def test_unreadable_folder_is_reported(node: Node, tmp_path: Path) -> None:
    ran(node, "write('out/a'); os.chmod('out', 0)")
    node.python = file_modes.python_with_modes_applied(tmp_path)
    reply = node.call(NewFilesRequest("p", ("runs",), ()))
    (node.project / "out").chmod(0o755)
    assert reply.left == (LeftFile("out", "Permission denied"),)


def test_more_left_out_files_than_are_named_are_announced(node: Node) -> None:
    ran(node, "os.makedirs('runs'); [os.mkfifo(f'runs/{k}') for k in range(1200)]")
    found = packed(node)
    assert len(found.out) == 1001
    assert found.lost == [""]


# -- which new files a pull takes where there are more than its limit ----------------------------------------


MIB = 1 << 20


@pytest.mark.parametrize(
    ("files", "left"),
    [
        # path: MiB; later ones are newer
        ({"a.pt": 2, "b.pt": 2, "c.pt": 2}, {"a.pt"}),
        ({"a.pt": 2, "b.npy": 2, "c.npy": 2}, {"b.npy"}),
        ({"a.pt": 6, "b.pt": 2, "log": 0}, {"a.pt"}),
        ({"dcp/1/.metadata": 0, "dcp/1/__0_0": 3, "dcp/2/.metadata": 0, "dcp/2/__0_0": 3}, {"dcp/1"}),
        ({"hf/checkpoint-5/a": 2, "hf/checkpoint-5/b/c": 2, "hf/checkpoint-10/a": 2}, {"hf/checkpoint-5"}),
        ({"data/set": 3, "runs/a.npy": 2}, {"data/set"}),
        ({"data/set": 3, "a.pt": 1}, set()),
        ({"pulled.pt": 9, "a.pt": 4}, set()),
    ],
)
def test_newest_checkpoints_come_first_and_data_folders_last(files: dict[str, int], left: set[str]) -> None:
    new = [
        NewFile(
            0, "", Found(name, name, os.stat_result([0] * 6 + [size * MIB, 0, at, 0])), name == "pulled.pt"
        )
        for at, (name, size) in enumerate(files.items(), 1)
    ]
    taken, rest = choose(new, 4 * MIB)
    assert set(rest) == left
    found = [*taken, *(one for below in rest.values() for one in below)]
    assert sorted(one.found.name for one in found) == sorted(files)
