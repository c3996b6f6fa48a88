"""The datasets: what each consists of, how raw inputs become those of a model, and the task that they are
for.

A dataset is any map-style or iterable-style torch dataset; most of the ones here are kept in memory as raw
tensors and are normalized batch by batch on the device. Independent of ranks: the caller decides which rank
downloads, and in which order. Nothing is fetched from the network unless --download is given.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.nn.functional as F  # noqa: N812  (the name that PyTorch code uses)
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils.data import Dataset, IterableDataset, default_collate

from train.config import Config
from train.data import files
from train.data.augment import Augment
from train.data.random_state import SampleIndices, SeededDataset, preserved
from train.errors import UsageError
from train.task import Batch, Task, classification, next_token, on_inputs, regression

TEXT_LENGTH, TOKENS = 32, 48


class InMemoryDataset(Dataset[Any]):
    """Inputs [n, ...] and labels [n, ...] as tensors. A whole batch is read by one indexing operation."""

    draws_random_numbers = False

    def __init__(self, inputs: Tensor, labels: Tensor) -> None:
        self.inputs = inputs
        self.labels = labels

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> Batch:
        return self.inputs[index], self.labels[index]

    def __getitems__(self, indices: list[int]) -> Batch:
        # Without non_blocking the few bytes of the indices would make the host wait for everything queued on
        # a GPU.
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


class Augmentation(Protocol):
    """Random changes of a training batch, as a function of the epoch and the samples."""

    def __call__(self, batch: Batch, *, epoch: int, indices: Sequence[int]) -> Batch: ...


def unchanged(batch: Batch) -> Batch:
    """Return the batch."""
    return batch


@dataclass(frozen=True, slots=True, kw_only=True)
class Datasets:
    """A training and a test set, and what is learned from them.

    `preprocess` makes of a collated batch on the device what the model gets. `augment` changes training
    batches after that. `shape` of a sample and `classes` are what train/models.py needs; a model of your own
    may not.
    """

    train: Dataset[Any]
    test: Dataset[Any]
    task: Task
    shape: tuple[int, ...] = ()
    classes: int = 0
    preprocess: Callable[[Batch], Batch] = unchanged
    augment: Augmentation | None = None

    def example(self) -> Batch:
        """Return a batch of two samples on the CPU, as the model gets them. Raises `UsageError` where a
        dataset of an own script reads whole batches, and does not say that it draws no random numbers."""
        dataset, collate = self.train, getattr(self.train, "collate", default_collate)
        if isinstance(dataset, IterableDataset):
            with preserved():
                samples: Any = list(islice(dataset, 2))
        else:
            samples = SeededDataset(dataset, preserve=True).__getitems__(SampleIndices([0, 0], key=0))
        batch: Batch = pytree.tree_map(
            lambda value: value.cpu() if isinstance(value, Tensor) else value, collate(samples)
        )
        return self.preprocess(batch)


def load(config: Config, *, download: bool) -> Datasets:
    """Return the dataset that `config` names. Raises `UsageError` that says what to install or which file is
    missing."""
    loaders = {
        "digits": _digits,
        "mnist": _mnist,
        "stl10": _stl10,
        "folder": _folder,
        "text": _text,
        "synthetic": _synthetic,
        "toy": _toy,
        "own": _own,
    }
    return loaders[config.data.dataset](config, download)


def move_to_device(datasets: Datasets, device: torch.device) -> Datasets:
    """Return the same data with in-memory datasets on `device`, so that no batch has to be copied there.

    Other datasets stay as they are.
    """

    def move(dataset: Dataset[Any]) -> Dataset[Any]:
        return dataset.to(device) if isinstance(dataset, InMemoryDataset) else dataset

    return dataclasses.replace(datasets, train=move(datasets.train), test=move(datasets.test))


def _images(
    config: Config,
    train: Dataset[Any],
    test: Dataset[Any],
    *,
    shape: tuple[int, int, int],
    classes: int = 10,
    preprocess: Callable[[Tensor], Tensor] | None = None,
    flip: bool = True,
) -> Datasets:
    """Return datasets of (image, class). `flip` says whether a mirrored image keeps its class."""
    augment = Augment(seed=config.optimization.seed, pad=shape[1] // 8, flip=flip).of_batch
    return Datasets(
        train=train,
        test=test,
        task=classification(smoothing=config.optimization.label_smoothing),
        shape=shape,
        classes=classes,
        preprocess=on_inputs(preprocess) if preprocess is not None else unchanged,
        augment=augment if config.data.augment else None,
    )


def _normalize(
    mean: float | Sequence[float], std: float | Sequence[float], largest: float = 255.0, size: int = 0
) -> Callable[[Tensor], Tensor]:
    """Return a function from raw pixels 0..largest to (x / largest - mean) / std, by channel, resized to
    `size` if it differs."""
    means, stds = (torch.tensor(values).view(-1, 1, 1) for values in (mean, std))

    def preprocess(inputs: Tensor) -> Tensor:
        images = inputs if inputs.is_floating_point() else inputs.float()
        if size and images.shape[-1] != size:
            images = F.interpolate(images, size=(size, size), mode="bilinear", antialias=True)
        channel_means, channel_stds = (one.to(images.device, non_blocking=True) for one in (means, stds))
        return (images / largest - channel_means) / channel_stds

    return preprocess


def _digits(config: Config, _download: bool) -> Datasets:
    """Return scikit-learn's 1,797 handwritten 8x8 digits: 1,438 for training, 359 for testing.

    The split is one fixed permutation and depends on no flag. Both parts contain digits of the same writers:
    the file is ordered by writer, so the last fifth alone would mostly contain other writers than the
    training part.
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
    train, test = (InMemoryDataset(images[part], labels[part]) for part in (order[:split], order[split:]))
    preprocess = _normalize(0.305, 0.376, largest=16.0)
    return _images(config, train, test, shape=(1, 8, 8), preprocess=preprocess, flip=False)


