"""What is pulled of a checkpoint of several files: one whole folder, or none that passes for one."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from cloudddp.agent.protocol.checkpoints import Checkpoints, Part
from cloudddp.agent.protocol.results import NewFilesReply
from cloudddp.errors import CloudDDPError
from cloudddp.files import Folder
from cloudddp.job.results import checkpoints
from cloudddp.job.results.incoming import Move, merge_shards, move_incomplete
from cloudddp.job.results.new_files import lost_files
from cloudddp.job.results.safe_names import INCOMPLETE
from cloudddp.job.results.unpack import Notes
from cloudddp.operations.results import raise_incomplete

JOB = "20261128-100000-aaaa"
SHARD_0, SHARD_1, METADATA = "__0_0.distcp", "__1_0.distcp", ".metadata"


def put(root: Path, *names: str, text: str = "") -> Path:
    for name in names:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(f"{text or root.name}/{name}")
    return root


def files(root: Path) -> set[str]:
    return {path.relative_to(root).as_posix() for path in root.rglob("*") if path.is_file()}


def have(*nodes: tuple[str, ...], folder: str = "dcp", problem: str = "") -> Checkpoints:
    parts = {node: [Part(folder, names, JOB, problem=problem)] for node, names in enumerate(nodes)}
    return Checkpoints(parts)


def test_files_of_all_nodes_are_in_one_folder(tmp_path: Path) -> None:
    """Of torch.distributed.checkpoint, and of one file per rank beside the model."""
    for folder, names in {
        "runs/dcp": ((METADATA, SHARD_0), (SHARD_1,)),
        "out/checkpoint-40": (("model.safetensors", "rng_state_0.pth"), ("rng_state_1.pth",)),
    }.items():
        nodes = {
            node: put(tmp_path / f"node{node}", *(f"{folder}/{name}" for name in names[node]), "log")
            for node in range(2)
        }
        for _ in range(2):
            assert merge_shards(tmp_path, nodes, have(*names, folder=folder)) == [folder]
            put(nodes[1], f"{folder}/{names[1][0]}")  # the next pull has replaced it
        assert files(tmp_path / folder) == {*names[0], *names[1]}
        assert (tmp_path / folder / names[1][0]).read_text() == f"node1/{folder}/{names[1][0]}"


def test_they_join_those_of_rank_zero_as_run_pulls_them(tmp_path: Path) -> None:
    base = put(tmp_path / "job", f"dcp/{METADATA}", f"dcp/{SHARD_0}")
    nodes = {0: base, 1: put(base / "node1", f"dcp/{SHARD_1}")}
    merge_shards(base, nodes, have((METADATA, SHARD_0), (SHARD_1,)))
    assert files(base / "dcp") == {METADATA, SHARD_0, SHARD_1}


def test_others_stay_apart(tmp_path: Path) -> None:
    """Those of nodes that trained alone, that are not whole, and of which a pull has left something out."""
    alone = (METADATA, SHARD_0)
    nodes = {node: put(tmp_path / f"node{node}", *(f"dcp/{name}" for name in alone)) for node in range(2)}
    assert merge_shards(tmp_path, nodes, have(alone, alone)) == []
    assert merge_shards(tmp_path, nodes, have(alone, (SHARD_1,), problem="two saves")) == []
    assert merge_shards(tmp_path, nodes, have(alone, (SHARD_1,))) == []
    assert not (tmp_path / "dcp").exists()


def test_what_is_not_whole_goes_to_a_folder_of_its_own(tmp_path: Path) -> None:
    """A whole checkpoint that was pulled before stays, and so does what lies beside shards in the folder."""
    arrived = put(tmp_path / "in", f"dcp/{METADATA}", f"dcp/{SHARD_0}", "dcp/log", "ckpt/step_3/model.pt")
    put(tmp_path / "in", "ckpt/step_3/rng_state_0.pth", "new/__0_0.distcp", "new/__9_0.distcp")
    with Folder.at(arrived) as folder:
        hostile = dict.fromkeys(["../in", "/etc", "dcp/log", "dcp/../dcp", "none", ""])
        aside = {"dcp": None, "ckpt/step_3": None, "new": ["__9_0.distcp"], **hostile}
        assert move_incomplete(folder, aside) == ["dcp", "ckpt/step_3"]
    assert files(arrived) == {
        "dcp/log",
        f"{INCOMPLETE}/dcp/{METADATA}",
        f"{INCOMPLETE}/dcp/{SHARD_0}",
        f"{INCOMPLETE}/ckpt/step_3/model.pt",
        f"{INCOMPLETE}/ckpt/step_3/rng_state_0.pth",
        "new/__0_0.distcp",
        f"{INCOMPLETE}/new/__9_0.distcp",  # of an older save, beside a complete newer one
    }


def test_shards_of_an_older_save_do_not_stay_beside_newer_ones(tmp_path: Path) -> None:
    """As `pull` of one node writes over what `pull --all-nodes` has brought."""
    arrived = put(tmp_path / "in", f"dcp/{METADATA}", f"dcp/{SHARD_0}", text="new")
    target = put(tmp_path / "results", f"dcp/{SHARD_0}", f"dcp/{SHARD_1}", "dcp/log", text="old")
    complete = {"dcp": Part("dcp", (METADATA, SHARD_0), JOB)}
    with Folder.at(arrived) as source, Folder.at(target) as to:
        Move(Notes(), complete).contents(source, to)
    assert files(target) == {f"dcp/{METADATA}", f"dcp/{SHARD_0}", "dcp/log"}
    assert (target / "dcp" / SHARD_0).read_text().startswith("new")


def test_record_beside_results(tmp_path: Path) -> None:
    """A damaged one says nothing."""
    put(tmp_path / "results", "dcp/x")
    checkpoints.record(tmp_path / "results", have((METADATA,)), ())
    checkpoints.record(tmp_path / "results", have((METADATA,), folder="old", problem="x" * 495), ["old"])
    found = checkpoints.read(tmp_path / "results")
    assert {folder: (part.job, part.problem[:9]) for folder, part in found.items()} == {
        "dcp": (JOB, ""),
        "old": (JOB, "node 0: x"),
    }
    (tmp_path / "results" / checkpoints.LOGS / checkpoints.FILE).write_text('{"checkpoints": 1}')
    assert checkpoints.read(tmp_path / "results") == {}


REPLY = NewFilesReply(0, complete=True, rank_zero=False, running=(), jobs=())


@pytest.mark.parametrize(
    ("lacking", "expected"),
    [
        ({0: {1: ("a", "b")}}, {1: ["a", "b"]}),
        ({0: {1: ("a", "b")}, 2: {1: ("b",)}}, {1: ["b"]}),
        ({0: {1: ("a",)}, 2: {}}, {1: ["a"]}),  # node 2 has no report
        ({0: {1: ("a",), 2: ("c",)}, 1: {2: ("c",)}}, {2: ["c"]}),  # node 1 has replied
        ({0: {1: ()}}, {}),
        ({}, {}),
    ],
)
def test_what_only_nodes_without_a_reply_have(
    lacking: dict[int, dict[int, tuple[str, ...]]], expected: dict[int, list[str]]
) -> None:
    replies = {node: replace(REPLY, elsewhere=known) for node, known in lacking.items()}
    assert lost_files(replies) == expected


@pytest.mark.parametrize("all_nodes", [True, False])
def test_other_nodes_are_suggested_unless_they_were_asked(all_nodes: bool) -> None:
    with pytest.raises(CloudDDPError) as raised:
        raise_incomplete(["node 0: ckpt is not a complete checkpoint"], all_nodes=all_nodes)
    assert ("pull --all-nodes" in raised.value.hint) is not all_nodes
