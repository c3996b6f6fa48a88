"""The two sides of a benchmark: our Trainer, and the loop of a file of pytorch/examples, on the same data.

Each runs in a process of its own and computes an epoch for each line that it reads. It must not know which cases there
are, nor what becomes of the figures.
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

from train import dist, models, parallel
from train.config import make
from train.data import Data, Tensors, on_device
from train.errors import UsageError
from train.metrics import Metrics
from train.trainer import Trainer

SGD_OF_TORCH = {"lr": 0.01, "momentum": 0.9, "weight_decay": 1e-4}
SGD = {"optimizer": "sgd", **SGD_OF_TORCH}


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """What is timed: `steps` batches of random images a turn. `peer` is the file of pytorch/examples whose loop is
    the other side, or empty; with `jpeg` the images are decoded from JPEG bytes as they are read."""

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
        chosen = [name if value is True else str(value) for name, value in self.flags.items() if value]
        return " ".join(
            [self.model, *["jpeg"] * self.jpeg, str(self.shape[-1]), f"b{self.batch_size}", *chosen]
        )


def serve(wish: dict[str, Any]) -> None:
    """Be one side: compute an epoch for each line on stdin, and answer with a line of JSON."""
    case = Case(**{**wish["case"], "shape": tuple(wish["case"]["shape"])})
    device = dist.pick_device(make(device=wish["device"]), dist.Place())
    if device.type == "cuda":
        torch.cuda.set_device(device)
    module = models.build(case.model, shape=case.shape, classes=case.classes, seed=0)
    data = jpegs(case) if case.jpeg else noise(case)
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as later:
        if wish["side"] == "ours":
            trainer = our_trainer(case, device, module, data, Path(folder))
            later.callback(trainer.close)
            epoch = trainer.train_epoch
        else:
            epoch = their_epoch(case, device, module, data.train, Path(wish["examples"]))
        for _ in sys.stdin:
            seconds, seen = timed(epoch, device)
            print(json.dumps({**(seen or {}), "seconds": seconds}), flush=True)


def noise(case: Case) -> Data:
    """Random images, in memory."""
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(case.steps * case.batch_size, *case.shape, generator=generator)
    sets = Tensors(images, torch.randint(0, case.classes, (len(images),), generator=generator))
    return Data(train=sets, test=sets, shape=case.shape, classes=case.classes, prepare=lambda images: images)


def jpegs(case: Case) -> Data:
    """Pictures of the size of ImageNet's, decoded, cut and resized where they are read."""
    try:
        from train.bench_data import JpegImages
    except ImportError as error:
        raise UsageError(
            f"the jpeg case needs Pillow and numpy ({error}): pip install torchvision"
        ) from error
    sets = JpegImages(case.steps * case.batch_size, case.shape[-1])
    return Data(
        train=sets,
        test=sets,
        shape=case.shape,
        classes=case.classes,
        prepare=lambda images: images.float() / 255,
    )


def our_trainer(case: Case, device: torch.device, module: nn.Module, data: Data, folder: Path) -> Trainer:
    """The Trainer of a user's run of one process, writing its metrics into `folder`."""
    config = make(
        dataset="synthetic", batch_size=case.batch_size, out=str(folder), epochs=10**6, **SGD, **case.flags
    )
    ranks = dist.Ranks(place=dist.Place(), device=device)
    dist.choose_arithmetic(config)
    if device.type == "cpu":
        dist.keep_freed_memory()
    if config.on_device:
        data = on_device(data, device)
    metrics = Metrics(folder, enabled=True, tensorboard=False)
    metrics.open(0)
    spread = parallel.build(config, ranks, module, shape=case.shape)
    return Trainer(config=config, ranks=ranks, parallel=spread, data=data, metrics=metrics)


def their_epoch(
    case: Case, device: torch.device, module: nn.Module, data: Tensors, examples: Path
) -> Callable[[], object]:
    """One epoch of the peer's `train` function, with the precision and layout of ours. Raises `UsageError` where the
    file of pytorch/examples is missing."""
    path = examples / case.peer
    if not path.is_file():
        raise UsageError(f"{path} is missing: give --examples, a checkout of github.com/pytorch/examples")
    train = runpy.run_path(str(path), run_name="peer")["train"]
    layout = torch.channels_last if case.flags.get("channels_last") else torch.contiguous_format
    module = module.to(device, memory_format=layout)
    images, labels = data.inputs, data.labels
    where = device if case.flags.get("on_device") else torch.device("cpu")
    loader = [
        (part.to(where).contiguous(memory_format=layout), label.to(where))
        for part, label in zip(images.split(case.batch_size), labels.split(case.batch_size), strict=True)
    ]
    network: nn.Module = Cast(module, device, case.flags.get("amp", "none"))
    if case.flags.get("compile"):
        network = torch.compile(network)
    optimizer = torch.optim.SGD(module.parameters(), **SGD_OF_TORCH)
    args = SimpleNamespace(no_accel=device.type == "cpu", print_freq=10, log_interval=10, dry_run=False)
    if case.peer == "mnist/main.py":
        network = nn.Sequential(network, nn.LogSoftmax(1))
        return quietly(lambda: train(args, network, device, Batches(loader), optimizer, 1))
    criterion = nn.CrossEntropyLoss()
    return quietly(lambda: train(loader, network, criterion, optimizer, 0, device, args))


class Cast(nn.Module):
    """The network under autocast; its scores are float32, as a user of the peer would write it."""

    def __init__(self, module: nn.Module, device: torch.device, amp: str) -> None:
        super().__init__()
        self.module, self.device_type, self.amp = module, device.type, amp

    def forward(self, images: Tensor) -> Tensor:
        with torch.autocast(
            self.device_type, parallel.HALF.get(self.amp, torch.bfloat16), enabled=self.amp != "none"
        ):
            return self.module(images).float()


class Batches(list[tuple[Tensor, Tensor]]):
    """Ready batches that also have the `dataset` whose length the peer's progress line names."""

    @property
    def dataset(self) -> range:
        return range(sum(len(labels) for _, labels in self))


def quietly(act: Callable[[], object]) -> Callable[[], object]:
    """`act` with its progress lines kept off the table; they are still written, as ours are to a file."""

    def silent() -> object:
        with contextlib.redirect_stdout(io.StringIO()):
            return act()

    return silent


def timed(act: Callable[[], Any], device: torch.device) -> tuple[float, Any]:
    """(seconds until the device is done too, what `act` returned)."""
    begun = time.perf_counter()
    seen = act()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - begun, seen
