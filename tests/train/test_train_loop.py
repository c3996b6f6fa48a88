"""What the loop hands to its parts: each flag reaches the one that it is for, and each draw depends on what it should.

All in one process, with its clock where time counts: what many ranks compute together is proven elsewhere.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

import torch
from torch import Tensor, nn

from train import data, models, parallel
from train.augment import Augment
from train.config import make
from train.dist import Place, Ranks
from train.errors import TrainError
from train.metrics import METRICS, Metrics
from train.sampler import GlobalBatches
from train.trainer import Trainer

pytestmark = pytest.mark.torch
SAMPLES, BATCH, SIDE = 12, 4, 16
Look = Callable[[nn.Module, Tensor, Tensor], None]


def trainer(
    out: Path, *, rank: int = 0, world: int = 1, mirrored: bool = True, look: Look | None = None, **flags: Any
) -> Trainer:
    """A trainer on 12 images of 3x16x16. A `rank` of several takes its own shards and meets nobody. `look` is shown
    the network, what goes in, and what comes out."""
    settings = {"synthetic_size": SAMPLES, "image_size": SIDE, "batch_size": BATCH, **flags}
    config = make(dataset="synthetic", out=str(out), tensorboard=False, **settings)
    ranks = Ranks(place=Place(rank=rank, world=world), device=torch.device("cpu"))
    loaded = dataclasses.replace(data.load(config, download=False), mirrored=mirrored)
    module = models.build(config.model, shape=loaded.shape, classes=loaded.classes, seed=config.seed)
    if look is not None:
        module.register_forward_hook(lambda layers, given, found: look(layers, given[0], found))
    spread = parallel.build(config, ranks, module, shape=loaded.shape)
    metrics = Metrics(out, enabled=True, tensorboard=False)
    metrics.open(0)
    return Trainer(config=config, ranks=ranks, parallel=spread, data=loaded, metrics=metrics)


@pytest.mark.parametrize("flags", [{}, {"augment": True}, {"augment": True, "mirrored": False}])
def test_images_are_augmented_in_training_alone_by_seed_epoch_and_sample(
    tmp_path: Path, flags: dict[str, Any]
) -> None:
    seen: dict[bool, list[Tensor]] = {True: [], False: []}
    subject = trainer(
        tmp_path,
        epochs=2,
        seed=5,
        look=lambda network, given, _found: seen[network.training].append(given),
        **flags,
    )
    subject.fit()
    images, expected = subject.data.train.inputs, []
    batches = GlobalBatches(samples=SAMPLES, batch_size=BATCH, seed=5)
    augment = Augment(seed=5, pad=SIDE // 8, flip=flags.get("mirrored", True))
    for epoch in range(2):
        for shard in batches.epoch(epoch):
            batch = images[shard.indices]
            augmented = augment(batch, epoch=epoch, indices=shard.indices)
            expected.append(augmented if flags else batch)
    assert all(map(torch.equal, seen[True], expected))
    assert len(seen[True]) == len(expected)
    assert [torch.equal(batch, subject.data.test.inputs) for batch in seen[False]] == [True] * 2


def test_random_layers_draw_by_the_seed_the_step_and_the_rank(tmp_path: Path) -> None:
    drawn = []
    for seed, rank in ((0, 0), (0, 1), (1, 0)):
        subject = trainer(
            tmp_path,
            rank=rank,
            world=2,
            seed=seed,
            look=lambda *_: drawn.append(torch.rand(1).item()),
        )
        subject.train_epoch()
    assert len(drawn) == len(set(drawn)) == 3 * SAMPLES // BATCH


@pytest.mark.parametrize(
    ("amp", "dtype"), [("none", torch.float32), ("bf16", torch.bfloat16), ("fp16", torch.float16)]
)
def test_the_gradient_is_clipped_as_it_is_and_not_as_it_is_scaled_for_half_precision(
    tmp_path: Path, amp: str, dtype: torch.dtype
) -> None:
    dtypes = []
    subject = trainer(
        tmp_path,
        amp=amp,
        clip=0.01,
        lr=0.5,
        momentum=0.0,
        look=lambda _layers, _given, found: dtypes.append(found.dtype),
    )
    before = [weight.detach().clone() for weight in subject.parallel.module.parameters()]
    subject.train_step(*next(subject.train_loader(list(subject.batches.epoch(0)))))
    moved = [now - then for now, then in zip(subject.parallel.module.parameters(), before, strict=True)]
    norm = torch.cat([change.flatten() for change in moved]).norm().item()
    assert norm == pytest.approx(0.5 * 0.01, rel=1e-3)
    assert dtypes == [dtype]


@pytest.mark.parametrize("amp", ["none", "bf16", "fp16"])
def test_gradients_that_are_not_finite_change_no_weight_and_end_the_run_unless_they_are_scaled(
    tmp_path: Path, amp: str
) -> None:
    subject = trainer(tmp_path, amp=amp, clip=1.0)
    weights = list(subject.parallel.module.parameters())
    weights[0].register_hook(lambda gradient: gradient * float("inf"))
    before = [weight.detach().clone() for weight in weights]
    batch = next(subject.train_loader(list(subject.batches.epoch(0))))
    if amp == "fp16":
        scale = subject.parallel.scaler.get_scale()
        subject.train_step(*batch)
        assert subject.parallel.scaler.get_scale() == scale / 2
    else:
        with pytest.raises(TrainError, match="step 1, rank 0: the gradients are not finite"):
            subject.train_step(*batch)
    assert all(map(torch.equal, weights, before))


def test_a_share_is_computed_in_as_many_parts_as_asked_for(tmp_path: Path) -> None:
    sizes = []
    subject = trainer(tmp_path, accumulate=2, look=lambda _layers, given, _found: sizes.append(len(given)))
    subject.train_epoch()
    assert sizes == [BATCH // 2] * 2 * (SAMPLES // BATCH)


def test_validation_keeps_nothing_for_a_backward_pass_and_the_first_of_equal_epochs_is_the_best(
    tmp_path: Path,
) -> None:
    graphs = []
    subject = trainer(
        tmp_path,
        epochs=3,
        lr=1e-30,
        look=lambda layers, _given, found: graphs.append((layers.training, found.requires_grad)),
    )
    subject.fit()
    assert set(graphs) == {(True, True), (False, False)}
    assert subject.standing()["best_epoch"] == 1
    assert subject.checkpoints.newest == subject.step
    again = trainer(tmp_path, epochs=3)
    again.resume()
    assert again.checkpoints.newest == subject.step


def test_images_and_weights_are_laid_out_with_the_channel_last_where_asked_for(tmp_path: Path) -> None:
    def look(layers: nn.Module, given: Tensor, _found: Tensor) -> None:
        weight = layers.get_parameter("conv2.weight")
        layouts.append([t.is_contiguous(memory_format=torch.channels_last) for t in (given, weight)])

    for asked in (True, False):
        layouts: list[list[bool]] = []
        trainer(tmp_path, channels_last=asked, epochs=1, look=look).fit()
        assert layouts == [[asked, asked]] * 4


def test_compile_is_given_the_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    graphs = []

    def count(graph: torch.fx.GraphModule, _inputs: list[Tensor]) -> Callable[..., Any]:
        graphs.append(graph)
        return graph.forward

    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend=count))
    subject = trainer(tmp_path, compile=True)
    subject.train_step(*next(subject.train_loader(list(subject.batches.epoch(0)))))
    assert len(graphs) == 1


def test_processes_that_load_are_as_many_and_as_far_ahead_as_asked_for_and_each_rank_draws_its_own(
    tmp_path: Path,
) -> None:
    seeds = set()
    for rank in range(2):
        subject = trainer(tmp_path, rank=rank, world=2, workers=2, prefetch=5, seed=7)
        for loader in (subject.train_loader, subject.test_loader):
            inner = loader._loader
            assert inner is not None
            assert (inner.num_workers, inner.prefetch_factor) == (2, 5)
            seeds.add(inner.generator.initial_seed())
    assert len(seeds) == 2


class Slow(data.Tensors):
    """Each batch takes a quarter of a second of the clock."""

    def __init__(self, tensors: data.Tensors, wait: Callable[[float], None]) -> None:
        super().__init__(tensors.inputs, tensors.labels)
        self.wait = wait

    def __getitems__(self, indices: list[int]) -> data.Batch:
        self.wait(0.25)
        return super().__getitems__(indices)


def test_snapshots_and_validation_count_for_no_speed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]

    def wait(seconds: float) -> None:
        now[0] += seconds

    def sync(_descriptor: int) -> None:
        wait(1000.0)

    def compute(layers: nn.Module, _given: Tensor, _found: Tensor) -> None:
        wait(0.75 if layers.training else 100.0)

    flags = {"epochs": 2, "log_every": 2, "save_every": 1, "peak_tflops": 1e-6, "look": compute}
    subject = trainer(tmp_path, **flags)
    subject.train_loader = type(subject.train_loader)(Slow(subject.data.train, wait))
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(os, "fsync", sync)
    subject.fit()
    lines = [json.loads(line) for line in (tmp_path / METRICS).read_text(encoding="utf-8").splitlines()]
    assert [(line["kind"], line["step"]) for line in lines] == [
        *[("train", 2), ("train", 3), ("epoch", 3)],
        *[("train", 4), ("train", 6), ("epoch", 6)],
    ]
    for line in lines:
        assert (line["step_seconds"], line["data_wait"], line["samples_per_second"]) == (1.0, 0.25, 4.0)
        assert line["mfu"] == pytest.approx(4 * subject.parallel.flops / 1e6)
    assert [line["seconds"] for line in lines if line["kind"] == "epoch"] == [3.0, 3.0]
