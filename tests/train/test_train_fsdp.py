"""Sharded training equals replicated training; sharded snapshots fit any number of ranks, and failures are
shared.

Each job (2 ranks first: it leaves snapshots for the others) runs once with all checks of fsdp_checks.py.
"""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("torch")

import torch
from support.training import launch
from support.training.check_job import Reports, run_check_job
from support.training.output import differing_paths, max_difference

pytestmark = [pytest.mark.torch, pytest.mark.xdist_group("train_fsdp")]
VARIANTS = ("plain", "two parts, smoothed", "three parts, clipped")
MODES = ("fsdp", "ddp")
CONVERSIONS = [("sharded torch.float64", writer, reader, 1e-12) for writer in MODES for reader in MODES]
CONVERSIONS += [("full torch.float64", "fsdp", "ddp", 1e-12), ("full torch.float64", "ddp", "fsdp", 1e-12)]
CONVERSIONS += [("sharded torch.float32", "fsdp", "fsdp", 1e-6)]


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> Reports:
    shared = tmp_path_factory.mktemp("shared")
    return {
        world: run_check_job(world, "fsdp_checks.py", tmp_path_factory.mktemp(f"world{world}"), shared)
        for world in (2, 1, 3)
    }


@pytest.mark.parametrize(
    ("world", "variant"),
    [
        *((1, variant) for variant in VARIANTS),
        *((2, variant) for variant in VARIANTS),
        (3, VARIANTS[0]),
        (3, VARIANTS[2]),
    ],
)
def test_fsdp_trains_as_ddp_and_as_one_process(reports: Reports, world: int, variant: str) -> None:
    single = reports[1][0]["train_in_both_modes"]["ddp"][variant]
    for rank in reports[world]:
        fsdp, ddp = (rank["train_in_both_modes"][mode][variant] for mode in MODES)
        assert max_difference(fsdp["weights"], ddp["weights"]) < 1e-12
        assert max_difference(fsdp["weights"], single["weights"]) < 1e-12
        assert fsdp["test"] == pytest.approx(single["test"], abs=1e-12)


def test_fsdp_running_statistics_of_rank_0_equal_those_of_ddp(reports: Reports) -> None:
    for rank in reports[2]:
        fsdp, ddp = (rank["train_in_both_modes"][mode]["batchnorm"] for mode in MODES)
        assert max_difference(fsdp["weights"], ddp["weights"]) < 1e-12


@pytest.mark.parametrize(
    ("variant", "tolerance"),
    [
        ("list of layers", 1e-12),
        ("float32", 1e-6),
        ("channels_last", 1e-6),
        ("bf16", 1e-2),
        ("bf16, nested", 1e-2),
    ],
)
def test_fsdp_trains_other_models_layouts_and_precisions(
    reports: Reports, variant: str, tolerance: float
) -> None:
    for rank in reports[2]:
        fsdp, ddp = (rank["train_in_both_modes"][mode][variant] for mode in MODES)
        assert max_difference(fsdp["weights"], ddp["weights"]) < tolerance
        assert {value.dtype for value in fsdp["weights"].values()} == {
            value.dtype for value in ddp["weights"].values()
        }


@pytest.mark.parametrize("world", [2, 3])
def test_rank_holds_its_share_of_parameters_and_optimizer_state(reports: Reports, world: int) -> None:
    counts = [rank["count_elements"] for rank in reports[world]]
    whole = counts[0]["whole model"]
    for kind in ("parameters", "moments"):
        assert sum(count[kind] for count in counts) == whole
        assert max(count[kind] for count in counts) < 1.1 * whole / world


def test_fsdp_bf16_reduces_gradients_in_float32(reports: Reports) -> None:
    for rank in reports[2]:
        # BatchNorm stays in float32.
        assert rank["compute_in_bf16"]["used"] == [torch.bfloat16, torch.float32]
        assert rank["compute_in_bf16"]["float32 gradients"]


def test_every_layer_is_compiled(reports: Reports) -> None:
    assert [rank["compile_layers"] for rank in reports[2]] == [3, 3]


