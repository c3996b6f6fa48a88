"""The datasets, and how batches of them are read.

A dataset is any map-style torch dataset of (input, label); the ones here live in memory as raw tensors and are
normalised batch by batch on the device. This room must not know ranks: who may download, and in which order, is
decided by the caller. Nothing is fetched from the network unless `download` is set.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812  (the name that PyTorch code uses)
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, default_collate

from train.config import Config
from train.errors import UsageError
from train.sampler import Shard

Prepare = Callable[[Tensor], Tensor]
Batch = tuple[Tensor, Tensor]


class Tensors(Dataset[Batch]):
    """Inputs [n, ...] and labels [n] held in memory. Whole batches are read by one indexing operation."""

    def __init__(self, inputs: Tensor, labels: Tensor) -> None:
        self.inputs = inputs
        self.labels = labels

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> Batch:
        return self.inputs[index], self.labels[index]

    def __getitems__(self, indices: list[int]) -> Batch:
        return self.inputs[indices], self.labels[indices]

    @staticmethod
    def collate(batch: Batch) -> Batch:
        """Batches come ready from `__getitems__`."""
        return batch


@dataclass(frozen=True, slots=True, kw_only=True)
class Data:
    """A training and a test set, the (channels, height, width) after `prepare`, and the number of classes."""

    train: Dataset[Any]
    test: Dataset[Any]
    shape: tuple[int, int, int]
    classes: int
    prepare: Prepare
    task: str = "classify"


def load(config: Config, *, download: bool) -> Data:
    """The dataset that `config` names. Raises `UsageError` that says what to install or which file to put where."""
    loaders = {"digits": _digits, "mnist": _mnist, "stl10": _stl10, "synthetic": _synthetic}
    return loaders[config.dataset](config, download)


def batches(
    dataset: Dataset[Any], shards: Sequence[Shard], *, workers: int, pin: bool
) -> Iterator[tuple[Tensor, Tensor, Shard]]:
    """One (inputs, labels, shard) per shard, in order."""
    loader: DataLoader[Any] = DataLoader(
        dataset,
        batch_sampler=[shard.indices for shard in shards],
        num_workers=workers,
        pin_memory=pin,
        collate_fn=getattr(dataset, "collate", default_collate),
        worker_init_fn=_leave_signals_to_the_rank,
    )
    for (inputs, labels), shard in zip(loader, shards, strict=True):
        yield inputs, labels, shard


def _leave_signals_to_the_rank(_worker: int) -> None:
    # torchrun signals the whole process group: a worker that died of it first would fail the rank's own clean end.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def _scaled(mean: float, std: float, top: float = 255.0, size: int = 0) -> Prepare:
    """Raw pixels 0..top to (x / top - mean) / std, resized to `size` where it differs."""

    def prepare(inputs: Tensor) -> Tensor:
        images = inputs if inputs.is_floating_point() else inputs.float()
        if size and images.shape[-1] != size:
            images = F.interpolate(images, size=(size, size), mode="bilinear", antialias=True)
        return (images / top - mean) / std

    return prepare


def _digits(_config: Config, _download: bool) -> Data:
    """The 1,797 handwritten 8x8 digits that scikit-learn carries: 1,438 to train on, 359 to test on.

    The split is one fixed permutation and depends on no flag. The two parts share their writers: the file is in
    order of writing, so its last fifth alone would be a test on other hands than most of the training part.
    """
    try:
        from sklearn.datasets import load_digits
    except ImportError:
        raise UsageError("--dataset digits needs scikit-learn: pip install scikit-learn") from None
    bunch = load_digits()
    images = torch.from_numpy(bunch.images).float().unsqueeze(1)
    labels = torch.from_numpy(bunch.target).long()
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    cut = len(labels) * 4 // 5 + 1
    train, test = order[:cut], order[cut:]
    return Data(
        train=Tensors(images[train], labels[train]),
        test=Tensors(images[test], labels[test]),
        shape=(1, 8, 8),
        classes=10,
        prepare=_scaled(0.305, 0.376, top=16.0),
    )


def _mnist(config: Config, download: bool) -> Data:
    datasets = _torchvision(config.dataset)
    sets = []
    for train in (True, False):
        where = f"the four idx files (train-images-idx3-ubyte.gz, ...) in {Path(config.data, 'MNIST', 'raw')}"
        raw = _read(where, lambda train=train: datasets.MNIST(config.data, train=train, download=download))
        sets.append(Tensors(raw.data.unsqueeze(1), raw.targets.long()))
    return Data(train=sets[0], test=sets[1], shape=(1, 28, 28), classes=10, prepare=_scaled(0.1307, 0.3081))


def _stl10(config: Config, download: bool) -> Data:
    datasets = _torchvision(config.dataset)
    size = config.image_size or 224
    sets = []
    for split in ("train", "test"):
        where = f"the unpacked stl10_binary folder in {Path(config.data)}"
        raw = _read(where, lambda split=split: datasets.STL10(config.data, split=split, download=download))
        sets.append(Tensors(torch.from_numpy(raw.data), torch.from_numpy(raw.labels).long()))
    return Data(
        train=sets[0], test=sets[1], shape=(3, size, size), classes=10, prepare=_scaled(0.5, 0.5, size=size)
    )


def _synthetic(config: Config, _download: bool) -> Data:
    """Random images labelled by a random linear rule: nothing to download, and something to learn."""
    size = config.image_size or 32
    generator = torch.Generator().manual_seed(1)
    rule = torch.randn(3 * size * size, 10, generator=generator)

    def make(samples: int) -> Tensors:
        images = torch.randn(samples, 3, size, size, generator=generator)
        return Tensors(images, (images.flatten(1) @ rule).argmax(1))

    train = make(config.synthetic_size)
    test = make(max(1, config.synthetic_size // 4))
    return Data(train=train, test=test, shape=(3, size, size), classes=10, prepare=lambda images: images)


def _torchvision(dataset: str) -> Any:
    try:
        from torchvision import datasets
    except (ImportError, RuntimeError) as error:  # RuntimeError: a torchvision built for another torch
        raise UsageError(
            f"--dataset {dataset} needs a torchvision that matches torch ({error}): pip install torchvision"
        ) from error
    return datasets


def _read(where: str, read: Callable[[], Any]) -> Any:
    """What `read` returns. torchvision reports absent and damaged files alike by RuntimeError."""
    try:
        return read()
    except (RuntimeError, OSError, ValueError) as error:
        raise UsageError(f"the data cannot be read ({error}); put {where}, or give --download") from error
