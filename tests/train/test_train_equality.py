"""Options that change how a step is computed and not what: in float64 the weights are those of a plain loop.

Each job (W = 1, 2, 3) runs once, does all of equality_checks.py, and the tests here compare what its ranks saw.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import train_harness as harness

pytest.importorskip("torch")

import torch

pytestmark = [pytest.mark.torch, pytest.mark.xdist_group("train_equality")]  # one worker runs the jobs
CHECKS = Path(__file__).with_name("equality_checks.py")
WORLDS = (1, 2, 3)

Seen = dict[int, list[dict[str, Any]]]


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> Seen:
    """World size -> what each of its ranks reported."""
    reports = {}
    for world in WORLDS:
        folder = tmp_path_factory.mktemp(f"world{world}")
        harness.job(world, CHECKS, folder)
        reports[world] = [torch.load(folder / f"rank{rank}.pt") for rank in range(world)]
    return reports


def apart(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    """The largest difference between two states."""
    assert one.keys() == other.keys()
    return max((one[name].double() - other[name].double()).abs().max().item() for name in one)


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("parts", [2, 4])
def test_a_batch_computed_in_parts_is_the_whole_batch(seen: Seen, world: int, parts: int) -> None:
    alone = seen[1][0]["in_parts"][1]
    for rank in seen[world]:
        assert apart(rank["in_parts"][parts], alone) < 1e-12


@pytest.mark.parametrize("world", WORLDS)
def test_clipping_smoothing_warm_up_and_cosine_are_those_of_a_plain_loop(seen: Seen, world: int) -> None:
    for rank in seen[world]:
        assert apart(rank["clipped"], rank["plainly"]) < 1e-12
        assert apart(rank["clipped"], rank["in_parts"][1]) > 1e-3  # the flags do something


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("parts", [1, 4])
def test_batchnorm_in_ranks_normalises_each_share_and_keeps_the_statistics_of_the_first(
    seen: Seen, world: int, parts: int
) -> None:
    for rank in seen[world]:
        assert apart(rank["with_batchnorm"][parts], rank["ghosts"][parts]) < 1e-12


def test_gradients_are_reduced_in_buckets_as_told_with_the_last_part_of_a_batch_alone(seen: Seen) -> None:
    for rank in (*seen[2], *seen[3]):
        report = rank["reductions"]
        assert report["told"] == {
            "bucket_bytes_cap": (2 * 2**20, 25 * 2**20),
            "gradient_as_bucket_view": (True, True),
            "static_graph": (False, True),
        }
        assert report["reduced"] == [False, False, True] * 5


def test_batchnorm_in_ranks_is_not_that_of_the_whole_batch(seen: Seen) -> None:
    assert apart(seen[2][0]["with_batchnorm"][1], seen[1][0]["with_batchnorm"][1]) > 1e-3


@pytest.mark.parametrize("world", WORLDS)
def test_validation_moves_neither_weights_nor_statistics(seen: Seen, world: int) -> None:
    for rank in seen[world]:
        report = rank["validated"]
        assert report["figures"][0] == report["figures"][1] == seen[world][0]["validated"]["figures"][0]
        assert all(torch.equal(report["before"][name], report["after"][name]) for name in report["before"])
