"""A run that is killed or stopped at any moment, and resumed, ends as one that was never interrupted."""

from __future__ import annotations

import random
import re
import signal
import time
from pathlib import Path

import pytest

pytest.importorskip("torch")

from support.training import launch
from support.training.output import (
    differing_paths,
    read_metrics,
    read_status,
    read_weights,
    stop_during_snapshot,
    wait_for_step,
)

from train.checkpoint.full import NAME, load_local

pytestmark = pytest.mark.torch


DATA = ["--dataset", "synthetic", "--synthetic-size", 240, "--image-size", 16, "--batch-size", 8]
SMALL = [*DATA, "--epochs", 6, "--scheduler", "cosine", "--log-every", 1, "--no-tensorboard"]


def logged(folder: Path) -> list[tuple[str, int]]:
    return [(line["kind"], line["step"]) for line in read_metrics(folder)]


def test_run_killed_at_random_moments_is_bitwise_equal(tmp_path: Path) -> None:
    """Each step is logged once. So many steps that the run does not end before the last kill on a slow
    computer."""
    seed = random.randrange(2**32)
    chance = random.Random(seed)
    flags = [*SMALL, "--epochs", 5]
    whole = launch.start_train(*flags, "--out", tmp_path / "whole")
    folder = tmp_path / "killed"
    saved_step = 0
    for number in range(4):
        run = launch.start_train(*flags, "--save-every", 1, "--out", folder)
        if number == 2:  # early: it may take many snapshots until one is seen half written
            stop_during_snapshot(folder / NAME, run.pid)
        elif number == 1:
            time.sleep(chance.uniform(0, 0.2))  # usually during the start
        else:
            wait_for_step(folder, saved_step + chance.randint(1, 9), run)
            time.sleep(chance.uniform(0, 0.006))
        logged_step = read_status(folder)["step"]
        run.kill_session()
        assert run.wait() == -signal.SIGKILL, f"seed {seed}: {run.stderr}"
        state = load_local(folder)
        step = 0 if state is None else state["step"]
        assert step >= max(saved_step, logged_step - 1), f"seed {seed}"
        saved_step = step
    last = launch.start_train(*flags, "--save-every", 1, "--out", folder)
    launch.succeeded([whole, last])
    assert differing_paths(read_weights(tmp_path / "whole"), read_weights(folder)) == [], f"seed {seed}"
    assert logged(folder) == logged(tmp_path / "whole"), f"seed {seed}"
    assert {path.name for path in folder.iterdir()} == {
        ".lock",
        "best.pt",
        "metrics.jsonl",
        "snapshot.pt",
        "snapshot.prev.pt",
        "status.json",
    }


def test_restart_counted_by_one_node_only_keeps_snapshots_despite_fresh(tmp_path: Path) -> None:
    """An agent of torchrun that joins again because another node's rank has failed counts no restart of its
    own."""
    launch.succeeded([launch.start_train(*SMALL, "--epochs", 1, "--out", tmp_path)])
    flags = [*SMALL, "--epochs", 2, "--fresh", "--out", tmp_path]
    shared = launch.rendezvous(2)
    ranks = launch.succeeded(
        [
            launch.start_train(*flags, RANK=rank, LOCAL_RANK=0, TORCHELASTIC_RESTART_COUNT=rank, **shared)
            for rank in range(2)
        ]
    )
    assert "resumed at step 30 (epoch 1)" in ranks[0].stdout


def test_ranks_restarted_by_torchrun_resume_despite_fresh(tmp_path: Path) -> None:
    flags = [*SMALL, "--epochs", 2]
    launch.succeeded(
        [
            *launch.train_ranks(2, *flags, "--out", tmp_path / "whole"),
            # Snapshots of another run, which --fresh removes at the first start.
            launch.start_train(*SMALL, "--epochs", 1, "--seed", 5, "--out", tmp_path / "restarted"),
        ]
    )
    own = ["--max-restarts", 1, launch.MAIN, "--fresh", "--save-every", 4]
    crash = ["--fail-rank", 1, "--fail-step", 40]
    run = launch.forked_torchrun(2, *own, *crash, *flags, "--out", tmp_path / "restarted")
    assert run.code == 0, run.stderr
    assert "resumed at step 36 (epoch 1)" in run.stdout
    assert "rank 1 exits with code 1 (--fail-rank)" in run.stderr
    assert "rank 0: after step 39: lost connection to the other ranks (" in run.stderr
    assert "); the same command resumes from the snapshot of step 36" in run.stderr
    of_ranks = [line for line in run.stderr.splitlines() if not re.match(r"[EWI]\d{4} ", line)]
    assert "Traceback" not in "\n".join(of_ranks)  # the agent logs one
    assert differing_paths(read_weights(tmp_path / "whole"), read_weights(tmp_path / "restarted")) == []
    assert logged(tmp_path / "restarted") == logged(tmp_path / "whole")
