"""`sync --results`: which files of a job's results, and of those that it continued, go to the nodes."""

from __future__ import annotations

import shutil
from pathlib import Path

import msgspec
import pytest

from cloudddp.agent.protocol.checkpoints import Checkpoints, Part
from cloudddp.config.spec import Config
from cloudddp.errors import UsageError
from cloudddp.job import launch_record
from cloudddp.job.job_request import NewJob, Script
from cloudddp.job.results import checkpoints
from cloudddp.job.results.restore import chain, check_complete, newest
from cloudddp.local_state import ClusterFolder

A, B, C, OTHER = (f"2026112{day}-100000-aaaa" for day in (6, 7, 8, 5))


@pytest.mark.parametrize(
    ("first", "second", "sent"),
    [
        ("ck.pt log", "log", "A/ck.pt B/log"),
        ("ck.pt node1/ck.pt", "ck.pt", "B/ck.pt"),
        ("ck.pt", "node1/ck.pt", "A/ck.pt B/node1/ck.pt"),  # in this order
        ("d/.metadata d/__0_0.distcp d/__1_0.distcp", "d/__0_0.distcp", "B/d/__0_0.distcp"),
        ("d/__0_0.distcp d/notes", "node1/d/__0_0.distcp", "A/d/notes B/node1/d/__0_0.distcp"),
        ("step-4/rng_state_0.pth step-4/x", "step-4/x", "A/step-4/rng_state_0.pth B/step-4/x"),
        ("step-4/model.pt step-4/x", "step-4/rng_state_0.pth", "B/step-4/rng_state_0.pth"),
        ("a/adapter_rank4.pt", "a/adapter_rank8.pt", "A/a/adapter_rank4.pt B/a/adapter_rank8.pt"),
    ],
)
def test_newest_version_of_every_file_is_sent(first: str, second: str, sent: str, tmp_path: Path) -> None:
    for job, names in (("A", first), ("B", second)):
        for name in (*names.split(), "cloudddp-logs/x"):
            (tmp_path / job / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / job / name).touch()
    found = []
    for root, manifest, nodes, _ in newest([tmp_path / "A", tmp_path / "B"], [0, 1]):
        assert nodes == ([1] if root.name == "node1" else [0] if root.name == "node0" else [0, 1])
        found += sorted((root / name).relative_to(tmp_path).as_posix() for name in manifest)
    assert found == sent.split()


def record(folder: Path, **problems: str) -> Path:
    parts = [Part(name, ("__0_0.distcp",), folder.name, problem=why) for name, why in problems.items()]
    checkpoints.record(folder, Checkpoints({0: parts}), list(problems))
    return folder


def test_checkpoint_that_the_last_job_left_incomplete_is_refused(tmp_path: Path) -> None:
    folders = [tmp_path / name for name in (A, B, C)]
    for folder in folders:
        folder.mkdir()
    record(folders[0], last="", step4="")
    record(folders[1], last="half", step8="half")
    with pytest.raises(UsageError, match=r"last is not a complete checkpoint: .*half; no other one"):
        check_complete(folders)
    record(folders[1], last="")
    assert [why.partition(" ")[0] for why in check_complete(folders)] == ["step8"]


def test_chain_has_every_job_before_and_names_what_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CLOUDDDP_HOME", str(tmp_path / "home"))
    base, (old, new) = tmp_path / "results", (ClusterFolder(f"c-012345678{k}") for k in (8, 9))
    nothing: dict[str, tuple[()]] = {"files": (), "variables": (), "env_files": (), "nodes": ()}
    other = "\udcff"  # no UTF-8
    for cluster, root, job in ((old, other, OTHER), (old, "", A), (new, "", B), (new, "", C)):
        before = launch_record.continued_on(cluster, tmp_path / root)
        made = launch_record.of_launch(
            NewJob(Script("train.py"), id=job), Config(), root=tmp_path / root, **nothing
        )
        launch_record.keep(cluster, msgspec.structs.replace(made, continues=before))
        launch_record.note_put_back(new, tmp_path, [A])
        launch_record.note_put_back(old, tmp_path / other, [OTHER])
    for job in (A, B, "plots"):  # the last is a folder of the user
        (base / job).mkdir(parents=True)
        (base / job / "model.pt").touch()
    assert chain(tmp_path, None) == ([base / A, base / B], [C])
    assert chain(tmp_path, A) == ([base / A], [C])
    shutil.rmtree(base / A)
    with pytest.raises(
        UsageError, match=f"job {B} continued {A}, of which .*/results has nothing"
    ) as refused:
        chain(tmp_path, None)
    assert f"mkdir -p {base / A}" in str(refused.value.hint)
