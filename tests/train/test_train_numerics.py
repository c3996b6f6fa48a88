"""Training on three ranks equals training on one: weights, validation figures, resumption, and agreement on
failures. Options that change how a step is computed do not change its result. One job runs all checks of
numerics_checks.py."""

from __future__ import annotations

from typing import Any

import pytest
from support.training.check_job import run_check_job
from support.training.small_trainer import SAMPLES, TEST_SAMPLES

pytest.importorskip("torch")

from support.training.output import differing_paths, max_difference

pytestmark = [pytest.mark.torch, pytest.mark.xdist_group("train_numerics")]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return run_check_job(3, "numerics_checks.py", tmp_path_factory.mktemp("numerics"))


def test_weights_equal_those_of_one_process(ranks: list[dict[str, Any]]) -> None:
    """Also with uneven and empty shares: the last batch has 2 samples. They are bitwise equal on all
    ranks."""
    first = ranks[0]["train_in_double_precision"]["weights"]
    for rank in ranks:
        weights = rank["train_in_double_precision"]["weights"]
        assert max_difference(weights, rank["train_alone"]["weights"]) < 1e-12
        assert differing_paths(weights, first) == []


def test_validation_counts_each_sample_once(ranks: list[dict[str, Any]]) -> None:
    """And so does the loss of an epoch."""
    for rank in ranks:
        alone, report = rank["train_alone"], rank["train_in_double_precision"]
        assert report["test"]["test_samples"] == TEST_SAMPLES
        assert report["test"]["test_accuracy"] == alone["test"]["test_accuracy"]
        assert report["test"]["test_loss"] == pytest.approx(alone["test"]["test_loss"], abs=1e-12)
        assert report["epoch"]["samples"] == SAMPLES
        assert report["epoch"]["loss"] == pytest.approx(alone["epoch"]["loss"], abs=1e-12)


def test_run_resumed_in_mid_epoch_is_bitwise_equal(ranks: list[dict[str, Any]]) -> None:
    for report in (rank["interrupt_and_resume"] for rank in ranks):
        assert report["resumed_at"] == 8
        assert report["whole"]["step"] == 15
        assert report["whole"]["scaler"]["_growth_tracker"] > 0
        assert differing_paths(report["whole"], report["parts"]) == []


def test_newest_valid_snapshot_reaches_every_rank(ranks: list[dict[str, Any]]) -> None:
    for report in (rank["elect_snapshot"] for rank in ranks):
        assert report["from nothing"] is None
        assert report["elected"]["step"] == 30
        assert report["elected"]["payload"].tolist() == [30.0, 30.0, 30.0]


def test_nan_loss_stops_every_rank_before_the_update(ranks: list[dict[str, Any]]) -> None:
    *others, last = (rank["train_on_nan"] for rank in ranks)
    assert last["message"].startswith("step 1: the loss is nan; stopped before updating the weights; ")
    assert "; there is no snapshot yet; " in last["message"]
    for check in others:
        assert check["message"].startswith("step 1: the gradients are not finite")
    assert all(check["unchanged"] for check in (*others, last))


def test_fp16_counts_skipped_steps_and_gives_up_at_a_tiny_scale(ranks: list[dict[str, Any]]) -> None:
    """The scale starts at 2^-6 and is halved by each skipped step; 2^-14 is the first below 1e-4."""
    for check in (rank["overflow_in_half_precision"] for rank in ranks):
        assert (check["reported"], check["skipped"], check["unchanged"]) == (2, 9, True)
        assert check["message"].startswith("step 12: the gradients are not finite even with the --amp fp16 ")
        assert "loss scale reduced to 6.1e-05" in check["message"]


def test_failure_on_one_rank_is_raised_on_all(ranks: list[dict[str, Any]]) -> None:
    """Local rank 0 works before the others, and collectives return the same on every rank."""
    *others, last = (rank["run_collectives"] for rank in ranks)
    assert last["message"] == "the last rank's own message"
    for report in others:
        assert report["message"] == "stopped because another rank could not find the file"
    for report in (*others, last):
        assert report["prepared"]
        assert report["gathered"] == [0, 10, 20]
        assert report["any"] == [True, False]
        assert report["broadcast"] == b"\x00state"


def test_no_rank_leaves_before_the_last_one_has_finished(ranks: list[dict[str, Any]]) -> None:
    assert [rank["after"] for rank in ranks] == [True] * 3


# -- options: in float64 the weights are those of a plain loop -----------------------------------------------


def test_accumulated_batch_equals_whole_batch(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        whole, *parts = rank["accumulated"].values()
        assert [max_difference(weights, whole) < 1e-12 for weights in parts] == [True, True]


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
