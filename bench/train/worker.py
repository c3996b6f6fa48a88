"""One side of a benchmark case: our Trainer, or the training loop of a program of pytorch/examples, on the
same data.

Each side runs in a process of its own and computes an epoch for each line that it reads. `theirs` is the
peer's `train` function as it is; `theirs_kept` is the same in a process whose glibc keeps freed memory, as
that of our trainer does.

Equal on all sides: the network and its first weights, the optimizer and its settings, the precision, the
memory format, cudnn.benchmark, the number of threads, and the batches, which are in memory before the clock
starts; the peer gets them assembled, and ours reads them by index.

In a jpeg case both read the same files with the same number of workers, from the page cache. Equal:
torchvision's ImageFolder, Pillow's decoder, RandomResizedCrop to the same size and RandomHorizontalFlip,
batches in random order, pinned memory on a GPU, two batches prefetched per worker, and workers that live from
epoch to epoch. (imagenet/main.py starts new workers for each epoch, which would count for too much here,
where an epoch has a few steps.) Different: the peer's workers make float32 tensors and normalize them image
by image (ToTensor, Normalize); ours send uint8, and the batch is normalized on the device. The crops are
drawn from the same distribution, but are not the same ones: ours are a function of seed, epoch and sample.
The peer's workers are forked, and so inherit the setting of glibc; ours come from a fork server and do not.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
import resource
import runpy
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sized
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from train import models
from train.components import assemble
from train.config import Config, make
from train.data.datasets import Datasets, InMemoryDataset, load, move_to_device
from train.distributed.communicator import Communicator
from train.distributed.device import keep_freed_memory, move, select_device, set_numerics
from train.distributed.rank_info import RankInfo
from train.errors import UsageError
from train.parallel import select
from train.parallel.strategy import AMP_DTYPES
from train.record.output import RunOutput
from train.task import classification
from train.trainer import Trainer

LR, MOMENTUM, WEIGHT_DECAY = 0.01, 0.9, 1e-4


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """What is timed: `steps` batches of random images per turn.

    `peer` is the program of pytorch/examples whose loop is the other side, or empty; with `jpeg` the images
    are decoded from JPEG files as they are read.
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
        flags = [
            name if value is True else str(value) if isinstance(value, str) else f"{name}={value}"
            for name, value in self.flags.items()
            if value
        ]
        jpeg = ["jpeg"] if self.jpeg else []
        return " ".join([self.model, *jpeg, str(self.shape[-1]), f"b{self.batch_size}", *flags])


@dataclass(frozen=True, slots=True)
class Side:
    """What computes an epoch and returns its figures, and what it trains with."""

    run_epoch: Callable[[], dict[str, Any]]
    module: nn.Module
    optimizer: torch.optim.Optimizer

    @property
    def settings(self) -> dict[str, bool]:
        """The settings that make training on a GPU faster, as they are in this process."""
        weights = [parameter for parameter in self.module.parameters() if parameter.dim() == 4]
        return {
            "cudnn_benchmark": torch.backends.cudnn.benchmark,
            "fused": bool(self.optimizer.param_groups[0].get("fused")),
            "channels_last": any(not weight.is_contiguous() for weight in weights)
            and all(weight.is_contiguous(memory_format=torch.channels_last) for weight in weights),
        }


def serve(task: dict[str, Any]) -> None:
    """Run as one side: compute an epoch for each line on stdin, and answer with a line of JSON."""
    case = Case(**{**task["case"], "shape": tuple(task["case"]["shape"])})
    device = select_device(make(device=task["device"]), RankInfo())
    if device.type == "cuda":
        torch.cuda.set_device(device)
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        if case.jpeg:
            write_pictures(case, Path(folder))
        config = make_config(case, device, Path(folder))
        set_numerics(config)
        if device.type == "cpu" and task["side"] != "theirs":
            keep_freed_memory()
        module = models.build(case.model, shape=case.shape, classes=case.classes, seed=0)
        if task["side"] == "ours":
            trainer = our_trainer(case, config, device, module)
            stack.callback(trainer.close)
            side = Side(trainer.train_epoch, trainer.strategy.module, trainer.optimizer)
        else:
            side = peer_side(case, config, device, module, Path(task["peers"]))
        for _ in sys.stdin:
            before = resource.getrusage(resource.RUSAGE_SELF)
            seconds, figures = timed(side.run_epoch, device)
            after = resource.getrusage(resource.RUSAGE_SELF)
            used = {
                "seconds": seconds,
                # Of this process, without the workers that load data.
                "processor_seconds": after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime,
                "page_faults": after.ru_minflt - before.ru_minflt,
            }
            print(json.dumps({**figures, **used, "settings": side.settings}), flush=True)


def write_pictures(case: Case, folder: Path) -> None:
    """Write the JPEG files of a case. Raises `UsageError` where what makes them is not installed."""
    try:
        from bench.train.data import write_image_folder
    except ImportError as error:
        raise UsageError(
            f"the jpeg case needs Pillow and numpy ({error}): pip install torchvision"
        ) from error
    write_image_folder(folder, case.steps * case.batch_size)


def random_images(case: Case) -> InMemoryDataset:
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(case.steps * case.batch_size, *case.shape, generator=generator)
    return InMemoryDataset(images, torch.randint(0, case.classes, (len(images),), generator=generator))


def make_config(case: Case, device: torch.device, folder: Path) -> Config:
    """Return the flags of a user's run that trains as the case says and writes to `folder`."""
    jpeg = {"data": str(folder), "augment": True, "image_size": case.shape[-1]} if case.jpeg else {}
    return make(
        dataset="folder" if case.jpeg else "synthetic",
        **jpeg,
        model=case.model,
        device=device.type,
        batch_size=case.batch_size,
        out=str(folder / "run"),
        epochs=10**6,
        optimizer="sgd",
        lr=LR,
        momentum=MOMENTUM,
        weight_decay=WEIGHT_DECAY,
        **case.flags,
    )


