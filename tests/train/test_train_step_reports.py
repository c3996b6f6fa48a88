"""The report of each rank's own work, by which a launcher finds stragglers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support.training import launch

FLAGS = (*launch.TINY, "--epochs", 1)
SLEEP = 1.0  # seconds


@pytest.mark.parametrize(("slow", "where", "flags"), [(0, "before", ()), (1, "inside", ("--accumulate", 2))])
def test_only_the_slow_rank_reports_long_work(
    slow: int, where: str, flags: tuple[object, ...], tmp_path: Path
) -> None:
    """Both take the same time per step; rank 0 sends the buffers of its BatchNorm layers, for which rank 1
    waits."""
    script = launch.CHECKS / "slow_rank.py"
    words = (slow, where, SLEEP / (1 + len(flags) // 2), *FLAGS, *flags, "--out", tmp_path / "out")
    launch.run_ranks(2, script, *words, STEP_FOLDER=tmp_path)
    reports = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2)]
    assert all(one["step"] > 1 for one in reports)
    assert reports[slow]["work_seconds"] >= SLEEP
    # A busy machine slows both down.
    assert reports[slow]["work_seconds"] - reports[1 - slow]["work_seconds"] > SLEEP / 2


def test_other_ways_to_parallelize_report_steps_only(tmp_path: Path) -> None:
    words = (launch.CHECKS / "slow_rank.py", -1, "before", 0, *FLAGS, "--parallel", "fsdp")
    launch.run_ranks(2, *words, "--out", tmp_path / "out", STEP_FOLDER=tmp_path)
    for rank in range(2):
        assert list(json.loads((tmp_path / f"{rank}.json").read_text())) == ["step"]


def test_report_that_cannot_be_written_ends_no_run(tmp_path: Path) -> None:
    file = tmp_path / "missing" / "0.json"
    run = launch.start_train(*FLAGS, "--out", tmp_path / "out", CLOUDDDP_STEP_FILE=file)
    assert run.wait() == 0, run.stderr
    assert not file.exists()
