"""The properties of train.py that are easy to break when it is changed. Run `pytest` in this folder."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

SCRIPT = str(Path(__file__).with_name("train.py"))
# On the CPU: a machine may have fewer GPUs than a test has ranks.
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}


def start(ranks: int, out: Path, *options: str) -> subprocess.Popen:
    launcher = (
        ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"] if ranks > 1 else []
    )
    command = [sys.executable, *launcher, SCRIPT, "--out", str(out), "--batch-size", "360", *options]
    return subprocess.Popen(command, env=ENVIRONMENT, stdout=subprocess.PIPE, text=True)


def train(ranks: int, out: Path, *options: str) -> dict:
    """Train, and return the latest snapshot."""
    process = start(ranks, out, *options)
    output, _ = process.communicate(timeout=280)
    assert process.returncode == 0, output
    return load(out / "latest.pt")


def load(path: Path) -> dict:
    return torch.load(path, map_location="cpu", weights_only=True)


@pytest.fixture(scope="module")
def alone(tmp_path_factory) -> Path:
    """The folder of an uninterrupted run of two epochs in one process."""
    out = tmp_path_factory.mktemp("alone")
    train(1, out, "--epochs", "2")
    return out


def test_it_learns_and_reports(alone: Path) -> None:
    status = json.loads((alone / "status.json").read_text())
    assert (status["state"], status["step"]) == ("finished", status["steps"])
    assert status["best_accuracy"] == load(alone / "best.pt")["best"] > 0.5  # with other data, another number


def test_two_ranks_train_the_same_weights(alone: Path, tmp_path: Path) -> None:
    ours = train(2, tmp_path, "--epochs", "2")["model"]
    for name, expected in load(alone / "latest.pt")["model"].items():
        torch.testing.assert_close(ours[name], expected, rtol=0, atol=1e-4, msg=name)


def test_a_terminated_run_resumes_with_the_same_bits(alone: Path, tmp_path: Path) -> None:
    process = start(1, tmp_path, "--epochs", "2", "--save-every", "1")
    while not (tmp_path / "latest.pt").exists():
        assert process.poll() is None
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=280)
    assert process.returncode == 143
    assert json.loads((tmp_path / "status.json").read_text())["state"] == "preempted"

    resumed, expected = train(1, tmp_path, "--epochs", "2"), load(alone / "latest.pt")
    assert all(torch.equal(resumed["model"][name], tensor) for name, tensor in expected["model"].items())
