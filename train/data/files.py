"""The files of MNIST and STL-10: reading, checking for completeness, and downloading on request.

Files are read here and not by torchvision, which computes the checksum of 2.9 GB of STL-10 at every start and has one
error message for every problem; torchvision does the downloads. A file is complete if its size fits what its header,
or its companion file, says.
"""

from __future__ import annotations

import gzip
import math
import struct
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from train.errors import UsageError

T = TypeVar("T")
Part = tuple[Tensor, Tensor]

# The official files with their sizes in bytes; for MNIST the compressed ones.
MNIST_FILES = {
    "train-images-idx3-ubyte.gz": 9_912_422,
    "train-labels-idx1-ubyte.gz": 28_881,
    "t10k-images-idx3-ubyte.gz": 1_648_877,
    "t10k-labels-idx1-ubyte.gz": 4_542,
}
STL10_ARCHIVE = ("stl10_binary.tar.gz", 2_640_397_119)
STL10_FILES = {
    "train_X.bin": 138_240_000,
    "train_y.bin": 5_000,
    "test_X.bin": 221_184_000,
    "test_y.bin": 8_000,
}
_STL10_IMAGE = 3 * 96 * 96


class _Unusable(Exception):
    """Files are missing or damaged; the message says which and how."""


def mnist(folder: Path, *, download: bool) -> list[Part]:
    """Return the training and the test part: images uint8 [n, 1, 28, 28] and labels int64 [n].

    The idx files are in folder/MNIST/raw, gzipped or not. Raises `UsageError` that names the files to get.
    """
    raw = folder / "MNIST" / "raw"
    names = ", ".join(f"{name} ({_human_size(size)})" for name, size in MNIST_FILES.items())
    advice = f"copy {names}, gzipped or not, to {raw} (torchvision.datasets.MNIST has them)"
    return _read_or_download(lambda: _read_mnist(raw), "MNIST", folder, advice, download)


def stl10(folder: Path, *, download: bool) -> list[Part]:
    """Return the training and the test part: images uint8 [n, 3, 96, 96] and labels int64 [n] from 0.

    The files are in folder/stl10_binary. Raises `UsageError` that names the files to get.
    """
    binary = folder / "stl10_binary"
    names = ", ".join(f"{name} ({_human_size(size)})" for name, size in STL10_FILES.items())
    archive, size = STL10_ARCHIVE
    advice = f"{binary} needs {names}: unpack {archive} ({_human_size(size)}; torchvision.datasets.STL10 has it) in {folder}"
    if (folder / archive).exists():
        advice = f"unpack the archive {folder / archive}: tar -xzf {folder / archive} -C {folder}"
    return _read_or_download(lambda: _read_stl10(binary), "STL10", folder, advice, download)


def _read_or_download(read: Callable[[], T], name: str, folder: Path, advice: str, download: bool) -> T:
    try:
        return read()
    except _Unusable as problem:
        if not download:
            raise UsageError(
                f"cannot read the data: {problem}. To fix it, {advice}; or give --download"
            ) from problem
    warning = _download(name, folder)
    try:
        return read()
    except _Unusable as problem:
        # torchvision downloads what is missing; it leaves a damaged MNIST file alone.
        raise UsageError(
            f"cannot read the data even after --download{warning}: {problem}. Remove the damaged files and try again, "
            f"or {advice}"
        ) from problem


def _download(name: str, folder: Path) -> str:
    """Download what is missing with torchvision. Returns torchvision's error message, or an empty string."""
    dataset = getattr(_torchvision_datasets(name), name)
    try:
        dataset(folder, download=True)
    except (RuntimeError, OSError, ValueError, EOFError) as error:
        return f" (torchvision: {error})"
    return ""


def _torchvision_datasets(name: str) -> Any:
    try:
        from torchvision import datasets
    except (ImportError, RuntimeError) as error:  # RuntimeError: a torchvision built for another torch
        raise UsageError(
            f"--download of {name} needs a torchvision that matches torch ({error}): pip install torchvision"
        ) from error
    return datasets


def _read_mnist(raw: Path) -> list[Part]:
    parts = []
    for part in ("train", "t10k"):
        images = _read_idx(raw / f"{part}-images-idx3-ubyte", dimensions=3)
        labels = _read_idx(raw / f"{part}-labels-idx1-ubyte", dimensions=1)
        if len(images) != len(labels):
            raise _Unusable(f"{raw}: {len(images)} images but {len(labels)} labels in the {part} files")
        parts.append((images.unsqueeze(1), labels.long()))
    return parts


def _read_idx(path: Path, *, dimensions: int) -> Tensor:
    """Read an idx file of unsigned bytes: magic number, sizes as big-endian 32-bit integers, then the values."""
    gzipped = path.with_name(path.name + ".gz")
    source = path if path.exists() else gzipped
    content = _read_bytes(source, gzip.decompress if source == gzipped else bytes)
    start = 4 * (1 + dimensions)
    if len(content) < start or content[:4] != bytes((0, 0, 8, dimensions)):
        raise _Unusable(f"{source} is not an idx file of {dimensions} dimensions")
    shape = struct.unpack(f">{dimensions}I", content[4:start])
    _check_size(source, len(content), start + math.prod(shape))
    return torch.frombuffer(bytearray(content), dtype=torch.uint8, offset=start).view(shape)


def _read_stl10(binary: Path) -> list[Part]:
    parts = []
    for part in ("train", "test"):
        labels = _read_bytes(binary / f"{part}_y.bin")
        pixels = _read_bytes(binary / f"{part}_X.bin")
        _check_size(binary / f"{part}_X.bin", len(pixels), len(labels) * _STL10_IMAGE)
        images = torch.frombuffer(pixels, dtype=torch.uint8).view(-1, 3, 96, 96)
        # Stored column by column; labels from 1.
        parts.append(
            (images.transpose(2, 3).contiguous(), torch.frombuffer(labels, dtype=torch.uint8).long() - 1)
        )
    return parts


def _read_bytes(path: Path, decompress: Callable[[bytes], bytes] = bytes) -> bytearray:
    try:
        content = bytearray(decompress(path.read_bytes()))
    except FileNotFoundError:
        raise _Unusable(f"{path} does not exist") from None
    except (EOFError, OSError, zlib.error) as error:
        raise _Unusable(f"{path} is damaged ({error})") from error
    if not content:
        raise _Unusable(f"{path} is empty")
    return content


def _check_size(path: Path, size: int, expected: int) -> None:
    if size != expected:
        problem = "truncated" if size < expected else "too long"
        raise _Unusable(f"{path} is {problem}: {size:,} bytes instead of {expected:,}; remove it")


def _human_size(size: int) -> str:
    for unit, factor in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if size >= factor:
            return f"{size / factor:.1f} {unit}"
    return f"{size} bytes"
