"""A checkpoint of several files is whole only if one save wrote it, whatever the nodes have of it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from cloudddp.agent.protocol.checkpoints import (
    Checkpoints,
    Part,
    folder_of,
    is_one,
    is_shard,
    named_in,
    unit_of,
)
from cloudddp.agent.protocol.snapshots import Offer, Snapshot, copies, default_copies

A, B = "20261128-100000-aaaa", "20261128-110000-bbbb"
SECOND = 10**9
ALL = ("__0_0.distcp", "__1_0.distcp", "__2_0.distcp", "__3_0.distcp")
IDS = {node: f"i-{node}" for node in range(3)}
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
        named=ALL if own else (),
        ahead={"i-1": MS, "i-2": MS} if own else {},
        **more,  # type: ignore[arg-type]
    )


def doubt(*parts: Part | None) -> str:
    found = {node: (one,) for node, one in enumerate(parts) if one is not None}
    return Checkpoints(found, IDS).doubts["ckpt/latest"]


NEW = part(0, 1, at=100, metadata=100.5)  # of node 0


@pytest.mark.parametrize(
    ("parts", "why"),
    [
        ((NEW, part(2, 3, at=100)), ""),
        ((NEW, part(2, at=100), part(3, at=100)), ""),
        # Another job, 1 s, 21 s or 10 min before; another attempt of the same job.
        *(
            ((NEW, part(2, 3, at=100 - ago, job="0")), "__2_0.distcp and 1 more of job")
            for ago in (1, 21, 600)
        ),
        ((replace(NEW, attempt=1), part(2, 3, at=79)), f"node 1 has what job {A} wrote"),
        ((NEW, part(2, at=100), part(3, at=99, job="0")), f"__3_0.distcp of job {A} is missing; node 2 has"),
        # The same attempt: the next save had begun on node 1, or on node 0 before its node 1 was lost.
        ((NEW, part(2, 3, at=101)), "node 1 wrote shards after node 0 wrote .metadata"),
        ((NEW, part(2, 3, at=100.4995)), "or may have"),  # clocks: 1 ms
        ((NEW, part(2, 3, at=100.498)), ""),
        ((replace(NEW, ahead={}), part(2, 3, at=50)), "the clocks of nodes 0 and 1 were not compared"),
        ((replace(NEW, ahead={"i-1": -7200 * SECOND}), part(2, 3, at=100 + 7199)), ""),  # 2 h fast
        ((NEW, None), "__2_0.distcp and 1 more of job"),
        ((None, part(2, 3, at=100)), f".metadata of job {A} is missing"),
        # As copies they were whole when they came, and the clock of their writer is not known here.
        ((part(0, 1, 2, 3, at=0, metadata=0), None), ""),
        ((replace(NEW, names=(*ALL, ".metadata")), None), ""),
        # An older node 1 has no part in a checkpoint that is whole without it.
        ((replace(NEW, names=(*ALL, ".metadata")), part(2, 3, at=1, job="0")), ""),
        ((replace(NEW, doubt="x"), part(2, 3, at=100)), "node 0: x"),
        ((part(0, 1, at=1, metadata=2), part(0, 1, at=9, metadata=9)), "__2_0.distcp and 1 more"),
    ],
)
def test_checkpoint_is_whole_only_if_one_save_wrote_it(parts: tuple[Part | None, ...], why: str) -> None:
    found = doubt(*parts)
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
            "has not succeeded, and wrote nothing after it",
        ),
        ((other(MODEL, RNG_0, RNG_1, unfinished=True), other(RNG_1)), ""),  # nothing is put together
        ((other(RNG_1),), "of rng_state_*.pth there are 1 of 2"),  # a remnant
        ((other("m-1-of-3.bin", "m-3-of-3.bin"),), "of m-*-of-3.bin there are 2 of 3"),
        (
            (other("m.safetensors.index.json", named=("m-2-of-2.safetensors",)),),
            "m-2-of-2.safetensors of job",
        ),
        ((other("adapter_rank8.pt", doubt="of two attempts"),), ""),  # a single file
        ((other("model_rank_0.pt", doubt="of two attempts"),), "of two attempts"),
    ],
)
def test_other_formats(parts: tuple[Part, ...], why: str) -> None:
    found = Checkpoints({node: (one,) for node, one in enumerate(parts)}, IDS).doubts["out/checkpoint-40"]
    assert why in found
    assert bool(found) == bool(why)


def test_refusal_names_the_newest_whole_one_beside_it() -> None:
    folders = [f"out/checkpoint-{number}" for number in (9, 10, 40)]
    parts = [replace(other(MODEL, RNG_0), folder=folder) for folder in folders]
    parts[2] = replace(parts[2], doubt="x")
    assert Checkpoints({0: parts}, IDS).refusal(folders[2]) == (
        "out/checkpoint-40 is no whole checkpoint: node 0: x; the newest whole one is out/checkpoint-10"
    )
    assert "there is no whole one beside it" in Checkpoints({0: parts[2:]}, IDS).refusal(folders[2])


def test_with_which_checkpoints_ranks_do_not_begin() -> None:
    """One that is not whole does not stop them where one with another number is: it makes way for that."""
    named = [replace(other(MODEL, RNG_0), folder=f"out/{name}") for name in ("step-1", "step-2", "latest")]

    def known(*parts: Part, **more: Part) -> Checkpoints:
        return Checkpoints({0: parts, **{int(node[1:]): (part,) for node, part in more.items()}}, IDS)

    broken = replace(named[1], doubt="x")
    assert known(named[0], broken).superseded() == ["out/step-2"]
    assert known(named[0], broken).blocking(IDS) == []
    assert known(broken, named[2]).superseded() == []
    assert known(broken, named[2]).blocking(IDS) == ["out/step-2"]
    assert known(broken, named[2]).blocking(IDS, fresh=True) == []
    assert known(replace(broken, mixed=True), named[2]).blocking(IDS, fresh=True) == ["out/step-2"]
    # An older job's does not matter any more.
    assert known(broken, replace(named[2], job=B)).blocking(IDS) == []
    unsure = replace(named[1], unfinished=True)
    half = replace(unsure, names=(RNG_1,))
    assert known(unsure, n1=half).doubts["out/step-2"]
    assert known(unsure, n1=half).blocking([0, 1]) == []
    assert known(unsure, n1=half).blocking([0, 1, 2]) == ["out/step-2"]  # node 2 has nothing of it


def test_names() -> None:
    shards = (".metadata", "__0_0.distcp", "m.safetensors.index.json", "mp_rank_00_model_states.pt")
    assert all(map(is_shard, shards))
    assert not any(map(is_shard, ("rank0.log", "model.pt", "epoch_3.pt", "rank_0.json", "index.json")))
    assert not is_one(["adapter_rank16.safetensors", "model.pt"])
    assert unit_of("out/checkpoint-40/optimizer_0") == "out/checkpoint-40"
    assert unit_of("out/dcp") == "out/dcp"
    assert folder_of("out/checkpoint-40/trainer_state.json", ["out/checkpoint-40"]) == "out/checkpoint-40"
    assert folder_of("out/checkpoint-40/trainer_state.json") is None
    assert folder_of("out/log", ["out"]) is None
    assert named_in(b"\x8c\x0c__0_0.distcpq\x00\x8c\x0d__10_0.distcp") == {"__0_0.distcp", "__10_0.distcp"}


def offers(*parts: Part) -> dict[int, Offer]:
    """What nodes offer: all that they have, as they wrote it."""
    return {
        node: Offer(
            tuple(Snapshot(f"{one.folder}/{name}", 1, 5) for name in one.names),
            parts=(one,),
        )
        for node, one in enumerate(parts)
    } | {len(parts): Offer(())}


def test_only_a_whole_checkpoint_is_copied_and_never_to_files_of_another() -> None:
    """To a node that has nothing of it, and none to node 1, which has a remnant."""
    whole, remnant = replace(NEW, names=(*ALL, ".metadata")), part(2, 3, at=1, job="0")
    for found in (
        default_copies(offers(whole, remnant), IDS),
        copies(offers(whole, remnant), IDS, every=True),
    ):
        assert {(copy.source, copy.lacking) for copy in found} == {(0, (2,))}
        assert len(found) == 5
    both = {(copy.file.path, copy.lacking) for copy in default_copies(offers(NEW, part(2, 3, at=100)), IDS)}
    assert both == {
        *((f"ckpt/latest/{name}", (1, 2)) for name in NEW.names),
        *((f"ckpt/latest/{name}", (0, 2)) for name in ALL[2:]),
    }
    for parts in ((NEW,), (NEW, part(2, 3, at=101)), (NEW, remnant)):
        assert default_copies(offers(*parts), IDS) == []
        assert copies(offers(*parts), IDS, every=True) == []
    unknown = {0: Offer((Snapshot("ckpt/latest/.metadata", 1, 5),)), 1: Offer(())}
    assert default_copies(unknown, IDS) == []
