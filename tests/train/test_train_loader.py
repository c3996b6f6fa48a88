"""Worker processes live as long as the run: over epochs, exceptions and signals, and no longer than their
rank."""

from __future__ import annotations

import json
import signal
import sys

import pytest

pytest.importorskip("torch")

import torch
from support.agentnode import alive
from support.training import launch

from train.data.datasets import InMemoryDataset
from train.data.loader import Loader
from train.data.sampler import GlobalBatchSampler, RankBatch

pytestmark = [pytest.mark.torch, pytest.mark.xdist_group("train_loader")]


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_workers_live_as_long_as_the_run_and_no_longer_than_their_rank() -> None:
    rank = launch.start(launch.CHECKS / "loader_checks.py")
    line = rank.read_line()
    if not line:
        rank.wait()
    assert line, rank.stderr
    report = json.loads(line)
    assert report["start_under_signals"] == {"correct": True, "readers": 2, "signalled": True}
    epochs = {"correct": [True] * 5, "readers": 2, "left": 0, "exited": True}  # however the last one ended
    assert report["read_many_epochs"] == epochs
    assert report["close_during_hanging_read"] == {"exited": True}
    assert report["read_bad_sample"] == {"raised": True, "correct afterwards": True}
    assert "data-loading process died" in report["lose_a_worker"]["message"]
    assert "--workers" in report["lose_a_worker"]["message"]
    assert "top of a module" in report["refuse_unpicklable_dataset"]["message"]

    helpers = json.loads(rank.read_line())
    assert len(helpers) == 3
    rank.signal(signal.SIGKILL)
    launch.until(lambda: not any(map(alive, helpers)), "the workers and their server exit")
    rank.wait()


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


def test_dataset_on_a_device_is_read_in_this_process_unpinned() -> None:
    labels = torch.empty(9, dtype=torch.int64, device="meta")
    on_device = InMemoryDataset(torch.empty(9, 3, device="meta"), labels)
    loader = Loader(on_device, workers=2, pin=True)
    shapes = [(inputs.device.type, tuple(inputs.shape)) for (inputs, _labels), _ in loader(batches(0))]
    assert shapes == [("meta", (4, 3)), ("meta", (4, 3)), ("meta", (1, 3))]
