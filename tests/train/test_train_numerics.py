"""Training on W ranks equals training on one: weights, validation figures, resumption, and agreement on
failures.

Each job (W = 1, 2, 3) runs once with all checks of numerics_checks.py; the tests compare what its ranks
report.
"""

from __future__ import annotations

import pytest
from support.training.check_job import Reports, run_check_job
from support.training.small_trainer import SAMPLES, TEST_SAMPLES

pytest.importorskip("torch")

from support.training.output import differing_paths, max_difference

pytestmark = [pytest.mark.torch, pytest.mark.xdist_group("train_numerics")]


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> Reports:
    return {
        world: run_check_job(world, "numerics_checks.py", tmp_path_factory.mktemp(f"world{world}"))
        for world in (1, 2, 3)
    }


@pytest.mark.parametrize("world", [2, 3])
def test_weights_equal_those_of_one_process(reports: Reports, world: int) -> None:
    """Also with uneven and empty shares: the last batch has 2 samples."""
    single = reports[1][0]["train_in_double_precision"]["weights"]
    for rank in reports[world]:
        assert max_difference(rank["train_in_double_precision"]["weights"], single) < 1e-12


@pytest.mark.parametrize("world", [2, 3])
def test_weights_are_bitwise_equal_on_all_ranks(reports: Reports, world: int) -> None:
    first, *others = [rank["train_in_double_precision"]["weights"] for rank in reports[world]]
    assert [differing_paths(first, other) for other in others] == [[]] * (world - 1)


@pytest.mark.parametrize("world", [1, 2, 3])
def test_validation_counts_each_sample_once(reports: Reports, world: int) -> None:
    single = reports[1][0]["train_in_double_precision"]["test"]
    for rank in reports[world]:
        figures = rank["train_in_double_precision"]["test"]
        assert figures["test_samples"] == TEST_SAMPLES
        assert figures["test_accuracy"] == single["test_accuracy"]
        assert figures["test_loss"] == pytest.approx(single["test_loss"], abs=1e-12)


@pytest.mark.parametrize("world", [1, 2, 3])
def test_epoch_loss_is_the_mean_over_all_samples(reports: Reports, world: int) -> None:
    single = reports[1][0]["train_in_double_precision"]["epoch"]
    for rank in reports[world]:
        figures = rank["train_in_double_precision"]["epoch"]
        assert figures["samples"] == SAMPLES
        assert figures["loss"] == pytest.approx(single["loss"], abs=1e-12)


@pytest.mark.parametrize("world", [1, 2])
def test_run_resumed_in_mid_epoch_is_bitwise_equal(reports: Reports, world: int) -> None:
    for rank in reports[world]:
        report = rank["interrupt_and_resume"]
        assert report["resumed_at"] == 8
        assert report["whole"]["step"] == 15
        assert differing_paths(report["whole"], report["parts"]) == []


@pytest.mark.parametrize("world", [2, 3])
def test_newest_valid_snapshot_reaches_every_rank(reports: Reports, world: int) -> None:
    for rank in reports[world]:
        assert rank["elect_snapshot"]["from nothing"] is None
        assert rank["elect_snapshot"]["elected"]["step"] == 30
        assert rank["elect_snapshot"]["elected"]["payload"].tolist() == [30.0, 30.0, 30.0]


@pytest.mark.parametrize("world", [1, 2, 3])
def test_nan_loss_stops_every_rank_before_the_update(reports: Reports, world: int) -> None:
    checks = [rank["train_on_nan"] for rank in reports[world]]
    assert [check["unchanged"] for check in checks] == [True] * world
    assert checks[-1]["message"].startswith("step 1: the loss is nan; stopped before updating the weights; ")
    assert "; there is no snapshot yet; " in checks[-1]["message"]
    for check in checks[:-1]:
        assert check["message"].startswith("step 1: the gradients are not finite")


@pytest.mark.parametrize("world", [1, 2, 3])
def test_fp16_counts_skipped_steps_and_gives_up_at_a_tiny_scale(reports: Reports, world: int) -> None:
    """The scale starts at 2^-6 and is halved by each skipped step; 2^-14 is the first below 1e-4."""
    for check in (rank["overflow_in_half_precision"] for rank in reports[world]):
        assert check["reported"] == 2
        assert check["skipped"] == 9
        assert check["unchanged"]
        assert check["message"].startswith("step 12: the gradients are not finite even with the --amp fp16 ")
        assert "loss scale reduced to 6.1e-05" in check["message"]


@pytest.mark.parametrize("world", [2, 3])
def test_local_rank_0_works_before_the_others(reports: Reports, world: int) -> None:
    assert [rank["run_collectives"]["prepared"] for rank in reports[world]] == [True] * world


@pytest.mark.parametrize("world", [2, 3])
def test_failure_on_one_rank_is_raised_on_all(reports: Reports, world: int) -> None:
    messages = [rank["run_collectives"]["message"] for rank in reports[world]]
    assert messages[-1] == "the last rank's own message"
    assert messages[:-1] == ["stopped because another rank could not find the file"] * (world - 1)


@pytest.mark.parametrize("world", [2, 3])
def test_no_rank_leaves_before_the_last_one_has_finished(reports: Reports, world: int) -> None:
    assert [rank["after"] for rank in reports[world]] == [True] * world


@pytest.mark.parametrize("world", [1, 2, 3])
def test_collectives_return_the_same_on_every_rank(reports: Reports, world: int) -> None:
    for rank in reports[world]:
        report = rank["run_collectives"]
        assert report["gathered"] == [10 * number for number in range(world)]
        assert report["any"] == [True, False]
        assert report["broadcast"] == b"\x00state"
