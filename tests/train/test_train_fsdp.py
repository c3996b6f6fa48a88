"""Training with shards is training with replicas; sharded snapshots fit any number of ranks, and failures are shared.

Each job (2 ranks first: it leaves snapshots for the others) runs once and does all of fsdp_checks.py.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import train_harness as harness

pytest.importorskip("torch")

import torch

pytestmark = [pytest.mark.torch, pytest.mark.xdist_group("train_fsdp")]  # one worker runs the jobs
CHECKS = Path(__file__).with_name("fsdp_checks.py")
WAYS = ("plain", "two parts, smoothed", "three parts, clipped")
MODES = ("fsdp", "ddp")
CHANGES = [("sharded torch.float64", writer, reader, 1e-12) for writer in MODES for reader in MODES]
CHANGES += [("full torch.float64", "fsdp", "ddp", 1e-12), ("full torch.float64", "ddp", "fsdp", 1e-12)]
CHANGES += [("sharded torch.float32", "fsdp", "fsdp", 1e-6)]

Seen = dict[int, list[dict[str, Any]]]


@pytest.fixture(scope="module")
def jobs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Seen, str]:
    """World size -> what each of its ranks reported; and what the job of one process printed."""
    reports = {}
    shared = tmp_path_factory.mktemp("shared")
    for world in (2, 1, 3):
        folder = tmp_path_factory.mktemp(f"world{world}")
        done = harness.job(world, CHECKS, folder, shared)
        reports[world] = [torch.load(folder / f"rank{rank}.pt") for rank in range(world)]
        if world == 1:
            printed = done[0].stdout
    return reports, printed


@pytest.fixture(scope="module")
def seen(jobs: tuple[Seen, str]) -> Seen:
    return jobs[0]


def distance(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    """The largest difference of any weight of two models."""
    assert one.keys() == other.keys()
    return max((one[name].double() - other[name].double()).abs().max().item() for name in one)


@pytest.mark.parametrize(
    ("world", "way"), [*((1, way) for way in WAYS), *((2, way) for way in WAYS), (3, WAYS[0]), (3, WAYS[2])]
)
def test_shards_train_as_replicas_and_as_one_process_do(seen: Seen, world: int, way: str) -> None:
    alone = seen[1][0]["train_both_ways"]["ddp"][way]
    for rank in seen[world]:
        shards, replicas = (rank["train_both_ways"][mode][way] for mode in ("fsdp", "ddp"))
        assert distance(shards["weights"], replicas["weights"]) < 1e-12
        assert distance(shards["weights"], alone["weights"]) < 1e-12
        assert shards["test"] == pytest.approx(alone["test"], abs=1e-12)


def test_running_statistics_of_rank_0_are_those_of_replicas(seen: Seen) -> None:
    for rank in seen[2]:
        shards, replicas = (rank["train_both_ways"][mode]["BatchNorm"] for mode in ("fsdp", "ddp"))
        assert distance(shards["weights"], replicas["weights"]) < 1e-12


@pytest.mark.parametrize(
    ("way", "most"),
    [
        ("a list of layers", 1e-12),
        ("single precision", 1e-6),
        ("channels last", 1e-6),
        ("half precision", 1e-2),
        ("half precision, nested", 1e-2),
    ],
)
def test_other_models_layouts_and_precisions_train_with_shards_too(seen: Seen, way: str, most: float) -> None:
    for rank in seen[2]:
        shards, replicas = (rank["train_both_ways"][mode][way] for mode in ("fsdp", "ddp"))
        assert distance(shards["weights"], replicas["weights"]) < most
        assert {value.dtype for value in shards["weights"].values()} == {
            value.dtype for value in replicas["weights"].values()
        }


@pytest.mark.parametrize("world", [2, 3])
def test_a_rank_holds_its_share_of_parameters_and_of_optimizer_state(seen: Seen, world: int) -> None:
    counts = [rank["count_elements"] for rank in seen[world]]
    whole = counts[0]["whole"]
    for kind in ("here", "moments here"):
        assert sum(count[kind] for count in counts) == whole
        assert max(count[kind] for count in counts) < 1.1 * whole / world


def test_in_half_precision_weights_are_used_as_such_and_gradients_are_averaged_in_single(seen: Seen) -> None:
    for rank in seen[2]:
        # BatchNorm's stay in single precision.
        assert rank["compute_in_half_precision"]["used"] == [torch.bfloat16, torch.float32]
        assert rank["compute_in_half_precision"]["finer"]


def test_compile_is_given_every_layer(seen: Seen) -> None:
    assert [rank["compile_layers"] for rank in seen[2]] == [3, 3]


def test_one_rank_works_and_is_told_that_it_is_pointless(jobs: tuple[Seen, str]) -> None:
    assert "--parallel fsdp with one rank divides nothing" in jobs[1]


@pytest.mark.parametrize("world", [2, 3])
def test_a_run_resumed_from_shards_in_mid_epoch_ends_with_the_same_bits(seen: Seen, world: int) -> None:
    for rank in seen[world]:
        report = rank["interrupt_and_resume"]
        assert report["resumed_at"] == 8
        assert report["folders"] == ["snapshot-10.dcp", "snapshot-8.dcp"]
        assert same(report["whole"], report["parts"])


def same(one: Any, other: Any) -> bool:
    """Whether two nested states are equal to the bit."""
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return torch.equal(one, other) if isinstance(one, torch.Tensor) else one == other


@pytest.mark.parametrize(("kind", "writer", "reader", "most"), CHANGES)
@pytest.mark.parametrize("world", [1, 2, 3])
def test_any_number_of_ranks_goes_on_from_a_snapshot_of_two_in_either_mode(
    seen: Seen, world: int, kind: str, writer: str, reader: str, most: float
) -> None:
    uninterrupted = seen[2][0]["go_on_elsewhere"][f"{kind} {writer}"]
    for rank in seen[world]:
        resumed = rank["go_on_elsewhere"][f"{kind} {writer} to {reader}"]
        assert distance(resumed, uninterrupted) < most


@pytest.mark.parametrize("world", [2, 3])
def test_a_full_disk_of_one_rank_is_an_error_of_all_and_the_old_snapshot_stays(
    seen: Seen, world: int
) -> None:
    for rank in seen[world]:
        report = rank["fail_together"]
        assert report["full"].startswith("TrainError: the snapshot ")
        assert f"snapshot-2.dcp cannot be written (rank {world - 1}: " in report["full"]
        assert report["left"] == ["snapshot-1.dcp"]


@pytest.mark.parametrize("world", [2, 3])
def test_what_rank_0_alone_cannot_do_is_an_error_of_all(seen: Seen, world: int) -> None:
    messages = [rank["fail_together"]["blocked"] for rank in seen[world]]
    assert "cannot be written ([Errno" in messages[0]
    assert all("cannot be written (rank 0 failed); the ones before" in message for message in messages[1:])


@pytest.mark.parametrize("world", [2, 3])
def test_all_ranks_pass_over_a_snapshot_with_one_damaged_part(seen: Seen, world: int) -> None:
    assert [rank["fail_together"]["found"] for rank in seen[world]] == [1] * world


@pytest.mark.parametrize("world", [2, 3])
def test_ranks_that_see_different_folders_are_told_so(seen: Seen, world: int) -> None:
    for rank in seen[world]:
        report = rank["fail_together"]
        assert (
            "UsageError: --snapshot sharded needs shared storage: rank 1 does not see" in report["not shared"]
        )
        assert report["probes"] == []


@pytest.mark.parametrize("world", [2, 3])
def test_fresh_begins_again_and_leaves_none_of_the_old_shards(seen: Seen, world: int) -> None:
    assert [rank["fail_together"]["afresh"] for rank in seen[world]] == [(0, [])] * world


def test_a_newer_snapshot_of_the_other_kind_is_an_error(seen: Seen) -> None:
    for rank in seen[2]:
        assert rank["fail_together"]["other kind"].startswith("UsageError: the newest snapshot in ")
        assert "give --snapshot sharded, another --out, or --fresh" in rank["fail_together"]["other kind"]


def test_a_sharded_snapshot_of_another_model_is_refused(seen: Seen) -> None:
    for rank in seen[2]:
        assert "does not fit this model and optimizer" in rank["fail_together"]["other model"]
