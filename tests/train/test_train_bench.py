"""The benchmark runs both sides and says what it saw; the figures themselves are nobody's test."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import train_harness as harness

pytest.importorskip("torchvision")

pytestmark = pytest.mark.torch


def test_both_sides_of_a_case_are_timed_in_turns_and_written_down(tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    argv = ["mnist", "--steps", 2, "--batch-size", 4, "--turns", 2, "--json", report]
    done = harness.python("-m", "train.bench", *argv)
    assert done.returncode == 0, done.stderr
    machine, head, row = done.stdout.splitlines()
    assert "threads 1" in machine
    assert head.split()[:4] == ["case", "ours", "theirs", "ratio"]
    assert row.startswith("mnist 28 b4 ")
    (case,) = json.loads(report.read_text())["cases"]
    assert {side: len(turns) for side, turns in case["turns"].items()} == {"theirs": 2, "ours": 2}
    assert all(rate > 0 for turns in case["turns"].values() for rate in turns)


@pytest.mark.parametrize(
    ("argv", "told"),
    [
        (["mnits"], "choose from resnet18, mnist, jpeg"),
        (["mnist", "--examples", "nowhere"], "a checkout of github.com/pytorch/examples"),
        (["mnist", "--variants", "speed=9"], "speed is not amp"),
    ],
)
def test_what_cannot_be_timed_is_refused_in_a_sentence(argv: list[object], told: str) -> None:
    done = harness.python("-m", "train.bench", *argv)
    assert done.returncode == 2
    assert told in done.stderr
    assert "Traceback" not in done.stderr
