"""An interrupted run, however it was interrupted, ends with the bits of one that was not."""

from __future__ import annotations

import json
import random
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import train_harness as harness

pytest.importorskip("torch")

import torch
from test_train_snapshot import stop_in_the_middle_of_a_write
from train_resume_checks import BATCH, EPOCHS, SAMPLES

from train.sampler import GlobalBatches
from train.snapshot import TEMPORARY, load_local

pytestmark = pytest.mark.torch
# With BatchNorm and dropout in the network.
RUNS = {
    "momentum": {"optimizer": "sgd", "lr": 0.05, "scheduler": "cosine"},
    "everything": {
        "optimizer": "adamw",
        "lr": 0.01,
        "scheduler": "cosine",
        "warmup_epochs": 0.6,
        "augment": True,
        "accumulate": 2,
        "amp": "fp16",
        "clip": 1.0,
    },
}
LAST = EPOCHS * -(-SAMPLES // BATCH)
OF_THIS_START = {
    "time",
    "seconds",
    "samples_per_second",
    "samples_per_second_per_device",
    "step_seconds",
    "data_wait",
}


def train(
    zygote: harness.Zygote, world: int, folder: Path, *, name: str, **wish: Any
) -> list[dict[str, dict[str, Any]]]:
    """What each rank of a job saw."""
    report = folder / f"{name}.pt"
    text = json.dumps({"report": str(report), **wish})
    ranks = zygote.ranks(world, text, run="train_resume_checks")
    assert [rank.wait() for rank in ranks] == [0] * world, "\n".join(rank.stderr for rank in ranks)
    return [torch.load(f"{report}.{rank}") for rank in range(world)]


def snapshot(folder: Path) -> dict[str, Any]:
    return torch.load(folder / "snapshot.pt", weights_only=True)


def different(one: Any, other: Any, path: str = "") -> list[str]:
    """The paths at which two states are not equal to the bit."""
    if isinstance(one, dict) and isinstance(other, dict) and one.keys() == other.keys():
        return [name for key in one for name in different(one[key], other[key], f"{path}/{key}")]
    if isinstance(one, list | tuple) and len(one) == len(other):
        return [
            name
            for n, pair in enumerate(zip(one, other, strict=True))
            for name in different(*pair, f"{path}/{n}")
        ]
    same = torch.equal(one, other) if isinstance(one, torch.Tensor) else one == other
    return [] if same else [path]


def lines(folder: Path) -> list[dict[str, Any]]:
    """metrics.jsonl without what depends on the clock, and with floats to 12 digits."""
    found = [json.loads(line) for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    return [
        {
            name: float(f"{value:.12g}") if isinstance(value, float) else value
            for name, value in line.items()
            if name not in OF_THIS_START
        }
        for line in found
    ]


@pytest.mark.parametrize("world", [1, 2, 3])
def test_a_run_stopped_twice_in_mid_epoch_ends_with_the_bits_of_one_run_through(
    zygote: harness.Zygote, tmp_path: Path, world: int
) -> None:
    train(zygote, world, tmp_path, name="whole", out=f"{tmp_path}/whole", runs=RUNS)
    parts = [
        train(zygote, world, tmp_path, name=f"part{stop}", out=f"{tmp_path}/parts", runs=RUNS, stop=stop)
        for stop in (1, 6, -1)
    ]
    for seen in zip(*parts, strict=True):
        for name in RUNS:
            assert [(part[name]["resumed_at"], part[name]["step"]) for part in seen] == [
                (0, 3),
                (3, 8),
                (8, LAST),
            ]
    for name in RUNS:
        whole, resumed = tmp_path / "whole" / name / "shared", tmp_path / "parts" / name / "shared"
        compared = ("step", "model", "optimizer", "scaler", "best_accuracy", "best_epoch")
        states = [{key: snapshot(folder)[key] for key in compared} for folder in (whole, resumed)]
        assert different(*states) == []
        assert lines(whole) == lines(resumed)
    assert snapshot(tmp_path / "parts" / "everything" / "shared")["scaler"]["_growth_tracker"] > 0


def test_the_number_of_ranks_may_change_at_each_resumption_and_the_snapshot_may_lie_on_any_disk(
    zygote: harness.Zygote, tmp_path: Path
) -> None:
    """4 ranks, then 3, then 2, each with a disk of its own; after the first job rank 0 is where no snapshot is."""
    runs = {"run": {"model": "small", "optimizer": "sgd", "lr": 0.05, "scheduler": "cosine"}}
    settings = {"runs": runs, "dropout": 0.0}
    (whole,) = train(zygote, 1, tmp_path, name="whole", out=f"{tmp_path}/whole", **settings)
    jobs = [
        train(
            zygote,
            world,
            tmp_path,
            name=f"{world}",
            out=f"{tmp_path}/parts",
            disks=disks,
            shift=shift,
            stop=stop,
            **settings,
        )
        for world, disks, shift, stop in ((4, 4, 0, 2), (3, 3, 2, 8), (2, 3, 1, -1))
    ]
    assert [[(rank["run"]["resumed_at"], rank["run"]["step"]) for rank in job] for job in jobs] == [
        [(0, 4)] * 4,
        [(4, 10)] * 3,
        [(10, LAST)] * 2,
    ]
    batches = GlobalBatches(samples=SAMPLES, batch_size=BATCH, seed=0)
    order = [sorted(shard.indices) for epoch in range(EPOCHS) for shard in batches.epoch(epoch)]
    used: dict[int, list[int]] = {}
    for rank in (rank for job in jobs for rank in job):
        for step, samples in rank["run"]["used"].items():
            used.setdefault(step, []).extend(samples)
    assert [sorted(used[step]) for step in range(LAST)] == order
    assert [sorted(whole["run"]["used"][step]) for step in range(LAST)] == order
    losses = [rank["run"]["test_loss"] for rank in jobs[-1]]
    assert losses == pytest.approx([whole["run"]["test_loss"]] * 2, abs=1e-6)


TINY = [
    "--dataset",
    "synthetic",
    "--synthetic-size",
    240,
    "--image-size",
    16,
    "--no-tensorboard",
    "--log-every",
    1,
]
SMALL = [*TINY, "--batch-size", 8, "--epochs", 8, "--momentum", 0.9, "--scheduler", "cosine", "--workers", 0]


def reached(folder: Path) -> int:
    """The step that the run in `folder` has last told of."""
    try:
        return int(json.loads((folder / "status.json").read_text(encoding="utf-8"))["step"])
    except FileNotFoundError:
        return 0


def weights(folder: Path) -> dict[str, Any]:
    return snapshot(folder)["model"]


def told(folder: Path) -> list[tuple[str, int]]:
    return [(line["kind"], line["step"]) for line in lines(folder)]


def test_a_run_killed_at_twenty_random_moments_ends_with_the_same_bits_and_tells_each_step_once(
    zygote: harness.Zygote, tmp_path: Path
) -> None:
    seed = random.randrange(2**32)
    chance = random.Random(seed)
    whole = zygote.start(*SMALL, "--out", tmp_path / "whole")
    folder = tmp_path / "killed"
    held = 0
    for number in range(20):
        life = zygote.start(*SMALL, "--save-every", 1, "--out", folder)
        if number == 10:
            stop_in_the_middle_of_a_write(folder, life.pid)
        elif number % 4 == 1:
            time.sleep(chance.uniform(0, 0.2))  # while it starts, mostly
        else:
            live_until(folder, life, held + chance.randint(1, 12))
            time.sleep(chance.uniform(0, 0.006))
        told_of = reached(folder)
        life.kill_session()
        assert life.wait() == -signal.SIGKILL, f"seed {seed}: {life.stderr}"
        state = load_local(folder)
        now = 0 if state is None else state["step"]
        assert now >= max(held, told_of - 1), f"seed {seed}"
        held = now
    last = zygote.start(*SMALL, "--save-every", 1, "--out", folder)
    assert (whole.wait(), last.wait()) == (0, 0), whole.stderr + last.stderr
    assert different(weights(tmp_path / "whole"), weights(folder)) == [], f"seed {seed}"
    assert told(folder) == told(tmp_path / "whole"), f"seed {seed}"
    assert {path.name for path in folder.iterdir()} == {
        ".lock",
        "metrics.jsonl",
        "snapshot.pt",
        "snapshot.prev.pt",
        "status.json",
    }


def live_until(folder: Path, life: harness.Forked, step: int) -> None:
    harness.until(lambda: reached(folder) >= step or life.ended(), f"step {step}")


def test_ranks_that_are_killed_together_end_with_the_same_bits(
    zygote: harness.Zygote, tmp_path: Path
) -> None:
    flags = [*SMALL, "--epochs", 2, "--model", "mnist", "--image-size", 12]
    whole = zygote.ranks(2, *flags, "--out", tmp_path / "whole")
    assert [rank.wait() for rank in whole] == [0, 0], whole[0].stderr
    folder = tmp_path / "killed"
    for step in (7, 31, 44):
        ranks = zygote.ranks(2, *flags, "--save-every", 5, "--out", folder)
        live_until(folder, ranks[0], step)
        for rank in ranks:
            rank.kill_session()
        assert [rank.wait() for rank in ranks] == [-signal.SIGKILL] * 2
    leftover = folder / TEMPORARY.format(3)
    leftover.write_bytes(b"what a rank wrote that is no writer now")
    last = zygote.ranks(2, *flags, "--save-every", 5, "--out", folder)
    assert [rank.wait() for rank in last] == [0, 0], last[0].stderr
    assert not leftover.exists()
    assert different(weights(tmp_path / "whole"), weights(folder)) == []
    assert told(folder) == told(tmp_path / "whole")


def test_a_restart_that_only_one_node_has_counted_keeps_the_snapshots_of_a_run_that_began_fresh(
    zygote: harness.Zygote, tmp_path: Path
) -> None:
    """An agent of torchrun that joins again because another node's rank has failed counts no restart of its own."""
    first = zygote.start(*SMALL, "--epochs", 1, "--out", tmp_path)
    assert first.wait() == 0, first.stderr
    flags = [*SMALL, "--epochs", 2, "--fresh", "--out", tmp_path]
    shared = {"WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": harness.free_port()}
    ranks = [
        zygote.start(*flags, RANK=rank, LOCAL_RANK=0, TORCHELASTIC_RESTART_COUNT=rank, **shared)
        for rank in range(2)
    ]
    assert [rank.wait() for rank in ranks] == [0, 0], ranks[0].stderr + ranks[1].stderr
    assert "resumed at step 30 (epoch 1)" in ranks[0].stdout


def test_ranks_that_torchrun_restarts_go_on_from_the_newest_snapshot_although_the_run_began_fresh(
    zygote: harness.Zygote, tmp_path: Path
) -> None:
    whole = zygote.ranks(2, *SMALL, "--epochs", 2, "--out", tmp_path / "whole")
    stale = zygote.start(*SMALL, "--epochs", 1, "--seed", 5, "--out", tmp_path / "restarted")
    assert [rank.wait() for rank in (*whole, stale)] == [0, 0, 0]
    own = ["--max-restarts", 1, harness.ROOT / "train" / "main.py", "--fresh", "--save-every", 4]
    failing = ["--fail-rank", 1, "--fail-step", 40]
    done = harness.torchrun(2, *own, *failing, *SMALL, "--epochs", 2, "--out", tmp_path / "restarted")
    assert done.returncode == 0, done.stderr
    assert "resumed at step 36 (epoch 1)" in done.stdout
    assert "rank 1 exits with 1 on purpose" in done.stderr
    assert "rank 0: after step 39: the connection to the other ranks is lost (" in done.stderr
    assert "); the same command goes on from the snapshot of step 36" in done.stderr
    assert "Traceback" not in done.stderr
    assert different(weights(tmp_path / "whole"), weights(tmp_path / "restarted")) == []
    assert told(tmp_path / "restarted") == told(tmp_path / "whole")
