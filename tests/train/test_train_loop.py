"""The training loop: each flag has its effect, and random draws depend on seed, step and rank only.

All in one process, with a fake clock for tests of time.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

import torch
from torch import Tensor, nn

from train import models
from train.components import assemble
from train.config import make
from train.data.augment import Augment
from train.data.datasets import InMemoryDataset, load
from train.data.readers import MapReader, open_reader
from train.data.sampler import GlobalBatchSampler
from train.distributed.communicator import Communicator
from train.distributed.rank_info import RankInfo
from train.flags import DataFlags
from train.parallel import select
from train.record.output import METRICS, RunOutput
from train.trainer import Trainer

pytestmark = pytest.mark.torch
SAMPLES, BATCH, SIDE = 12, 4, 16
Hook = Callable[[nn.Module, Tensor, Tensor], None]  # the model, its inputs and its outputs


def make_trainer(
    out: Path, *, rank: int = 0, world_size: int = 1, hook: Hook | None = None, **flags: Any
) -> Trainer:
    """Return a trainer on 12 images of 3x16x16. A `rank` of several takes its own shares, without a process
    group. `hook` is called after each forward pass."""
    settings = {"synthetic_size": SAMPLES, "image_size": SIDE, "batch_size": BATCH, **flags}
    config = make(dataset="synthetic", out=str(out), tensorboard=False, **settings)
    info = RankInfo(rank=rank, world_size=world_size)
    comm = Communicator(info=info, device=torch.device("cpu"))
    datasets = load(config, download=False)
    if datasets.augment is not None:
        augment = Augment(seed=config.optimization.seed, pad=SIDE // 8, flip=True).of_batch
        datasets = dataclasses.replace(datasets, augment=augment)
    module = models.build(
        "small", shape=datasets.shape, classes=datasets.classes, seed=config.optimization.seed
    )
    if hook is not None:
        module.register_forward_hook(lambda model, inputs, outputs: hook(model, inputs[0], outputs))
    strategy = select.build(config, comm, module, datasets.task, datasets.example)
    metrics = RunOutput(out, enabled=True)
    metrics.open(0)
    return assemble(config, comm, strategy, datasets, metrics).trainer


@pytest.mark.parametrize("flags", [{}, {"augment": True}])
def test_images_are_augmented_only_in_training(tmp_path: Path, flags: dict[str, Any]) -> None:
    inputs_by_mode: dict[bool, list[Tensor]] = {True: [], False: []}
    trainer = make_trainer(
        tmp_path,
        epochs=2,
        seed=5,
        hook=lambda model, inputs, _outputs: inputs_by_mode[model.training].append(inputs),
        **flags,
    )
    trainer.fit()
    images, expected = trainer.datasets.train.inputs, []
    sampler = GlobalBatchSampler(samples=SAMPLES, batch_size=BATCH, seed=5)
    augment = Augment(seed=5, pad=SIDE // 8, flip=True)
    for epoch in range(2):
        for one in sampler.batches(epoch):
            batch = images[one.indices]
            augmented = augment(batch, epoch=epoch, indices=one.indices)
            expected.append(augmented if flags else batch)
    assert all(map(torch.equal, inputs_by_mode[True], expected))
    assert len(inputs_by_mode[True]) == len(expected)
    assert [torch.equal(batch, trainer.datasets.test.inputs) for batch in inputs_by_mode[False]] == [True] * 2


def test_random_layers_draw_by_seed_step_and_rank(tmp_path: Path) -> None:
    drawn = []
    for seed, rank in ((0, 0), (0, 1), (1, 0)):
        trainer = make_trainer(
            tmp_path, rank=rank, world_size=2, seed=seed, hook=lambda *_: drawn.append(torch.rand(1).item())
        )
        trainer.train_epoch()
    assert len(drawn) == len(set(drawn)) == 3 * SAMPLES // BATCH


@pytest.mark.parametrize(("amp", "dtype"), [("bf16", torch.bfloat16), ("fp16", torch.float16)])
def test_clipping_applies_to_the_unscaled_gradient(tmp_path: Path, amp: str, dtype: torch.dtype) -> None:
    dtypes = []
    trainer = make_trainer(
        tmp_path,
        amp=amp,
        clip=0.01,
        lr=0.5,
        momentum=0.0,
        hook=lambda _model, _inputs, outputs: dtypes.append(outputs.dtype),
    )
    before = [weight.detach().clone() for weight in trainer.strategy.module.parameters()]
    trainer.train_step(*next(trainer.train_reader.batches()))
    moved = [now - then for now, then in zip(trainer.strategy.module.parameters(), before, strict=True)]
    norm = torch.cat([change.flatten() for change in moved]).norm().item()
    assert norm == pytest.approx(0.5 * 0.01, rel=1e-3)
    assert dtypes == [dtype]


def test_accumulate_splits_the_share_of_a_rank(tmp_path: Path) -> None:
    sizes = []
    trainer = make_trainer(
        tmp_path, accumulate=2, hook=lambda _model, inputs, _outputs: sizes.append(len(inputs))
    )
    trainer.train_epoch()
    assert sizes == [BATCH // 2] * 2 * (SAMPLES // BATCH)


def test_validation_builds_no_graph_and_first_of_equal_epochs_is_the_best(tmp_path: Path) -> None:
    graphs = []
    trainer = make_trainer(
        tmp_path,
        epochs=3,
        lr=1e-30,
        hook=lambda model, _inputs, outputs: graphs.append((model.training, outputs.requires_grad)),
    )
    trainer.fit()
    assert set(graphs) == {(True, True), (False, False)}
    assert trainer.status()["best_epoch"] == 1
    assert trainer.snapshots.newest_step == trainer.step
    resumed = make_trainer(tmp_path, epochs=3, lr=1e-30)
    resumed.resume()
    assert resumed.snapshots.newest_step == trainer.step


def test_channels_last_applies_to_images_and_weights(tmp_path: Path) -> None:
    def hook(model: nn.Module, inputs: Tensor, _outputs: Tensor) -> None:
        weight = model.get_parameter("conv2.weight")
        layouts.append([t.is_contiguous(memory_format=torch.channels_last) for t in (inputs, weight)])

    for channels_last in (True, False):
        layouts: list[list[bool]] = []
        make_trainer(tmp_path, channels_last=channels_last, epochs=1, hook=hook).fit()
        assert layouts == [[channels_last, channels_last]] * 4


def test_model_is_compiled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    graphs = []

    def count(graph: torch.fx.GraphModule, _inputs: list[Tensor]) -> Callable[..., Any]:
        graphs.append(graph)
        return graph.forward

    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend=count))
    trainer = make_trainer(tmp_path, compile=True)
    trainer.train_step(*next(trainer.train_reader.batches()))
    assert len(graphs) == 1


class RandomSamples(torch.utils.data.Dataset):
    """What a random transform of each sample draws."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[float, float, int]:
        return torch.rand(()).item(), random.random(), index


