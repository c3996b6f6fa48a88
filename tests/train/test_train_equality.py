"""Options that change how a step is computed, and not its result: in float64 the weights are those of a plain
loop. One job of three ranks runs all checks of equality_checks.py."""

from __future__ import annotations

from typing import Any

import pytest
from support.training.check_job import run_check_job

pytest.importorskip("torch")

from support.training.output import differing_paths, max_difference

pytestmark = [pytest.mark.torch, pytest.mark.xdist_group("train_equality")]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return run_check_job(3, "equality_checks.py", tmp_path_factory.mktemp("equality"))


def test_accumulated_batch_equals_whole_batch(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        for weights in rank["accumulated"].values():
            assert max_difference(weights, rank["single"]) < 1e-12


def test_clipping_smoothing_and_schedule_equal_a_plain_loop(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        assert max_difference(rank["clipped"], rank["clipped_reference"]) < 1e-12
        assert max_difference(rank["clipped"], rank["accumulated"][2]) > 1e-3  # the flags have an effect


def test_batchnorm_normalizes_each_share_and_keeps_rank_0_statistics(ranks: list[dict[str, Any]]) -> None:
    """So it is not BatchNorm of the whole batch."""
    for rank in ranks:
        for parts, weights in rank["with_batchnorm"].items():
            assert max_difference(weights, rank["batchnorm_reference"][parts]) < 1e-12
        assert max_difference(rank["with_batchnorm"][1], rank["batchnorm_reference"]["whole batch"]) > 1e-3


def test_ddp_options_are_passed_and_only_the_last_part_is_reduced(ranks: list[dict[str, Any]]) -> None:
    warm_up = [True, True]  # of DDP's buckets, where the order of additions matters: from three ranks on
    for report in (rank["reductions"] for rank in ranks):
        assert report["options"] == {
            "bucket_bytes_cap": (2 * 2**20, 25 * 2**20),
            "gradient_as_bucket_view": (True, True),
            "static_graph": (False, True),
        }
        assert report["reduced"] == warm_up + [False, False, True] * 5


def test_validation_changes_neither_weights_nor_statistics(ranks: list[dict[str, Any]]) -> None:
    for report in (rank["validated"] for rank in ranks):
        assert report["figures"][0] == report["figures"][1] == ranks[0]["validated"]["figures"][0]
        assert differing_paths(report["before"], report["after"]) == []