def test_fsdp_with_one_rank_warns(tmp_path: Path) -> None:
    flags = ["--dataset", "synthetic", "--synthetic-size", 8, "--image-size", 8, "--epochs", 1]
    (run,) = launch.succeeded(
        [launch.start_train(*flags, "--parallel", "fsdp", "--no-tensorboard", "--out", tmp_path)]
    )
    assert "--parallel fsdp with one rank has nothing to shard over" in run.stdout


def test_run_resumed_from_sharded_snapshot_is_bitwise_equal(reports: Reports) -> None:
    for rank in reports[3]:
        report = rank["interrupt_and_resume"]
        assert report["resumed_at"] == 8
        assert report["folders"] == ["snapshot-10.dcp", "snapshot-8.dcp"]
        assert differing_paths(report["whole"], report["parts"]) == []


@pytest.mark.parametrize(("kind", "writer", "reader", "tolerance"), CONVERSIONS)
@pytest.mark.parametrize("world", [1, 2, 3])
def test_any_number_of_ranks_resumes_a_snapshot_of_two_in_either_mode(
    reports: Reports, world: int, kind: str, writer: str, reader: str, tolerance: float
) -> None:
    uninterrupted = reports[2][0]["resume_elsewhere"][f"{kind} {writer}"]
    for rank in reports[world]:
        resumed = rank["resume_elsewhere"][f"{kind} {writer} to {reader}"]
        assert max_difference(resumed, uninterrupted) < tolerance


@pytest.mark.parametrize("world", [2, 3])
def test_full_disk_of_one_rank_fails_all_and_keeps_the_old_snapshot(reports: Reports, world: int) -> None:
    for number, rank in enumerate(reports[world]):
        report = rank["fail_together"]
        assert report["full"].startswith("TrainError: cannot write the snapshot ")
        failed = world - 1
        # That rank names itself at the start of the line.
        where = "" if number == failed else f"rank {failed}: "
        assert (
            f"snapshot-2.dcp ({where}[Errno 27] File too large); the one before it is kept" in report["full"]
        )
        assert report["left"] == ["snapshot-1.dcp"]


@pytest.mark.parametrize("world", [2, 3])
def test_failure_of_rank_0_alone_fails_all(reports: Reports, world: int) -> None:
    messages = [rank["fail_together"]["blocked"] for rank in reports[world]]
    assert "snapshot-2.dcp ([Errno" in messages[0]
    assert all(
        "snapshot-2.dcp (rank 0 failed); the one before it is kept" in message for message in messages[1:]
    )


@pytest.mark.parametrize("world", [2, 3])
def test_all_ranks_skip_a_snapshot_with_one_damaged_part(reports: Reports, world: int) -> None:
    assert [rank["fail_together"]["found"] for rank in reports[world]] == [1] * world


@pytest.mark.parametrize("world", [2, 3])
def test_folders_that_are_not_shared_are_refused(reports: Reports, world: int) -> None:
    for rank in reports[world]:
        message = rank["fail_together"]["not shared"]
        assert "UsageError: --snapshot sharded needs shared storage: rank 1 does not see" in message
        assert rank["fail_together"]["probes"] == []


@pytest.mark.parametrize("world", [2, 3])
def test_fresh_removes_sharded_snapshots(reports: Reports, world: int) -> None:
    assert [rank["fail_together"]["fresh"] for rank in reports[world]] == [(0, [])] * world


def test_newer_snapshot_of_the_other_kind_is_an_error(reports: Reports) -> None:
    for rank in reports[2]:
        assert rank["fail_together"]["other kind"].startswith("UsageError: the newest snapshot in ")
        assert "give --snapshot sharded, another --out, or --fresh" in rank["fail_together"]["other kind"]


def test_sharded_snapshot_of_another_model_is_refused(reports: Reports) -> None:
    for rank in reports[2]:
        assert "does not fit this model and optimizer" in rank["fail_together"]["other model"]
