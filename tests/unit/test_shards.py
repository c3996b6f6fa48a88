"""The shards of a distributed checkpoint that several nodes hold become one folder."""

from __future__ import annotations

from pathlib import Path

from cloudddp.job.results.incoming import merge_shards


def put(root: Path, *names: str) -> Path:
    for name in names:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(f"{root.name}/{name}")
    return root


def files(root: Path) -> set[str]:
    return {path.relative_to(root).as_posix() for path in root.rglob("*") if path.is_file()}


def test_shards_of_all_nodes_are_in_one_folder(tmp_path: Path) -> None:
    nodes = {
        0: put(tmp_path / "node0", "runs/dcp/.metadata", "runs/dcp/__0_0.distcp", "log"),
        1: put(tmp_path / "node1", "runs/dcp/__1_0.distcp", "log"),
    }
    for _ in range(2):
        assert merge_shards(tmp_path, nodes) == ["runs/dcp"]
        put(nodes[1], "runs/dcp/__1_0.distcp")  # the next pull has replaced it
    merged = {"runs/dcp/.metadata", "runs/dcp/__0_0.distcp", "runs/dcp/__1_0.distcp"}
    assert {name for name in files(tmp_path) if not name.startswith("node")} == merged
    assert (tmp_path / "runs/dcp/__1_0.distcp").read_text() == "node1/runs/dcp/__1_0.distcp"


def test_shards_join_those_of_rank_zero_as_run_pulls_them(tmp_path: Path) -> None:
    base = put(tmp_path / "job", "dcp/.metadata", "dcp/__0_0.distcp")
    merge_shards(base, {0: base, 1: put(base / "node1", "dcp/__1_0.distcp")})
    assert {name for name in files(base) if name.startswith("dcp/")} == {
        "dcp/.metadata",
        "dcp/__0_0.distcp",
        "dcp/__1_0.distcp",
    }


def test_checkpoints_of_nodes_that_trained_alone_stay_apart(tmp_path: Path) -> None:
    nodes = {k: put(tmp_path / f"node{k}", "dcp/.metadata", "dcp/__0_0.distcp") for k in range(2)}
    assert merge_shards(tmp_path, nodes) == []
    assert not (tmp_path / "dcp").exists()
