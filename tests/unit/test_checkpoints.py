"""A checkpoint of several files is whole only if one save wrote it, whatever the nodes have of it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from agent.jobs.job_record import Clocks, ahead
from cloudddp.agent.protocol.checkpoints import (
    Checkpoints,
    Part,
    checkpoint_of,
    folder_of,
    is_dedicated,
    is_shard,
    is_sharded,
    named_in,
    refusal,
)
from cloudddp.agent.protocol.codec import ProtocolError
from cloudddp.agent.protocol.sharing import Copy, Offered, SharedFiles, copies

A, B = "20261128-100000-aaaa", "20261128-110000-bbbb"
SECOND = 10**9
ALL = ("__0_0.distcp", "__1_0.distcp", "__2_0.distcp", "__3_0.distcp")
NODES = range(3)
MS = SECOND // 1000


def part(
    *shards: int, at: float, metadata: float | None = None, job: str = A, attempt: int = 0, **more: object
) -> Part:
    """What one node has: shards of these ranks, the last of them written `at` (seconds), and with `metadata`
    the file that names all, written then. Its clock is at most 1 ms ahead of the others'."""
    names = tuple(ALL[rank] for rank in shards)
    own = {} if metadata is None else {"": round(metadata * SECOND)}
    return Part(
        "ckpt/latest",
        (*names, *([".metadata"] if own else [])),
        job,
        attempt,
        shards={"": round(at * SECOND)},
        metadata=own,
        lacking=tuple(name for name in ALL if own and name not in names),
        ahead={"1": MS, "2": MS} if own else {},
        **more,  # type: ignore[arg-type]
    )


def problem(*parts: Part | None) -> str:
    found = {node: (one,) for node, one in enumerate(parts) if one is not None}
    return Checkpoints(found).problems["ckpt/latest"]


NEW = part(0, 1, at=100, metadata=100.5)  # of node 0
WHOLE = replace(NEW, names=(*ALL, ".metadata"), lacking=())


@pytest.mark.parametrize(
    ("parts", "why"),
    [
        ((NEW, part(2, 3, at=100)), ""),
        ((NEW, part(2, at=100), part(3, at=100)), ""),
        # Another job, 1 s, 21 s or 10 min before; another attempt of the same job.
        ((NEW, part(2, 3, at=99, job="0")), "__2_0.distcp and 1 more of job"),
        ((replace(NEW, attempt=1), part(2, 3, at=79)), f"node 1 has what job {A} wrote"),
        ((NEW, part(2, at=100), part(3, at=99, job="0")), f"__3_0.distcp of job {A} is missing; node 2 has"),
        # The same attempt: the next save had begun on node 1, or on node 0 before its node 1 was lost.
        ((NEW, part(2, 3, at=101)), "node 1 wrote shards after node 0 wrote .metadata"),
        ((NEW, part(2, 3, at=100.4995)), "or may have"),  # clocks: 1 ms
        ((NEW, part(2, 3, at=100.498)), ""),
        ((replace(NEW, ahead={}), part(2, 3, at=50)), "the clocks of nodes 0 and 1 were not compared"),
        ((replace(NEW, ahead={"1": -7200 * SECOND}), part(2, 3, at=100 + 7199)), ""),  # 2 h fast
        ((NEW, None), "__2_0.distcp and 1 more of job"),
        ((NEW, part(2, 3, at=1, job="")), "are missing; node 1 has files of unknown origin"),
        ((None, part(2, 3, at=100)), f".metadata of job {A} is missing"),
        # As copies they were complete when they came, and the clock of their writer is not known here.
        ((replace(WHOLE, shards={}, metadata={}), None), ""),
        ((replace(NEW, unfinished=True), replace(part(2, 3, at=100), unfinished=True)), ""),
        ((WHOLE, None), ""),
        # An older node 1 has no part in a checkpoint that is whole without it.
        ((WHOLE, part(2, 3, at=1, job="0")), ""),
        ((replace(NEW, problem="x"), part(2, 3, at=100)), "node 0: x"),
        ((part(0, 1, at=1, metadata=2), part(0, 1, at=9, metadata=9)), "__2_0.distcp and 1 more"),
    ],
)
def test_checkpoint_is_whole_only_if_one_save_wrote_it(parts: tuple[Part | None, ...], why: str) -> None:
    found = problem(*parts)
    assert why in found
    assert bool(found) == bool(why)


def other(*names: str, job: str = A, **more: object) -> Part:
    return Part("out/checkpoint-40", names, job, **more)  # type: ignore[arg-type]


MODEL, RNG_0, RNG_1 = "model.safetensors", "rng_state_0.pth", "rng_state_1.pth"


