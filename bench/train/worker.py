"""One side of a benchmark case: our Trainer, or the training loop of a program of pytorch/examples, on the same data.

Each side runs in a process of its own and computes an epoch for each line that it reads.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
import runpy
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from train import models
from train.components import assemble
from train.config import make
from train.data.datasets import Datasets, InMemoryDataset, move_to_device
from train.distributed.communicator import Communicator
from train.distributed.device import keep_freed_memory, move, select_device, set_numerics
from train.distributed.rank_info import RankInfo
from train.errors import UsageError
from train.parallel import select
from train.parallel.ddp import HALF_PRECISION
from train.record.output import Metrics
from train.task import classification, on_inputs
from train.trainer import Trainer

LR, MOMENTUM, WEIGHT_DECAY = 0.01, 0.9, 1e-4


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """What is timed: `steps` batches of random images per turn.

    `peer` is the program of pytorch/examples whose loop is the other side, or empty; with `jpeg` the images are
    decoded from JPEG bytes as they are read.
    """

    model: str
    shape: tuple[int, int, int]
    classes: int
    batch_size: int
    steps: int
    peer: str = ""
    jpeg: bool = False
    flags: dict[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def name(self) -> str:
        flags = [name if value is True else str(value) for name, value in self.flags.items() if value]
        jpeg = ["jpeg"] if self.jpeg else []
        return " ".join([self.model, *jpeg, str(self.shape[-1]), f"b{self.batch_size}", *flags])


def serve(task: dict[str, Any]) -> None:
    """Run as one side: compute an epoch for each line on stdin, and answer with a line of JSON."""
    case = Case(**{**task["case"], "shape": tuple(task["case"]["shape"])})
    device = select_device(make(device=task["device"]), RankInfo())
    if device.type == "cuda":
        torch.cuda.set_device(device)
    module = models.build(case.model, shape=case.shape, classes=case.classes, seed=0)
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        run_epoch: Callable[[], object]
        if task["side"] == "ours":
            trainer = our_trainer(case, device, module, Path(folder))
            stack.callback(trainer.close)
            run_epoch = trainer.train_epoch
        else:
            run_epoch = peer_epoch(case, device, module, Path(task["peers"]))
        for _ in sys.stdin:
            seconds, figures = timed(run_epoch, device)
            answer = figures if isinstance(figures, dict) else {}
            print(json.dumps({**answer, "seconds": seconds}), flush=True)


def random_images(case: Case) -> InMemoryDataset:
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(case.steps * case.batch_size, *case.shape, generator=generator)
    return InMemoryDataset(images, torch.randint(0, case.classes, (len(images),), generator=generator))


def load_datasets(case: Case) -> Datasets:
    """Return random images in memory, or for a jpeg case images that are decoded as they are read."""
    if not case.jpeg:
        images = random_images(case)
        return Datasets(
            train=images, test=images, task=classification(), shape=case.shape, classes=case.classes
        )
    try:
        from bench.train.data import JpegImages
    except ImportError as error:
        raise UsageError(
            f"the jpeg case needs Pillow and numpy ({error}): pip install torchvision"
        ) from error
    pictures = JpegImages(case.steps * case.batch_size, case.shape[-1])
    return Datasets(
        train=pictures,
        test=pictures,
        task=classification(),
        shape=case.shape,
        classes=case.classes,
        preprocess=on_inputs(lambda inputs: inputs.float() / 255),
    )


def our_trainer(case: Case, device: torch.device, module: nn.Module, folder: Path) -> Trainer:
    """Return the Trainer of a user's run of one process, which writes its metrics to `folder`."""
    config = make(
        dataset="synthetic",
        batch_size=case.batch_size,
        out=str(folder),
        epochs=10**6,
        optimizer="sgd",
        lr=LR,
        momentum=MOMENTUM,
        weight_decay=WEIGHT_DECAY,
        **case.flags,
    )
    comm = Communicator(info=RankInfo(), device=device)
    set_numerics(config)
    if device.type == "cpu":
        keep_freed_memory()
    datasets = load_datasets(case)
    if config.data.on_device:
        datasets = move_to_device(datasets, device)
    metrics = Metrics(folder, enabled=True)
    metrics.open(0)
    strategy = select.build(config, comm, module, datasets.task, datasets.example)
    return assemble(config, comm, strategy, datasets, metrics).trainer


def peer_epoch(case: Case, device: torch.device, module: nn.Module, peers: Path) -> Callable[[], object]:
    """Return a function that runs one epoch of the peer's `train` function, with our precision and memory format."""
    train = runpy.run_path(str(peers / case.peer), run_name="peer")["train"]
    channels_last = bool(case.flags.get("channels_last"))
    module = move(module, device, channels_last=channels_last)
    layout = torch.channels_last if channels_last else torch.contiguous_format
    storage = device if case.flags.get("on_device") else torch.device("cpu")
    images = random_images(case)
    batches = zip(images.inputs.split(case.batch_size), images.labels.split(case.batch_size), strict=True)
    loader = [
        (inputs.to(storage).contiguous(memory_format=layout), labels.to(storage))
        for inputs, labels in batches
    ]
    network: nn.Module = Autocast(module, device, case.flags.get("amp", "none"))
    if case.flags.get("compile"):
        network.compile()
    optimizer = torch.optim.SGD(module.parameters(), lr=LR, momentum=MOMENTUM, weight_decay=WEIGHT_DECAY)
    args = SimpleNamespace(no_accel=device.type == "cpu", print_freq=10, log_interval=10, dry_run=False)
    if case.peer == "mnist/main.py":
        network = nn.Sequential(network, nn.LogSoftmax(1))
        return silent(lambda: train(args, network, device, BatchList(loader), optimizer, 1))
    criterion = nn.CrossEntropyLoss()
    return silent(lambda: train(loader, network, criterion, optimizer, 0, device, args))


class Autocast(nn.Module):
    """The network under autocast with float32 scores, as a user of the peer would write it."""

    def __init__(self, module: nn.Module, device: torch.device, amp: str) -> None:
        super().__init__()
        self.module, self.device_type, self.amp = module, device.type, amp

    def forward(self, images: Tensor) -> Tensor:
        dtype = HALF_PRECISION.get(self.amp, torch.bfloat16)
        with torch.autocast(self.device_type, dtype, enabled=self.amp != "none"):
            scores: Tensor = self.module(images)
        return scores.float()


class BatchList(list[tuple[Tensor, Tensor]]):
    """Batches ready in memory, with the `dataset` whose length the peer's progress line prints."""

    @property
    def dataset(self) -> range:
        return range(sum(len(labels) for _, labels in self))


def silent(function: Callable[[], object]) -> Callable[[], object]:
    """Return `function` with its progress lines discarded; they are still formatted, as ours are to a file."""

    def call() -> object:
        with contextlib.redirect_stdout(io.StringIO()):
            return function()

    return call


def timed(function: Callable[[], object], device: torch.device) -> tuple[float, object]:
    """Return (seconds until the device is done, too, what `function` returned)."""
    started = time.perf_counter()
    result = function()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - started, result
