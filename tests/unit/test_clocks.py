"""By how much a node's clock is ahead of others at most, from the times of their messages."""

from __future__ import annotations

from pathlib import Path

import pytest

from agent.jobs.job_record import Clocks, ahead

MS = 1_000_000
FEW = [3, 1, 2, 9, 9, 9, 9, 9, 9, 9]  # ms: the clocks are alike, and messages take so long


@pytest.mark.parametrize(
    ("differences", "bound"),
    [
        ([5], 5),
        ([5, 1, 7], 1),
        (FEW, 1),
        ([*FEW, 1], 1),
        ([-7200_000, -7199_999], -7200_000),  # this clock is two hours slow
        ([*FEW, *[500] * 10], 500),  # it was set, or drifts
        ([*FEW, *[500] * 10, *FEW], 500),  # what was written meanwhile counts, too
    ],
)
def test_bound_is_the_largest_of_the_least_of_a_few(
    tmp_path: Path, differences: list[int], bound: int
) -> None:
    clocks = Clocks(tmp_path, 2)
    for at, difference in enumerate(differences):
        clocks.heard(1, at, at + difference * MS)
        clocks.heard(3, at, at)
    assert ahead(tmp_path, 2) == {"1": bound * MS, "3": 0}
    assert ahead(tmp_path, 1) == {}


def test_damaged_record_says_nothing(tmp_path: Path) -> None:
    (tmp_path / "clocks-0.json").write_text('{"1": "soon"}')
    assert ahead(tmp_path, 0) == {}