@pytest.mark.parametrize(
    ("parts", "why"),
    [
        ((other(MODEL, RNG_0), other(RNG_1)), ""),
        (
            (other(MODEL, RNG_0), other(RNG_1, unfinished=True)),
            "has not succeeded, and this is its newest save",
        ),
        ((other(MODEL, RNG_0, RNG_1, unfinished=True), other(RNG_1)), ""),  # nothing is put together
        ((other(RNG_1),), "of rng_state_*.pth there are 1 of 2"),  # a remnant
        ((other("g1/m-1-of-3.bin", "g1/m-3-of-3.bin"),), "of g1/m-*-of-3.bin there are 2 of 3"),
        ((other("adapter_rank8.pt", problem="of two attempts"),), ""),  # a single file
        ((other("model_rank_0.pt", problem="of two attempts"),), "of two attempts"),
    ],
)
def test_other_formats(parts: tuple[Part, ...], why: str) -> None:
    found = Checkpoints({node: (one,) for node, one in enumerate(parts)}).problems["out/checkpoint-40"]
    assert why in found
    assert bool(found) == bool(why)


def numbered(*names: str, **more: object) -> list[Part]:
    return [replace(other(MODEL, RNG_0), folder=f"out/{name}", **more) for name in names]  # type: ignore[arg-type]


def known(*parts: Part, **more: Part) -> Checkpoints:
    """What node 0 has, and others."""
    return Checkpoints({0: parts, **{int(node[1:]): (part,) for node, part in more.items()}})


def test_refusal_names_the_newest_complete_one_of_the_same_name() -> None:
    parts = [*numbered("checkpoint-9", "checkpoint-10"), *numbered("checkpoint-40", problem="x")]
    text = refusal("out/checkpoint-40", known(*parts).problems)
    assert text.startswith("out/checkpoint-40 is not a complete checkpoint: node 0: x; ")
    assert text.endswith("; the newest complete one is out/checkpoint-10")
    assert "no other one can replace it" in refusal("out/checkpoint-40", known(parts[2]).problems)
    runs = [replace(part, folder=f"runs/{at}/latest") for at, part in enumerate(parts[1:])]
    assert "no other one can replace it" in refusal("runs/1/latest", known(*runs).problems)


def test_with_which_checkpoints_ranks_do_not_begin() -> None:
    """An incomplete one makes way for an older one, and an old one of which a script has left a part
    stays."""
    one, two, latest = numbered("step-1", "step-2", "latest")
    broken = replace(two, problem="x")
    assert known(one, broken).superseded() == ["out/step-2"]
    assert known(one, broken).blocking(NODES) == []
    old = known(replace(one, problem="x"), two)
    assert old.is_leftover("out/step-1")
    assert (old.superseded(), old.blocking(NODES)) == ([], [])
    assert known(broken, latest).superseded() == []
    assert known(broken, latest).blocking(NODES) == ["out/step-2"]
    assert known(broken, latest).blocking(NODES, fresh=True) == []
    assert known(replace(broken, mixed=True), latest).blocking(NODES, fresh=True) == ["out/step-2"]
    temporary = replace(part(0, 1, at=1), folder="out/latest.tmp")
    assert known(replace(latest, job="0"), temporary).blocking(NODES) == []  # renamed once it is written
    assert known(temporary).blocking(NODES) == ["out/latest.tmp"]
    # An older job's does not matter any more.
    assert known(broken, replace(latest, job=B)).blocking(NODES) == []


def test_save_that_may_not_have_ended() -> None:
    """Each node goes on with what it has, unless a node has nothing of it, or each rank has a file."""
    (unsure,) = numbered("step-2", unfinished=True)
    half = replace(unsure, names=(RNG_1,))
    assert known(unsure, n1=half).problems["out/step-2"]
    assert known(unsure, n1=half).blocking([0, 1]) == []
    assert known(unsure, n1=half).blocking([0, 1, 2]) == ["out/step-2"]
    of_ranks = [replace(unsure, names=(f"model_rank_{rank}.pt",)) for rank in range(2)]
    assert known(of_ranks[0], n1=of_ranks[1]).blocking([0, 1]) == ["out/step-2"]


def test_node_that_wrote_while_its_files_were_pulled() -> None:
    now = part(2, 3, at=100, written=7)
    before = known(NEW, n1=replace(now, written=6))
    assert before.changed(known(NEW, n1=now)) == ["ckpt/latest"]
    assert before.changed(known(replace(NEW, unfinished=True))) == []


def test_shards_by_name() -> None:
    assert all(map(is_shard, (".metadata", "a/__0_0.distcp", "mp_rank_00_model_states.pt")))
    assert not any(map(is_shard, ("rank0.log", "model.pt", "epoch_3.pt", "rank_0.json", "index.json")))
    assert not is_sharded(["adapter_rank16.safetensors", "model.pt"])
    assert named_in(b"\x8c\x0c__0_0.distcpq\x00\x8c\x0d__10_0.distcp") == {"__0_0.distcp", "__10_0.distcp"}


