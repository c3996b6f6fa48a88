"""Training on W ranks is training on one: weights, validation figures, resumption, and agreement on failures.

Each job (W = 1, 2, 3) runs once, does all of train_checks.py, and the tests here compare what its ranks saw.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import train_harness as harness

pytest.importorskip("torch")

import torch

pytestmark = [pytest.mark.torch, pytest.mark.xdist_group("train_numerics")]  # one worker runs the jobs
CHECKS = Path(__file__).with_name("train_checks.py")
SAMPLES, TESTS = 22, 7

Seen = dict[int, list[dict[str, Any]]]


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> Seen:
    """World size -> what each of its ranks reported."""
    reports = {}
    for world in (1, 2, 3):
        folder = tmp_path_factory.mktemp(f"world{world}")
        harness.job(world, CHECKS, folder)
        reports[world] = [torch.load(folder / f"rank{rank}.pt") for rank in range(world)]
    return reports


def leaves(value: Any, path: str = "") -> dict[str, Any]:
    """Every tensor and number of a nested state, by its path."""
    if isinstance(value, dict):
        parts = value.items()
    elif isinstance(value, list | tuple):
        parts = enumerate(value)
    else:
        return {path: value}
    return {name: leaf for key, part in parts for name, leaf in leaves(part, f"{path}/{key}").items()}


def different(one: Any, other: Any) -> list[str]:
    """The paths at which two states are not equal to the bit."""
    a, b = leaves(one), leaves(other)
    assert a.keys() == b.keys()
    return [
        path
        for path, value in a.items()
        if not (torch.equal(value, b[path]) if isinstance(value, torch.Tensor) else value == b[path])
    ]


@pytest.mark.parametrize("world", [2, 3])
def test_weights_equal_those_of_one_process_with_uneven_and_empty_shards(seen: Seen, world: int) -> None:
    alone = seen[1][0]["train_in_double"]["weights"]
    for rank in seen[world]:
        weights = rank["train_in_double"]["weights"]
        assert max((weights[name] - alone[name]).abs().max().item() for name in alone) < 1e-12


@pytest.mark.parametrize("world", [2, 3])
def test_all_ranks_end_with_the_same_bits(seen: Seen, world: int) -> None:
    first, *others = [rank["train_in_double"]["weights"] for rank in seen[world]]
    assert [different(first, other) for other in others] == [[]] * (world - 1)


@pytest.mark.parametrize("world", [1, 2, 3])
def test_validation_counts_each_sample_once_and_agrees_on_every_rank(seen: Seen, world: int) -> None:
    alone = seen[1][0]["train_in_double"]["test"]
    for rank in seen[world]:
        figures = rank["train_in_double"]["test"]
        assert figures["test_samples"] == TESTS
        assert figures["test_accuracy"] == alone["test_accuracy"]
        assert figures["test_loss"] == pytest.approx(alone["test_loss"], abs=1e-12)


@pytest.mark.parametrize("world", [1, 2, 3])
def test_the_loss_of_an_epoch_is_the_mean_over_all_samples(seen: Seen, world: int) -> None:
    alone = seen[1][0]["train_in_double"]["epoch"]
    for rank in seen[world]:
        figures = rank["train_in_double"]["epoch"]
        assert figures["samples"] == SAMPLES
        assert figures["loss"] == pytest.approx(alone["loss"], abs=1e-12)


@pytest.mark.parametrize("world", [1, 2])
def test_a_run_resumed_in_mid_epoch_ends_with_the_bits_of_an_uninterrupted_one(
    seen: Seen, world: int
) -> None:
    for rank in seen[world]:
        report = rank["interrupt_and_resume"]
        assert report["resumed_at"] == 8
        assert report["whole"]["step"] == 15
        assert different(report["whole"], report["parts"]) == []


@pytest.mark.parametrize("world", [2, 3])
def test_the_newest_valid_snapshot_of_any_disk_reaches_every_rank(seen: Seen, world: int) -> None:
    for rank in seen[world]:
        assert rank["elect"]["nothing"] is None
        assert rank["elect"]["elected"]["step"] == 30
        assert rank["elect"]["elected"]["payload"].tolist() == [30.0, 30.0, 30.0]


@pytest.mark.parametrize("world", [1, 2, 3])
def test_a_loss_that_is_not_a_number_stops_every_rank_before_the_update(seen: Seen, world: int) -> None:
    reports = [rank["meet_a_bad_loss"] for rank in seen[world]]
    assert [report["unchanged"] for report in reports] == [True] * world
    assert f"step 1, rank {world - 1}: the loss is nan" in reports[-1]["message"]
    for rank, report in enumerate(reports[:-1]):
        assert f"step 1, rank {rank}: the gradients are not finite" in report["message"]


@pytest.mark.parametrize("world", [1, 2, 3])
def test_steps_that_half_precision_skips_are_told_and_a_run_that_skips_without_end_is_ended(
    seen: Seen, world: int
) -> None:
    """The scale begins at 2^-6 and is halved by each skipped step; 2^-14 is the first below 1e-4."""
    for report in (rank["meet_endless_gradients"] for rank in seen[world]):
        assert report["told"] == 2
        assert report["skipped"] == 9
        assert report["unchanged"]
        assert report["message"].startswith(
            "step 12: the gradients are not finite, however little --amp fp16 "
        )
        assert "scales the loss (by 6.1e-05 now)" in report["message"]


@pytest.mark.parametrize("world", [2, 3])
def test_work_of_local_rank_0_is_done_before_the_others_begin(seen: Seen, world: int) -> None:
    assert [rank["take_turns"]["seen"] for rank in seen[world]] == [True] * world


@pytest.mark.parametrize("world", [2, 3])
def test_a_failure_on_one_rank_is_raised_on_all(seen: Seen, world: int) -> None:
    messages = [rank["take_turns"]["message"] for rank in seen[world]]
    assert messages[-1] == "this one's own words"
    assert messages[:-1] == ["stopped, because another rank could not find the file"] * (world - 1)


@pytest.mark.parametrize("world", [2, 3])
def test_no_rank_takes_its_connections_down_before_the_last_is_done(seen: Seen, world: int) -> None:
    assert [rank["left after the last"] for rank in seen[world]] == [True] * world


@pytest.mark.parametrize("world", [1, 2, 3])
def test_collective_operations_give_every_rank_the_same_answer(seen: Seen, world: int) -> None:
    for rank in seen[world]:
        report = rank["take_turns"]
        assert report["gathered"] == [10 * number for number in range(world)]
        assert report["any"] == [True, False]
        assert report["shared"] == b"\x00state"