def _mnist(config: Config, download: bool) -> Datasets:
    train, test = (InMemoryDataset(*part) for part in files.mnist(Path(config.data.data), download=download))
    preprocess = _normalize(0.1307, 0.3081)
    return _images(config, train, test, shape=(1, 28, 28), preprocess=preprocess, flip=False)


def _stl10(config: Config, download: bool) -> Datasets:
    train, test = (InMemoryDataset(*part) for part in files.stl10(Path(config.data.data), download=download))
    side = config.data.image_size or 224
    return _images(config, train, test, shape=(3, side, side), preprocess=_normalize(0.5, 0.5, size=side))


def _folder(config: Config, _download: bool) -> Datasets:
    """Return the images of two folders, DATA/train/CLASS/FILE and DATA/val/CLASS/FILE, cut to one size as
    they are read: a random part with --augment, else the middle."""
    side = config.data.image_size or 224
    train, test, classes = files.image_folders(Path(config.data.data), side, augment=config.data.augment)
    # The mean and deviation of ImageNet, which torchvision's weights expect.
    preprocess = _normalize((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
    datasets = _images(config, train, test, shape=(3, side, side), classes=classes, preprocess=preprocess)
    return dataclasses.replace(datasets, augment=None)


def _text(config: Config, _download: bool) -> Datasets:
    """Return texts of a random language, in which the next token depends on the two before it."""
    generator = torch.Generator().manual_seed(3)
    rule = torch.randint(TOKENS, (TOKENS, TOKENS), generator=generator)

    def make(samples: int) -> InMemoryDataset:
        tokens = torch.randint(TOKENS, (samples, TEXT_LENGTH + 1), generator=generator)
        surprising = torch.rand(samples, TEXT_LENGTH + 1, generator=generator) < 0.1
        for place in range(2, TEXT_LENGTH + 1):
            expected = rule[tokens[:, place - 2], tokens[:, place - 1]]
            tokens[:, place] = torch.where(surprising[:, place], tokens[:, place], expected)
        return InMemoryDataset(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())

    size = config.data.synthetic_size
    return Datasets(
        train=make(size),
        test=make(max(1, size // 4)),
        task=next_token(smoothing=config.optimization.label_smoothing),
        shape=(TEXT_LENGTH,),
        classes=TOKENS,
    )


def _synthetic(config: Config, _download: bool) -> Datasets:
    """Return random images labelled by a random linear rule: nothing to download, and something to learn."""
    side, size = config.data.image_size or 32, config.data.synthetic_size
    generator = torch.Generator().manual_seed(1)
    rule = torch.randn(3 * side * side, 10, generator=generator)

    def make(samples: int) -> InMemoryDataset:
        images = torch.randn(samples, 3, side, side, generator=generator)
        return InMemoryDataset(images, (images.flatten(1) @ rule).argmax(1))

    return _images(config, make(size), make(max(1, size // 4)), shape=(3, side, side))


def _toy(_config: Config, _download: bool) -> Datasets:
    """Return a regression with 2,048 training and 512 test samples: the target is a linear function of 20
    inputs plus noise with standard deviation 0.1, so that the best mean squared error is 0.01.

    The tutorial that this comes from trains a single output with cross-entropy, whose gradient is then
    exactly 0: with one class every prediction is correct. Hence a separate task with squared error.
    """
    generator = torch.Generator().manual_seed(2)
    rule = torch.randn(20, 1, generator=generator)

    def make(samples: int) -> InMemoryDataset:
        inputs = torch.randn(samples, 20, generator=generator)
        noise = 0.1 * torch.randn(samples, 1, generator=generator)
        return InMemoryDataset(inputs.view(samples, 20, 1, 1), inputs @ rule + noise)

    return Datasets(train=make(2048), test=make(512), task=regression(), shape=(20, 1, 1), classes=1)


def _own(_config: Config, _download: bool) -> Datasets:
    raise UsageError(
        "--dataset own is that of a script of your own (see docs/training.md): name another dataset"
    )