@pytest.mark.parametrize(
    ("dataset", "workers"),
    [(RandomSamples(), 0), (torch.utils.data.Subset(RandomSamples(), range(SAMPLES)), 1)],
    ids=["dataset", "subset"],
)
def test_what_a_dataset_draws_depends_on_seed_epoch_and_sample_only(
    dataset: torch.utils.data.Dataset[Any], workers: int
) -> None:
    def draws(epoch: int, first_step: int, **reading: int) -> dict[int, tuple[float, float]]:
        given = {"batch_size": BATCH, "seed": 3, "rank": 0, "world_size": 1, **reading}
        flags = DataFlags(workers=given.pop("workers", 0))
        reader = open_reader(dataset, flags, **given)
        found = {}
        for (one, other, indices), counts in reader.batches(epoch, first_step):
            rows = zip(indices.tolist(), one.tolist(), other.tolist(), strict=True)
            found |= {index: (a, b) for index, a, b in list(rows)[: counts.count]}
        reader.close()
        return found

    torch.manual_seed(1)
    state = torch.get_rng_state()
    whole = draws(2, 0)
    part = draws(2, 1, workers=workers, rank=1, world_size=3)
    assert torch.equal(torch.get_rng_state(), state)
    assert len(whole) == len(set(whole.values())) == SAMPLES
    assert part
    assert part == {index: whole[index] for index in part}
    assert draws(3, 0) != whole


class SlowDataset(InMemoryDataset):
    """Reading a batch takes a quarter of a second."""

    def __init__(self, tensors: InMemoryDataset, wait: Callable[[float], None]) -> None:
        super().__init__(tensors.inputs, tensors.labels)
        self.wait = wait

    def __getitems__(self, indices: list[int]) -> Any:
        self.wait(0.25)
        return super().__getitems__(indices)


def test_snapshots_and_validation_do_not_count_as_training_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [0.0]

    def wait(seconds: float) -> None:
        now[0] += seconds

    def sync(_descriptor: int) -> None:
        wait(1000.0)

    def compute(model: nn.Module, _inputs: Tensor, _outputs: Tensor) -> None:
        wait(0.75 if model.training else 100.0)

    flags = {"epochs": 2, "log_every": 2, "save_every": 1, "peak_tflops": 1e-6, "hook": compute}
    trainer = make_trainer(tmp_path, **flags)
    slow = SlowDataset(trainer.datasets.train, wait)
    trainer.train_reader = MapReader(slow, trainer.train_reader.sampler)
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(os, "fsync", sync)
    trainer.fit()
    lines = [json.loads(line) for line in (tmp_path / METRICS).read_text(encoding="utf-8").splitlines()]
    assert [(line["kind"], line["step"]) for line in lines] == [
        *[("train", 2), ("train", 3), ("epoch", 3)],
        *[("train", 4), ("train", 6), ("epoch", 6)],
    ]
    for line in lines:
        assert (line["step_seconds"], line["data_wait"], line["samples_per_second"]) == (1.0, 0.25, 4.0)
        assert line["mfu"] == pytest.approx(4 * trainer.strategy.flops / 1e6)
    assert [line["seconds"] for line in lines if line["kind"] == "epoch"] == [3.0, 3.0]