def our_trainer(case: Case, config: Config, device: torch.device, module: nn.Module) -> Trainer:
    """Return the Trainer of a user's run of one process, which writes its metrics."""
    comm = Communicator(info=RankInfo(), device=device)
    if case.jpeg:
        datasets = load(config, download=False)
    else:
        images = random_images(case)
        datasets = Datasets(
            train=images, test=images, task=classification(), shape=case.shape, classes=case.classes
        )
    if config.data.on_device:
        datasets = move_to_device(datasets, device)
    config.folder.mkdir()
    metrics = RunOutput(config.folder, enabled=True)
    metrics.open(0)
    strategy = select.build(config, comm, module, datasets.task, datasets.example)
    return assemble(config, comm, strategy, datasets, metrics).trainer


def peer_side(case: Case, config: Config, device: torch.device, module: nn.Module, peers: Path) -> Side:
    """Return the peer's `train` function as a side, with our precision, memory format and optimizer."""
    train = runpy.run_path(str(peers / case.peer), run_name="peer")["train"]
    flags = config.precision
    module = move(module, device, channels_last=flags.channels_last)
    batches = TimedBatches(
        picture_loader(config, device) if case.jpeg else ready_batches(case, config, device)
    )
    network: nn.Module = AsAUserWould(module, device, amp=flags.amp, channels_last=flags.channels_last)
    if flags.compile:
        network.compile()
    fused = True if flags.fused else None  # None: PyTorch chooses, as for our trainer
    optimizer = torch.optim.SGD(
        module.parameters(), lr=LR, momentum=MOMENTUM, weight_decay=WEIGHT_DECAY, fused=fused
    )
    args = SimpleNamespace(no_accel=device.type == "cpu", print_freq=10, log_interval=10, dry_run=False)
    call: tuple[Any, ...]
    if case.peer == "mnist/main.py":
        call = (args, nn.Sequential(network, nn.LogSoftmax(1)), device, batches, optimizer, 1)
    else:
        call = (batches, network, nn.CrossEntropyLoss(), optimizer, 0, device, args)

    def run_epoch() -> dict[str, Any]:
        batches.seconds = 0.0
        started = time.perf_counter()
        # Its progress lines are discarded; they are still formatted, as ours are to a file.
        with contextlib.redirect_stdout(io.StringIO()):
            train(*call)
        return {"data_wait": batches.seconds / (time.perf_counter() - started)}

    return Side(run_epoch, module, optimizer)


def ready_batches(case: Case, config: Config, device: torch.device) -> list[tuple[Tensor, Tensor]]:
    """Return the random images as batches in memory; with --on-device in that of the device."""
    layout = torch.channels_last if config.precision.channels_last else torch.contiguous_format
    storage = device if config.data.on_device else torch.device("cpu")
    images = random_images(case)
    batches = zip(images.inputs.split(case.batch_size), images.labels.split(case.batch_size), strict=True)
    return [
        (inputs.to(storage).contiguous(memory_format=layout), labels.to(storage))
        for inputs, labels in batches
    ]


def picture_loader(config: Config, device: torch.device) -> DataLoader[Any]:
    """Return the loader that imagenet/main.py builds of the images in config.data.data, with workers that
    persist."""
    from torchvision import datasets, transforms

    flags = config.data
    transform = transforms.Compose(
        [
            transforms.RandomResizedCrop(flags.image_size),
            transforms.RandomHorizontalFlip(),
            transforms.ToTensor(),
            transforms.Normalize(mean=[0.485, 0.456, 0.406], std=[0.229, 0.224, 0.225]),
        ]
    )
    return DataLoader(
        datasets.ImageFolder(str(Path(flags.data, "train")), transform),
        batch_size=config.optimization.batch_size,
        shuffle=True,
        num_workers=flags.workers,
        pin_memory=device.type == "cuda",
        persistent_workers=flags.workers > 0,
    )


class AsAUserWould(nn.Module):
    """The network with autocast and the memory format, as a user of the peer would add them; its scores are
    float32."""

    def __init__(self, module: nn.Module, device: torch.device, *, amp: str, channels_last: bool) -> None:
        super().__init__()
        self.module, self.device_type, self.amp = module, device.type, amp
        self.layout = torch.channels_last if channels_last else torch.contiguous_format

    def forward(self, images: Tensor) -> Tensor:
        dtype = AMP_DTYPES.get(self.amp, torch.bfloat16)
        with torch.autocast(self.device_type, dtype, enabled=self.amp != "none"):
            scores: Tensor = self.module(images.contiguous(memory_format=self.layout))
        return scores.float()


class TimedBatches:
    """A loader that adds up the `seconds` its reader waits. Its `dataset` has the length that mnist/main.py
    prints."""

    def __init__(self, batches: DataLoader[Any] | list[tuple[Tensor, Tensor]]) -> None:
        self.batches = batches
        self.seconds = 0.0
        samples = sum(len(labels) for _, labels in batches) if isinstance(batches, list) else 0
        self.dataset: Sized = range(samples)

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        started = time.perf_counter()
        for batch in self.batches:
            self.seconds += time.perf_counter() - started
            yield batch
            started = time.perf_counter()


def timed(function: Callable[[], dict[str, Any]], device: torch.device) -> tuple[float, dict[str, Any]]:
    """Return (seconds until the device is done, too, what `function` returned)."""
    started = time.perf_counter()
    result = function()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - started, result
