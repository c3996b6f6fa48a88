"""The files of MNIST, STL-10 and folders of images, read by torchvision; downloaded only on request."""

from __future__ import annotations

import gzip
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils.data import Dataset

from train.errors import UsageError

T = TypeVar("T")
Part = tuple[Tensor, Tensor]

MNIST_FILES = (
    "train-images-idx3-ubyte",
    "train-labels-idx1-ubyte",
    "t10k-images-idx3-ubyte",
    "t10k-labels-idx1-ubyte",
)
STL10_FILES = ("train_X.bin", "train_y.bin", "test_X.bin", "test_y.bin")
STL10_ARCHIVE = "stl10_binary.tar.gz"  # 2.6 GB


def mnist(folder: Path, *, download: bool) -> list[Part]:
    """Return the training and the test part: images uint8 [n, 1, 28, 28] and labels int64 [n].

    The files are in folder/MNIST/raw, gzipped or not. Raises `UsageError` that names the files to get.
    """
    raw = folder / "MNIST" / "raw"
    advice = f"copy {', '.join(MNIST_FILES)}, gzipped or not, to {raw}"
    datasets = _torchvision_datasets("mnist")

    def read() -> list[Part]:
        _unpack(raw)
        parts = [datasets.MNIST(folder, train=train) for train in (True, False)]
        return [(part.data.unsqueeze(1), part.targets.long()) for part in parts]

    def fetch() -> None:
        datasets.MNIST(folder, download=True)

    return _read(read, fetch if download else None, "MNIST", folder, advice)


def stl10(folder: Path, *, download: bool) -> list[Part]:
    """Return the training and the test part: images uint8 [n, 3, 96, 96] and labels int64 [n] from 0.

    The files are in folder/stl10_binary. Raises `UsageError` that names the files to get.
    """
    archive = folder / STL10_ARCHIVE
    advice = f"unpack {STL10_ARCHIVE} in {folder}: {folder / 'stl10_binary'} needs {', '.join(STL10_FILES)}"
    if archive.exists():
        advice = f"unpack the archive: tar -xzf {archive} -C {folder}"
    datasets = _torchvision_datasets("stl10")

    class Unchecked(datasets.STL10):  # type: ignore[misc, name-defined]
        """Does not compute the checksum of all 2.9 GB at each start."""

        def _check_integrity(self) -> bool:
            return all((folder / self.base_folder / name).exists() for name in STL10_FILES)

    def read() -> list[Part]:
        parts = [Unchecked(folder, split=split) for split in ("train", "test")]
        return [(torch.from_numpy(part.data), torch.from_numpy(part.labels).long()) for part in parts]

    def fetch() -> None:
        datasets.STL10(folder, download=True)

    return _read(read, fetch if download else None, "STL10", folder, advice)


def image_folders(folder: Path, side: int, *, augment: bool) -> tuple[Dataset[Any], Dataset[Any], int]:
    """Return (the images of folder/train, those of folder/val, the number of classes): uint8 [3, side, side]
    each, and the number of the class in the order of the folders' names.

    Raises `UsageError` where a folder is missing or empty, or the two have other classes.
    """
    datasets = _torchvision_datasets("folder")
    from torchvision.transforms import v2

    middle = v2.Compose([v2.Resize(side * 8 // 7), v2.CenterCrop(side), v2.PILToTensor()])
    random = v2.Compose([v2.RandomResizedCrop(side), v2.RandomHorizontalFlip(), v2.PILToTensor()])
    advice = f"put images into {folder / 'train'}/CLASS and {folder / 'val'}/CLASS, or give another --data"

    def read() -> list[Any]:
        transforms = (("train", random if augment else middle), ("val", middle))
        return [datasets.ImageFolder(folder / part, transform) for part, transform in transforms]

    train, test = _read(read, None, "images", folder, advice)
    if train.classes != test.classes:
        other = ", ".join(sorted(set(train.classes) ^ set(test.classes))[:5])
        raise UsageError(f"{folder}: train and val have other classes ({other}); {advice}")
    return train, test, len(train.classes)


def _read(
    read: Callable[[], list[T]], fetch: Callable[[], None] | None, name: str, folder: Path, advice: str
) -> list[T]:
    """Return what `read` returns, after `fetch` if nothing was there and it is given."""
    try:
        return _checked(read())
    except _DAMAGED as problem:
        if fetch is None:
            more = "" if name == "images" else "; or give --download"
            raise UsageError(
                f"cannot read {name} in {folder} ({_first_line(problem)}). To fix it, {advice}{more}"
            ) from problem
    try:
        fetch()
        return _checked(read())
    except _DAMAGED as problem:
        # torchvision downloads what is missing; it leaves a damaged MNIST file alone.
        raise UsageError(
            f"cannot read {name} in {folder} even after --download ({_first_line(problem)}). Remove damaged "
            f"files and try again, or {advice}"
        ) from problem


# What torchvision raises for files that are missing, truncated, or something else.
_DAMAGED = (RuntimeError, ValueError, OSError, EOFError, AssertionError, TypeError, IndexError)


def _checked(parts: list[T]) -> list[T]:
    """Return the parts. Raises `ValueError` where there are not as many images as labels."""
    for part in parts:
        if isinstance(part, tuple) and (len(part[0]) != len(part[1]) or not len(part[0])):
            raise ValueError(f"{len(part[0])} images, but {len(part[1])} labels")
    return parts


def _unpack(raw: Path) -> None:
    """Unpack the gzipped files whose unpacked ones are missing: torchvision does so only for those that it
    has fetched."""
    for name in MNIST_FILES:
        path, packed = raw / name, raw / f"{name}.gz"
        if packed.exists() and not path.exists():
            temporary = path.with_name(f".{name}.tmp")
            with gzip.open(packed) as source, temporary.open("wb") as target:
                shutil.copyfileobj(source, target)
            temporary.replace(path)


def _first_line(error: BaseException) -> str:
    return (str(error) or type(error).__name__).splitlines()[0].rstrip(".")


def _torchvision_datasets(name: str) -> Any:
    try:
        from torchvision import datasets
    except (ImportError, RuntimeError) as error:  # RuntimeError: a torchvision built for another torch
        raise UsageError(
            f"--dataset {name} needs a torchvision that matches torch ({error}): pip install torchvision"
        ) from error
    return datasets
