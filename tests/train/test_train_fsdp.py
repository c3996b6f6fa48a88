"""Sharded training equals replicated training; sharded snapshots fit any number of ranks, and failures are
shared.

Each job (2 ranks first: it leaves snapshots for 3) runs once with all checks of fsdp_checks.py.
"""

from __future__ import annotations

import pytest

pytest.importorskip("torch")

import torch
from support.training.check_job import Reports, run_check_job
from support.training.output import differing_paths, max_difference

pytestmark = [pytest.mark.torch, pytest.mark.xdist_group("train_fsdp")]
CONVERSIONS = [("sharded fsdp", "fsdp"), ("sharded fsdp", "ddp"), ("sharded ddp", "fsdp")]
CONVERSIONS += [("full fsdp", "ddp"), ("full ddp", "fsdp")]


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> Reports:
    shared = tmp_path_factory.mktemp("shared")
    return {
        world: run_check_job(world, "fsdp_checks.py", tmp_path_factory.mktemp(f"world{world}"), shared)
        for world in (2, 3)
    }


def test_fsdp_trains_as_ddp_and_as_one_process(reports: Reports) -> None:
    for rank in reports[2]:
        for variant in ("two parts, smoothed", "three parts, clipped", "batchnorm", "list of layers"):
            alone, ddp, fsdp = (trained[variant] for trained in rank["train_in_both_modes"].values())
            assert max_difference(fsdp["weights"], ddp["weights"]) < 1e-12
            if variant != "batchnorm":  # its running statistics are those of rank 0
                assert max_difference(fsdp["weights"], alone["weights"]) < 1e-12
                assert fsdp["test"] == pytest.approx(alone["test"], abs=1e-12)


def test_rank_holds_its_share_of_parameters_and_optimizer_state(reports: Reports) -> None:
    counts = [rank["count_elements"] for rank in reports[3]]
    whole = counts[0]["whole model"]
    for kind in ("parameters", "moments"):
        assert sum(count[kind] for count in counts) == whole
        assert max(count[kind] for count in counts) < 1.1 * whole / 3


def test_fsdp_bf16_reduces_gradients_in_float32(reports: Reports) -> None:
    for rank in reports[2]:
        # BatchNorm stays in float32.
        assert rank["compute_in_bf16"]["used"] == [torch.bfloat16, torch.float32]
        assert rank["compute_in_bf16"]["float32 gradients"]


def test_run_resumed_from_sharded_snapshot_is_bitwise_equal(reports: Reports) -> None:
    for rank in reports[3]:
        report = rank["interrupt_and_resume"]
        assert report["resumed_at"] == 8
        assert report["folders"] == ["snapshot-10.dcp", "snapshot-8.dcp"]
        assert differing_paths(report["whole"], report["parts"]) == []


@pytest.mark.parametrize("world", [2, 3])
def test_any_number_of_ranks_resumes_a_snapshot_of_two_in_either_mode(reports: Reports, world: int) -> None:
    for written, reader in CONVERSIONS:
        uninterrupted = reports[2][0]["resume_elsewhere"][written]
        for rank in reports[world]:
            resumed = rank["resume_elsewhere"][f"{written} to {reader}"]
            assert max_difference(resumed, uninterrupted) < 1e-12


def test_full_disk_of_one_rank_fails_all_and_keeps_the_old_snapshot(reports: Reports) -> None:
    for number, rank in enumerate(reports[3]):
        report = rank["fail_together"]
        assert report["full"].startswith("TrainError: cannot write the snapshot ")
        where = "" if number == 2 else "rank 2: "  # that rank names itself at the start of the line
        kept = f"snapshot-2.dcp ({where}[Errno 27] File too large); the one before it is kept"
        assert kept in report["full"]
        assert report["left"] == ["snapshot-1.dcp"]
    first, *others = (rank["fail_together"]["blocked"] for rank in reports[3])
    assert "snapshot-2.dcp ([Errno" in first
    assert all("snapshot-2.dcp (rank 0 failed); the one before it is kept" in message for message in others)


def test_all_ranks_agree_on_what_is_resumed(reports: Reports) -> None:
    """A damaged part is skipped by all; folders that are not shared, a newer snapshot of the other kind and
    another model are refused; --fresh removes the snapshots."""
    for report in (rank["fail_together"] for rank in reports[3]):
        assert report["found"] == 1
        assert (
            "UsageError: --snapshot sharded needs shared storage: rank 1 does not see" in report["not shared"]
        )
        assert report["probes"] == []
        assert report["other kind"].startswith("UsageError: the newest snapshot in ")
        assert "give --snapshot sharded, another --out, or --fresh" in report["other kind"]
        assert "does not fit this model and optimizer" in report["other model"]
        assert report["fresh"] == (0, [])
