"""Worker processes live as long as the run: over epochs, exceptions and signals, and no longer than their
rank."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

import torch
from support.training import launch

from train.data.datasets import InMemoryDataset
from train.data.loader import Loader
from train.data.sampler import GlobalBatchSampler, RankBatch

pytestmark = [pytest.mark.torch, pytest.mark.xdist_group("train_loader")]
linux_only = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


@pytest.fixture(scope="module")
def rank() -> Iterator[launch.Run]:
    """A process that reads with workers until it is killed."""
    run = launch.start(launch.CHECKS / "loader_checks.py")
    yield run
    run.kill_session()
    run.wait()


@pytest.fixture(scope="module")
def report(rank: launch.Run) -> dict[str, Any]:
    """The results of loader_checks.py."""
    line = rank.read_line()
    if not line:
        rank.wait()
    assert line, rank.stderr
    return json.loads(line)


@linux_only
def test_workers_start_and_continue_while_the_group_gets_sigterm(report: dict[str, Any]) -> None:
    assert report["start_under_signals"] == {"correct": True, "readers": 2, "signalled": True}


@linux_only
def test_same_workers_read_every_epoch_however_the_last_one_ended(report: dict[str, Any]) -> None:
    assert report["read_many_epochs"] == {"correct": [True] * 5, "readers": 2, "left": 0, "exited": True}


@linux_only
def test_close_in_the_middle_of_an_epoch_ends_the_workers(report: dict[str, Any]) -> None:
    assert report["close_in_the_middle"] == {"exited": True}


@linux_only
def test_close_ends_a_worker_that_hangs_in_a_read(report: dict[str, Any]) -> None:
    assert report["close_during_hanging_read"] == {"exited": True}


@linux_only
def test_dataset_exception_is_raised_and_workers_survive(report: dict[str, Any]) -> None:
    assert report["read_bad_sample"] == {"raised": True, "correct afterwards": True}


@linux_only
def test_death_of_a_worker_is_reported(report: dict[str, Any]) -> None:
    assert "data-loading process died" in report["lose_a_worker"]["message"]
    assert "--workers" in report["lose_a_worker"]["message"]


@linux_only
def test_workers_share_the_memory_of_the_dataset(report: dict[str, Any]) -> None:
    assert report["share_memory"] == {"sums": [0.0, 46.0]}


@linux_only
def test_unpicklable_dataset_is_refused(report: dict[str, Any]) -> None:
    assert "top of a module" in report["refuse_unpicklable_dataset"]["message"]


@linux_only
def test_workers_and_their_server_exit_when_the_rank_is_killed(
    rank: launch.Run, report: dict[str, Any]
) -> None:
    helpers = json.loads(rank.read_line())
    assert len(helpers) == 3
    os.kill(rank.pid, signal.SIGKILL)
    deadline = time.monotonic() + launch.HANG / 2
    while any(map(is_running, helpers)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(map(is_running, helpers))


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def batches(epoch: int) -> list[RankBatch]:
    return list(GlobalBatchSampler(samples=9, batch_size=4, seed=0).batches(epoch))


def test_without_workers_each_epoch_has_its_own_order() -> None:
    loader = Loader(InMemoryDataset(torch.arange(9.0), torch.arange(9)))
    for epoch in range(3):
        assert [labels.tolist() for (_inputs, labels), _ in loader(batches(epoch))] == [
            one.indices for one in batches(epoch)
        ]
    unfinished = loader(batches(0))
    next(unfinished)
    assert len(list(loader(batches(1)))) == 3
    assert list(unfinished) == []
    loader.close()
    loader.close()
    with pytest.raises(ValueError, match="closed"):
        loader(batches(0))


def test_epoch_without_batches_reads_nothing() -> None:
    assert list(Loader(InMemoryDataset(torch.arange(9.0), torch.arange(9)))([])) == []


def test_reading_does_not_change_the_global_random_state() -> None:
    before = torch.get_rng_state()
    list(Loader(InMemoryDataset(torch.arange(9.0), torch.arange(9)))(batches(0)))
    assert torch.equal(torch.get_rng_state(), before)


def test_dataset_on_a_device_is_read_in_this_process_unpinned() -> None:
    labels = torch.empty(9, dtype=torch.int64, device="meta")
    on_device = InMemoryDataset(torch.empty(9, 3, device="meta"), labels)
    loader = Loader(on_device, workers=2, pin=True)
    shapes = [(inputs.device.type, tuple(inputs.shape)) for (inputs, _labels), _ in loader(batches(0))]
    assert shapes == [("meta", (4, 3)), ("meta", (4, 3)), ("meta", (1, 3))]
