"""The datasets: what each consists of, and how its raw inputs become those of a model.

A dataset is any map-style torch dataset of (input, label); the ones here live in memory as raw tensors and are
normalised batch by batch on the device. This room must not know ranks: who may download, and in which order, is
decided by the caller. Nothing is fetched from the network unless `download` is set.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812  (the name that PyTorch code uses)
from torch import Tensor
from torch.utils.data import Dataset

from train import datafiles
from train.config import Config
from train.errors import UsageError

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
        # Without non_blocking the few bytes of the indices would make the host wait for all that a GPU has queued.
        chosen = torch.tensor(indices, dtype=torch.int64).to(self.device, non_blocking=True)
        return self.inputs.index_select(0, chosen), self.labels.index_select(0, chosen)

    @property
    def device(self) -> torch.device:
        """Where the tensors lie."""
        return self.inputs.device

    def to(self, device: torch.device) -> Tensors:
        """The same set on `device`."""
        return Tensors(self.inputs.to(device), self.labels.to(device))

    @staticmethod
    def collate(batch: Batch) -> Batch:
        """Batches come ready from `__getitems__`."""
        return batch


@dataclass(frozen=True, slots=True, kw_only=True)
class Data:
    """A training and a test set, the (channels, height, width) after `prepare`, and the number of classes.

    `task` is classify (labels are int64 [n]) or regress (targets are float [n, classes]). `mirrored` tells whether a
    mirror image is one of the same class."""

    train: Dataset[Any]
    test: Dataset[Any]
    shape: tuple[int, int, int]
    classes: int
    prepare: Prepare
    task: str = "classify"
    mirrored: bool = True


def load(config: Config, *, download: bool) -> Data:
    """The dataset that `config` names. Raises `UsageError` that says what to install or which file to put where."""
    loaders = {"digits": _digits, "mnist": _mnist, "stl10": _stl10, "synthetic": _synthetic, "toy": _toy}
    return loaders[config.dataset](config, download)


def on_device(data: Data, device: torch.device) -> Data:
    """The same data with the sets that are held in memory moved to `device`, once, so that no batch travels there.

    Sets that are read from elsewhere stay as they are; so does everything on a CPU.
    """

    def moved(dataset: Dataset[Any]) -> Dataset[Any]:
        return dataset.to(device) if isinstance(dataset, Tensors) else dataset

    return dataclasses.replace(data, train=moved(data.train), test=moved(data.test))


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
        mirrored=False,
    )


def _mnist(config: Config, download: bool) -> Data:
    train, test = datafiles.mnist(Path(config.data), download=download)
    return Data(
        train=Tensors(*train),
        test=Tensors(*test),
        shape=(1, 28, 28),
        classes=10,
        prepare=_scaled(0.1307, 0.3081),
        mirrored=False,
    )


def _stl10(config: Config, download: bool) -> Data:
    train, test = datafiles.stl10(Path(config.data), download=download)
    size = config.image_size or 224
    return Data(
        train=Tensors(*train),
        test=Tensors(*test),
        shape=(3, size, size),
        classes=10,
        prepare=_scaled(0.5, 0.5, size=size),
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


def _toy(_config: Config, _download: bool) -> Data:
    """2,048 pairs to train on and 512 to test on: 20 inputs, and as target a linear function of them plus noise of
    standard deviation 0.1, so that the best mean squared error is 0.01.

    The walk-through that this comes from trains a single output with cross-entropy, whose gradient is then exactly
    0: with one class there is nothing to get wrong. Hence a task of its own, for squared error.
    """
    generator = torch.Generator().manual_seed(2)
    rule = torch.randn(20, 1, generator=generator)

    def make(samples: int) -> Tensors:
        inputs = torch.randn(samples, 20, generator=generator)
        noise = 0.1 * torch.randn(samples, 1, generator=generator)
        return Tensors(inputs.view(samples, 20, 1, 1), inputs @ rule + noise)

    return Data(
        train=make(2048),
        test=make(512),
        shape=(20, 1, 1),
        classes=1,
        prepare=lambda inputs: inputs,
        task="regress",
    )
