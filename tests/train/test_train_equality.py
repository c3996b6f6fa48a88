"""Options that change how a step is computed, and not its result: in float64 the weights are those of a plain
loop.

Each job (W = 1, 2, 3) runs once with all checks of equality_checks.py; the tests compare what its ranks
report.
"""

from __future__ import annotations

import pytest
from support.training.check_job import Reports, run_check_job

pytest.importorskip("torch")

from support.training.output import differing_paths, max_difference

pytestmark = [pytest.mark.torch, pytest.mark.xdist_group("train_equality")]
WORLDS = (1, 2, 3)


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> Reports:
    return {
        world: run_check_job(world, "equality_checks.py", tmp_path_factory.mktemp(f"world{world}"))
        for world in WORLDS
    }


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("parts", [2, 4])
def test_accumulated_batch_equals_whole_batch(reports: Reports, world: int, parts: int) -> None:
    single = reports[1][0]["accumulated"][1]
    for rank in reports[world]:
        assert max_difference(rank["accumulated"][parts], single) < 1e-12


@pytest.mark.parametrize("world", WORLDS)
def test_clipping_smoothing_and_schedule_equal_a_plain_loop(reports: Reports, world: int) -> None:
    for rank in reports[world]:
        assert max_difference(rank["clipped"], rank["clipped_reference"]) < 1e-12
        assert max_difference(rank["clipped"], rank["accumulated"][1]) > 1e-3  # the flags have an effect


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("parts", [1, 4])
def test_batchnorm_normalizes_each_share_and_keeps_rank_0_statistics(
    reports: Reports, world: int, parts: int
) -> None:
    for rank in reports[world]:
        assert max_difference(rank["with_batchnorm"][parts], rank["batchnorm_reference"][parts]) < 1e-12


def test_ddp_options_are_passed_and_only_the_last_part_is_reduced(reports: Reports) -> None:
    warm_up = {2: [], 3: [True, True]}  # of DDP's buckets, where the order of additions matters
    checked = [(world, rank["reductions"]) for world in (2, 3) for rank in reports[world]]
    for world, report in checked:
        assert report["options"] == {
            "bucket_bytes_cap": (2 * 2**20, 25 * 2**20),
            "gradient_as_bucket_view": (True, True),
            "static_graph": (False, True),
        }
        assert report["reduced"] == warm_up[world] + [False, False, True] * 5


def test_batchnorm_in_ranks_differs_from_the_whole_batch(reports: Reports) -> None:
    assert max_difference(reports[2][0]["with_batchnorm"][1], reports[1][0]["with_batchnorm"][1]) > 1e-3


@pytest.mark.parametrize("world", WORLDS)
def test_validation_changes_neither_weights_nor_statistics(reports: Reports, world: int) -> None:
    for rank in reports[world]:
        report = rank["validated"]
        assert report["figures"][0] == report["figures"][1] == reports[world][0]["validated"]["figures"][0]
        assert differing_paths(report["before"], report["after"]) == []