@pytest.mark.parametrize(
    ("folder", "names", "dedicated"),
    [
        ("out/dcp", (".metadata", "__0_0.distcp", "log"), True),
        ("out/checkpoint-40", ("model.pt", "rng_state_0.pth"), True),
        ("out/checkpoint-40", ("model.pt", "optimizer.pt"), False),
        ("out", ("m-1-of-2.safetensors", "m-2-of-2.safetensors", "m.safetensors.index.json"), True),
        ("out", ("model_rank_0.pt", "model_rank_1.pt"), True),
        ("out", ("epoch1_rank0.pt", "epoch3_rank0.pt"), False),
        ("model", ("m-1-of-2.safetensors", "m-2-of-2.safetensors", "config.json"), False),  # downloaded
    ],
)
def test_folders_of_sharded_checkpoints(folder: str, names: tuple[str, ...], dedicated: bool) -> None:
    assert is_dedicated(folder, names) is dedicated


def test_files_of_a_checkpoint() -> None:
    assert checkpoint_of("out/checkpoint-40/optimizer_0") == "out/checkpoint-40"
    assert checkpoint_of("out/dcp") == "out/dcp"
    state = "out/checkpoint-40/trainer_state.json"
    assert folder_of(state, ["out/checkpoint-40"]) == "out/checkpoint-40"
    assert folder_of(state, []) is None
    assert folder_of("out/log", ["out"]) is None


def test_hostile_parts_are_refused() -> None:
    for change in ({"names": ("../x",)}, {"folder": "/etc"}, {"job": "../x"}, {"problem": "x" * 501}):
        with pytest.raises(ProtocolError):
            replace(NEW, **change)  # type: ignore[arg-type]


def planned(*parts: Part, replaces: bool) -> list[Copy]:
    """What is copied if nodes have all of this, as they wrote it. A last one has nothing."""
    offers = {
        node: SharedFiles(tuple(Offered(f"{one.folder}/{name}", 1, 5) for name in one.names), parts=(one,))
        for node, one in enumerate(parts)
    }
    offers[len(parts)] = SharedFiles(())
    return copies(offers, {node: f"i-{node}" for node in offers}, every=True, replaces=replaces)


def test_only_a_complete_checkpoint_is_copied_and_not_beside_files_of_another() -> None:
    """Node 1 has older files: by default it keeps them; what the user has named replaces them."""
    older = part(2, 3, at=1, job="0")
    for replaces, lacking in ((False, (2,)), (True, (1, 2))):
        found = planned(WHOLE, older, replaces=replaces)
        assert ({(copy.holders, copy.lacking) for copy in found}, len(found)) == ({((0,), lacking)}, 5)
    both = {(copy.file.path, copy.lacking) for copy in planned(NEW, part(2, 3, at=100), replaces=False)}
    assert both == {
        *((f"ckpt/latest/{name}", (1, 2)) for name in NEW.names),
        *((f"ckpt/latest/{name}", (0, 2)) for name in ALL[2:]),
    }
    unknown = {0: SharedFiles((Offered("ckpt/latest/.metadata", 1, 5),)), 1: SharedFiles(())}
    for replaces in (False, True):
        for parts in ((NEW,), (NEW, part(2, 3, at=101)), (NEW, older)):
            assert planned(*parts, replaces=replaces) == []
        assert copies(unknown, {0: "i-0", 1: "i-1"}, every=True, replaces=replaces) == []


# -- by how much a node's clock is ahead of others at most ---------------------------------------------------


MS = 1_000_000
FEW = [3, 1, 2, 9, 9, 9, 9, 9, 9, 9]  # ms: the clocks are alike, and messages take so long


@pytest.mark.parametrize(
    ("differences", "bound"),
    [
        ([5], 5),
        ([5, 1, 7], 1),
        (FEW, 1),
        ([*FEW, 1], 1),
        ([-7200_000, -7199_999], -7200_000),  # this clock is two hours slow
        ([*FEW, *[500] * 10], 500),  # it was set, or drifts
        ([*FEW, *[500] * 10, *FEW], 500),  # what was written meanwhile counts, too
    ],
)
def test_bound_is_the_largest_of_the_least_of_a_few(
    tmp_path: Path, differences: list[int], bound: int
) -> None:
    clocks = Clocks(tmp_path, 2)
    for at, difference in enumerate(differences):
        clocks.heard(1, at, at + difference * MS)
        clocks.heard(3, at, at)
    assert ahead(tmp_path, 2) == {"1": bound * MS, "3": 0}
    assert ahead(tmp_path, 1) == {}


def test_damaged_record_says_nothing(tmp_path: Path) -> None:
    (tmp_path / "clocks-0.json").write_text('{"1": "soon"}')
    assert ahead(tmp_path, 0) == {}
