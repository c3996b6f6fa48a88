"""The results of jobs: the folder of each node, whole checkpoints, and what `sync --results` puts back."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from support.streams import FINISH, StreamRunner, file, runs, stream

from cloudddp.agent.protocol.checkpoints import Checkpoints, Part
from cloudddp.agent.protocol.results import NewFilesReply
from cloudddp.config.spec import Config
from cloudddp.errors import CloudDDPError, UsageError
from cloudddp.job import launch_record
from cloudddp.job.job_request import NewJob, Script
from cloudddp.job.results import checkpoints
from cloudddp.job.results.checkpoints import merge_shards
from cloudddp.job.results.new_files import lost_files
from cloudddp.job.results.placing import Pulled
from cloudddp.job.results.pull import pull
from cloudddp.job.results.restore import chain, check_complete, newest
from cloudddp.job.results.safe_names import INCOMPLETE
from cloudddp.local_state import ClusterFolder
from cloudddp.operations.results import PullRequest, folders_of, raise_incomplete

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
        ("ck.pt node7/ck.pt", "", "A/ck.pt A/node7/ck.pt"),  # no log of a node 7: a folder of rank 0's
        ("ck.pt node7/ck.pt cloudddp-logs/node7/x", "", "A/ck.pt"),
    ],
)
def test_newest_version_of_every_file_is_sent(first: str, second: str, sent: str, tmp_path: Path) -> None:
    for job, names in (("A", first), ("B", second)):
        put(tmp_path / job, *names.split(), "cloudddp-logs/x")
    found = []
    for root, manifest, nodes, _ in newest([tmp_path / "A", tmp_path / "B"], [0, 1]):
        if not nodes:
            assert (root.name, [*manifest]) == ("node7", ["ck.pt"])
            continue
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
        launch_record.keep(cluster, replace(made, continues=before))
        launch_record.note_put_back(new, tmp_path, [A])
        launch_record.note_put_back(old, tmp_path / other, [OTHER])
    for job in (A, B, "plots"):  # the last is a folder of the user
        put(base / job, "model.pt")
    assert chain(tmp_path, None) == ([base / A, base / B], [C])
    assert chain(tmp_path, A) == ([base / A], [C])
    shutil.rmtree(base / A)
    with pytest.raises(
        UsageError, match=f"job {B} continued {A}, of which .*/results has nothing"
    ) as refused:
        chain(tmp_path, None)
    assert f"mkdir -p {base / A}" in str(refused.value.hint)


# -- checkpoints of several files ----------------------------------------------------------------------------


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
        paths = [[*(f"{folder}/{name}" for name in names[node]), "log"] for node in range(2)]
        nodes = {node: put(tmp_path / f"node{node}", *paths[node]) for node in range(2)}
        for _ in range(2):
            assert merge_shards(tmp_path, nodes, have(*names, folder=folder)) == [folder]
            put(nodes[1], f"{folder}/{names[1][0]}")  # the next pull has replaced it
        assert files(tmp_path / folder) == {*names[0], *names[1]}
        assert (tmp_path / folder / names[1][0]).read_text() == f"node1/{folder}/{names[1][0]}"


def test_others_stay_apart(tmp_path: Path) -> None:
    """Those of nodes that trained alone, that are not whole, and of which a pull has left something out."""
    alone = (METADATA, SHARD_0)
    nodes = {node: put(tmp_path / f"node{node}", *(f"dcp/{name}" for name in alone)) for node in range(2)}
    assert merge_shards(tmp_path, nodes, have(alone, alone)) == []
    assert merge_shards(tmp_path, nodes, have(alone, (SHARD_1,), problem="two saves")) == []
    assert merge_shards(tmp_path, nodes, have(alone, (SHARD_1,))) == []
    assert not (tmp_path / "dcp").exists()


def pulled(to: Path, known: Checkpoints, *names: str) -> Pulled:
    """Pull these files from node 0."""
    runner = StreamRunner(stream(*map(file, names), FINISH))
    return pull(runner, runs("."), node=0, to=to, known=known)


def test_what_is_not_whole_goes_to_a_folder_of_its_own(tmp_path: Path) -> None:
    """A whole checkpoint that was pulled before stays, and so does what lies beside shards in the folder."""
    put(tmp_path, f"dcp/{SHARD_1}")
    parts = [Part(name, (SHARD_0,), JOB, problem="half") for name in ("dcp", "ckpt/step_3", "none")]
    parts.append(Part("new", ("__0_0.distcp",), JOB, older=("__9_0.distcp",)))
    names = ("dcp/log", f"dcp/{METADATA}", f"dcp/{SHARD_0}", "new/__0_0.distcp", "new/__9_0.distcp")
    steps = ("ckpt/step_3/model.pt", "ckpt/step_3/deep/rng_state_0.pth")
    found = pulled(tmp_path, Checkpoints({0: parts}), *names, *steps)
    assert set(found.incomplete) == {"dcp", "ckpt/step_3"}
    whole = {"dcp/log", f"dcp/{SHARD_1}", "new/__0_0.distcp"}
    assert files(tmp_path) == whole | {
        f"{INCOMPLETE}/{name}" for name in (*names, *steps) if name not in whole
    }


def test_shards_of_an_older_save_do_not_stay_beside_newer_ones(tmp_path: Path) -> None:
    """As `pull` of one node writes over what `pull --all-nodes` has brought."""
    put(tmp_path, f"dcp/{SHARD_0}", f"dcp/{SHARD_1}", "dcp/log", text="old")
    pulled(tmp_path, have((METADATA, SHARD_0)), f"dcp/{METADATA}", f"dcp/{SHARD_0}")
    assert files(tmp_path) == {f"dcp/{METADATA}", f"dcp/{SHARD_0}", "dcp/log"}
    assert (tmp_path / "dcp" / SHARD_0).read_text() == "from the node\n"


def test_record_beside_results(tmp_path: Path) -> None:
    """A damaged one says nothing."""
    put(tmp_path / "results", "dcp/x")
    checkpoints.record(tmp_path / "results", have((METADATA,)), ())
    checkpoints.record(tmp_path / "results", have((METADATA,), folder="old", problem="x" * 495), ["old"])
    found = checkpoints.read(tmp_path / "results")
    shown = {folder: (part.job, part.problem[:9]) for folder, part in found.items()}
    assert shown == {"dcp": (JOB, ""), "old": (JOB, "node 0: x")}
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


@pytest.mark.parametrize(
    ("nodes", "zero", "written", "folders"),
    [
        ([0], 0, "out/", {0: "."}),
        ([0, 1], 0, "out/", {0: ".", 1: "node1"}),
        ([1], 1, "out/", {1: "."}),
        ([1], None, "", {1: "node1"}),
        # Rank 0 has written a folder of the name that a node's files get, also of one that is not asked for.
        ([0, 1], 0, "node1/", {0: "node0", 1: "node1"}),
        ([0, 1], 0, "node1/out/a.pt", {0: "node0", 1: "node1"}),
        ([0, 1], 0, "node2/", {0: "node0", 1: "node1"}),
        ([0], 0, "node1/", {0: "node0"}),
        ([0], 0, "Node1/", {0: "node0"}),
        ([0], 0, "nodes/node1", {0: "."}),
    ],
)
def test_folder_of_each_node(
    nodes: list[int], zero: int | None, written: str, folders: dict[int, str]
) -> None:
    to = Path("results/job")
    expected = {node: to / name for node, name in folders.items()}
    assert folders_of(nodes, zero, [written], to) == expected


def test_folder_of_rank_0_stays_once_everything_was_pulled(tmp_path: Path) -> None:
    first = folders_of([0, 1], 0, ["node1/a"], tmp_path)
    first[0].mkdir()
    assert folders_of([0], 0, [], tmp_path) == {0: first[0]}


@pytest.mark.parametrize(
    ("request_", "folders"),
    [
        (PullRequest((), None, all_nodes=False, to=None), {1: "."}),
        (PullRequest((), 2, all_nodes=False, to=None), {2: "node2"}),  # not over the files of rank 0's node
        (PullRequest((), None, all_nodes=True, to=None), {1: ".", 2: "node2"}),
        (PullRequest(("node2/x",), None, all_nodes=True, to=None), {1: "node1", 2: "node2"}),
        (PullRequest(("x",), 2, all_nodes=False, to=Path("here")), {2: "here"}),
        (PullRequest((), None, all_nodes=True, to=Path("here")), {1: "here", 2: "here/node2"}),
    ],
)
def test_folder_of_each_node_in_a_pull(request_: PullRequest, folders: dict[int, str]) -> None:
    base = request_.to or Path("project/results/JOB")
    to = Path() if request_.to else base
    assert request_.targets([1, 2], 1, ["out"], base) == {node: to / name for node, name in folders.items()}
