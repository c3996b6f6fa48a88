"""Training on three ranks equals training on one: weights, validation figures, resumption, and agreement on
failures. One job runs all checks of numerics_checks.py."""

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
