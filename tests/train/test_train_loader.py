"""Worker processes live as long as the run: over epochs, exceptions and signals, and no longer than their rank."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import train_harness as harness

pytest.importorskip("torch")

import torch

from train.data import Tensors
from train.loader import Loader
from train.sampler import GlobalBatches, Shard

pytestmark = [pytest.mark.torch, pytest.mark.xdist_group("train_loader")]  # one worker runs the jobs
SCRIPT = Path(__file__).with_name("loader_checks.py")
LINUX = pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="reads /proc")


@pytest.fixture(scope="module")
def seen() -> dict[str, Any]:
    """What happened in a process that reads with workers."""
    done = harness.python(SCRIPT)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@LINUX
def test_workers_start_and_go_on_while_the_whole_group_is_told_to_end(seen: dict[str, Any]) -> None:
    assert seen["start_under_signals"] == {"right": True, "readers": 2, "signals_seen": True}


@LINUX
def test_the_same_workers_read_every_epoch_however_the_one_before_ended(seen: dict[str, Any]) -> None:
    assert seen["live_on"] == {"right": [True] * 5, "readers": 2, "leftover": 0, "gone": True}


@LINUX
def test_closing_in_the_middle_of_an_epoch_ends_the_workers(seen: dict[str, Any]) -> None:
    assert seen["close_in_the_middle"] == {"gone": True}


@LINUX
def test_closing_ends_a_worker_that_hangs_in_a_read(seen: dict[str, Any]) -> None:
    assert seen["close_on_a_read_that_hangs"] == {"gone": True}


@LINUX
def test_what_a_dataset_raises_comes_through_and_the_workers_stay(seen: dict[str, Any]) -> None:
    assert seen["meet_a_bad_sample"] == {"seen": True, "right_afterwards": True}


@LINUX
def test_a_worker_that_dies_is_said_to_have_died(seen: dict[str, Any]) -> None:
    assert "data-loading process died" in seen["lose_a_worker"]["seen"]
    assert "--workers" in seen["lose_a_worker"]["seen"]


@LINUX
def test_workers_share_the_memory_of_the_dataset(seen: dict[str, Any]) -> None:
    assert seen["share_memory"] == {"sums": [0.0, 46.0]}


@LINUX
def test_a_dataset_that_cannot_be_sent_to_workers_is_refused(seen: dict[str, Any]) -> None:
    assert "top of a module" in seen["refuse_what_cannot_be_sent"]["seen"]


@LINUX
def test_workers_and_their_server_end_when_the_rank_is_killed() -> None:
    rank = harness.start([SCRIPT, "wait"], cwd=harness.ROOT)
    try:
        assert rank.stdout is not None
        helpers = json.loads(rank.stdout.readline())
        assert len(helpers) == 3
        os.kill(rank.pid, signal.SIGKILL)
        deadline = time.monotonic() + harness.HANG / 2
        while any(map(_runs, helpers)) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert not any(map(_runs, helpers))
    finally:
        harness.finish(rank)


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def plan(epoch: int, samples: int = 9) -> list[Shard]:
    return list(GlobalBatches(samples=samples, batch_size=4, seed=0).epoch(epoch))


def test_without_workers_each_epoch_is_read_by_its_own_plan() -> None:
    loader = Loader(Tensors(torch.arange(9.0), torch.arange(9)))
    for epoch in range(3):
        assert [labels.tolist() for _inputs, labels, _shard in loader(plan(epoch))] == [
            shard.indices for shard in plan(epoch)
        ]
    begun = loader(plan(0))
    next(begun)
    assert len(list(loader(plan(1)))) == 3
    assert list(begun) == []
    loader.close()
    loader.close()
    with pytest.raises(ValueError, match="closed"):
        loader(plan(0))


def test_an_empty_plan_reads_nothing() -> None:
    assert list(Loader(Tensors(torch.arange(9.0), torch.arange(9)))([])) == []


def test_reading_draws_nothing_from_the_global_random_state() -> None:
    before = torch.get_rng_state()
    list(Loader(Tensors(torch.arange(9.0), torch.arange(9)))(plan(0)))
    assert torch.equal(torch.get_rng_state(), before)


def test_a_dataset_on_a_device_is_read_in_this_process_and_not_pinned() -> None:
    away = Tensors(torch.empty(9, 3, device="meta"), torch.empty(9, dtype=torch.int64, device="meta"))
    loader = Loader(away, workers=2, pin=True)
    shapes = [(inputs.device.type, tuple(inputs.shape)) for inputs, _labels, _shard in loader(plan(0))]
    assert shapes == [("meta", (4, 3)), ("meta", (4, 3)), ("meta", (1, 3))]
