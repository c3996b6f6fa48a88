"""The properties of train/ that are easy to break when it is changed. Run `pytest` in this folder."""

import json
import os
import subprocess
import sys
from pathlib import Path

PROJECT = Path(__file__).parent
# On the CPU: a machine may have fewer GPUs than a test has ranks.
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}


def run(out: Path, *options: str, code: int = 0) -> str:
    """Train on the digits for two epochs, and return what was printed."""
    command = [sys.executable, "train/main.py", "--epochs", "2", "--out", str(out), *options]
    done = subprocess.run(
        command, cwd=PROJECT, env=ENVIRONMENT, capture_output=True, text=True, timeout=280, check=False
    )
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout


def status(out: Path) -> dict:
    return json.loads((out / "status.json").read_text())


def test_two_ranks_learn_the_digits(tmp_path: Path) -> None:
    run(tmp_path, "--spawn", "2")
    assert (status(tmp_path)["state"], status(tmp_path)["world_size"]) == ("finished", 2)
    assert status(tmp_path)["best_accuracy"] > 0.5


def test_a_crashed_run_resumes_and_ends_with_the_same_figures(tmp_path: Path) -> None:
    crashing = ("--save-every", "5", "--fail-rank", "0", "--fail-step", "30", "--fail-code", "7")
    run(tmp_path / "resumed", *crashing, code=7)
    assert "resumed" in run(tmp_path / "resumed", *crashing)
    run(tmp_path / "whole")
    resumed, whole = status(tmp_path / "resumed"), status(tmp_path / "whole")
    assert resumed["best_accuracy"] == whole["best_accuracy"]
    assert resumed["step"] == whole["step"] == whole["steps"]
