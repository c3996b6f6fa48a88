"""The datasets: what each consists of, and how raw inputs become those of a model.

A dataset is any map-style torch dataset of (input, label); the ones here are kept in memory as raw tensors and are
normalized batch by batch on the device. Independent of ranks: the caller decides which rank downloads, and in which
order. Nothing is fetched from the network unless `download` is set.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sized
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812  (the name that PyTorch code uses)
from torch import Tensor
from torch.utils.data import Dataset

from train.config import Config
from train.data import files
from train.errors import UsageError

Preprocess = Callable[[Tensor], Tensor]
Batch = tuple[Tensor, Tensor]


class InMemoryDataset(Dataset[Batch]):
    """Inputs [n, ...] and labels [n] as tensors. A whole batch is read by one indexing operation."""

    def __init__(self, inputs: Tensor, labels: Tensor) -> None:
        self.inputs = inputs
        self.labels = labels

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> Batch:
        return self.inputs[index], self.labels[index]

    def __getitems__(self, indices: list[int]) -> Batch:
        # Without non_blocking the few bytes of the indices would make the host wait for everything queued on a GPU.
        chosen = torch.tensor(indices, dtype=torch.int64).to(self.device, non_blocking=True)
        return self.inputs.index_select(0, chosen), self.labels.index_select(0, chosen)

    @property
    def device(self) -> torch.device:
        return self.inputs.device

    def to(self, device: torch.device) -> InMemoryDataset:
        """Return the same dataset on `device`."""
        return InMemoryDataset(self.inputs.to(device), self.labels.to(device))

    @staticmethod
    def collate(batch: Batch) -> Batch:
        """Return the batch: `__getitems__` has already assembled it."""
        return batch


@dataclass(frozen=True, slots=True, kw_only=True)
class Datasets:
    """A training and a test set, the shape (channels, height, width) after `preprocess`, and the number of classes.

    `task` is classify (labels are int64 [n]) or regress (targets are float [n, classes]). `flip` says whether a
    mirrored image keeps its label.
    """

    train: Dataset[Any]
    test: Dataset[Any]
    shape: tuple[int, int, int]
    classes: int
    preprocess: Preprocess
    task: str = "classify"
    flip: bool = True


def size(dataset: Dataset[Any]) -> int:
    """Return the number of samples. Raises `UsageError` for an iterable-style dataset, which has none."""
    if not isinstance(dataset, Sized):
        raise UsageError(f"{type(dataset).__name__} has no __len__: only map-style datasets are supported")
    return len(dataset)


def load(config: Config, *, download: bool) -> Datasets:
    """Return the dataset that `config` names. Raises `UsageError` that says what to install or which file is missing."""
    loaders = {"digits": _digits, "mnist": _mnist, "stl10": _stl10, "synthetic": _synthetic, "toy": _toy}
    return loaders[config.dataset](config, download)


def move_to_device(datasets: Datasets, device: torch.device) -> Datasets:
    """Return the same data with in-memory datasets on `device`, so that no batch has to be copied there.

    Other datasets stay as they are.
    """

    def move(dataset: Dataset[Any]) -> Dataset[Any]:
        return dataset.to(device) if isinstance(dataset, InMemoryDataset) else dataset

    return dataclasses.replace(datasets, train=move(datasets.train), test=move(datasets.test))


def _normalize(mean: float, std: float, largest: float = 255.0, size: int = 0) -> Preprocess:
    """Return a function from raw pixels 0..largest to (x / largest - mean) / std, resized to `size` if it differs."""

    def preprocess(inputs: Tensor) -> Tensor:
        images = inputs if inputs.is_floating_point() else inputs.float()
        if size and images.shape[-1] != size:
            images = F.interpolate(images, size=(size, size), mode="bilinear", antialias=True)
        return (images / largest - mean) / std

    return preprocess


def _digits(_config: Config, _download: bool) -> Datasets:
    """Return scikit-learn's 1,797 handwritten 8x8 digits: 1,438 for training, 359 for testing.

    The split is one fixed permutation and depends on no flag. Both parts contain digits of the same writers: the file
    is ordered by writer, so the last fifth alone would mostly contain other writers than the training part.
    """
    try:
        from sklearn.datasets import load_digits
    except ImportError:
        raise UsageError("--dataset digits needs scikit-learn: pip install scikit-learn") from None
    bunch = load_digits()
    images = torch.from_numpy(bunch.images).float().unsqueeze(1)
    labels = torch.from_numpy(bunch.target).long()
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    split = len(labels) * 4 // 5 + 1
    train, test = order[:split], order[split:]
    return Datasets(
        train=InMemoryDataset(images[train], labels[train]),
        test=InMemoryDataset(images[test], labels[test]),
        shape=(1, 8, 8),
        classes=10,
        preprocess=_normalize(0.305, 0.376, largest=16.0),
        flip=False,
    )


def _mnist(config: Config, download: bool) -> Datasets:
    train, test = files.mnist(Path(config.data), download=download)
    return Datasets(
        train=InMemoryDataset(*train),
        test=InMemoryDataset(*test),
        shape=(1, 28, 28),
        classes=10,
        preprocess=_normalize(0.1307, 0.3081),
        flip=False,
    )


def _stl10(config: Config, download: bool) -> Datasets:
    train, test = files.stl10(Path(config.data), download=download)
    side = config.image_size or 224
    return Datasets(
        train=InMemoryDataset(*train),
        test=InMemoryDataset(*test),
        shape=(3, side, side),
        classes=10,
        preprocess=_normalize(0.5, 0.5, size=side),
    )


def _synthetic(config: Config, _download: bool) -> Datasets:
    """Return random images labelled by a random linear rule: nothing to download, and something to learn."""
    side = config.image_size or 32
    generator = torch.Generator().manual_seed(1)
    rule = torch.randn(3 * side * side, 10, generator=generator)

    def make(samples: int) -> InMemoryDataset:
        images = torch.randn(samples, 3, side, side, generator=generator)
        return InMemoryDataset(images, (images.flatten(1) @ rule).argmax(1))

    train = make(config.synthetic_size)
    test = make(max(1, config.synthetic_size // 4))
    return Datasets(
        train=train, test=test, shape=(3, side, side), classes=10, preprocess=lambda images: images
    )


def _toy(_config: Config, _download: bool) -> Datasets:
    """Return a regression with 2,048 training and 512 test samples: the target is a linear function of 20 inputs plus
    noise with standard deviation 0.1, so that the best mean squared error is 0.01.

    The tutorial that this comes from trains a single output with cross-entropy, whose gradient is then exactly 0: with
    one class every prediction is correct. Hence a separate task with squared error.
    """
    generator = torch.Generator().manual_seed(2)
    rule = torch.randn(20, 1, generator=generator)

    def make(samples: int) -> InMemoryDataset:
        inputs = torch.randn(samples, 20, generator=generator)
        noise = 0.1 * torch.randn(samples, 1, generator=generator)
        return InMemoryDataset(inputs.view(samples, 20, 1, 1), inputs @ rule + noise)

    return Datasets(
        train=make(2048),
        test=make(512),
        shape=(20, 1, 1),
        classes=1,
        preprocess=lambda inputs: inputs,
        task="regress",
    )
