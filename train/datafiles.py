"""The files of MNIST and STL-10: read, checked for being whole, and fetched where that is asked for.

It must not know how the samples are used, nor flags beyond the folder. Files are read here and not by torchvision,
which takes the checksum of 2.9 GB of STL-10 at every start and has one sentence for every trouble; it does the
downloads. A file is whole when its size fits what its header, or its partner, says.
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

# The official files, with their sizes in bytes; for MNIST the packed ones.
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
    """Files are absent or damaged; the message says which and how."""


def mnist(folder: Path, *, download: bool) -> list[tuple[Tensor, Tensor]]:
    """The training and the test part: images uint8 [n, 1, 28, 28] and labels int64 [n].

    The idx files lie in folder/MNIST/raw, packed or unpacked. Raises `UsageError` that names the files to get.
    """
    raw = folder / "MNIST" / "raw"
    names = ", ".join(f"{name} ({_size(size)})" for name, size in MNIST_FILES.items())
    advice = f"{names} belong in {raw}: copy them there, packed or not; torchvision.datasets.MNIST has them"
    return _read_or_fetch(lambda: _read_mnist(raw), "MNIST", folder, advice, download)


def stl10(folder: Path, *, download: bool) -> list[tuple[Tensor, Tensor]]:
    """The training and the test part: images uint8 [n, 3, 96, 96] and labels int64 [n] from 0.

    The files lie in folder/stl10_binary. Raises `UsageError` that names the files to get.
    """
    binary = folder / "stl10_binary"
    names = ", ".join(f"{name} ({_size(size)})" for name, size in STL10_FILES.items())
    archive, size = STL10_ARCHIVE
    advice = f"{names} belong in {binary}: unpack {archive} ({_size(size)}; torchvision.datasets.STL10 has it) in {folder}"
    if (folder / archive).exists():
        advice = f"unpack {folder / archive}, which is there: tar -xzf {folder / archive} -C {folder}"
    return _read_or_fetch(lambda: _read_stl10(binary), "STL10", folder, advice, download)


def _read_or_fetch(read: Callable[[], T], name: str, folder: Path, advice: str, download: bool) -> T:
    try:
        return read()
    except _Unusable as trouble:
        if not download:
            raise UsageError(f"the data cannot be read: {trouble}. {advice}; or give --download") from trouble
    said = _fetch(name, folder)
    try:
        return read()
    except _Unusable as trouble:
        # torchvision fetches what is absent; a damaged MNIST file that lies in its place it leaves alone.
        raise UsageError(
            f"the data cannot be read, also after --download{said}: {trouble}. Remove what is damaged and try again; "
            f"or: {advice}"
        ) from trouble


def _fetch(name: str, folder: Path) -> str:
    """Have torchvision fetch what is missing. Returns what it complained of, or nothing."""
    kind = getattr(_torchvision_datasets(name), name)
    try:
        kind(folder, download=True)
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


def _read_mnist(raw: Path) -> list[tuple[Tensor, Tensor]]:
    parts = []
    for part in ("train", "t10k"):
        images = _read_idx(raw / f"{part}-images-idx3-ubyte", dimensions=3)
        labels = _read_idx(raw / f"{part}-labels-idx1-ubyte", dimensions=1)
        if len(images) != len(labels):
            raise _Unusable(f"{raw}: {len(images)} images but {len(labels)} labels in the {part} files")
        parts.append((images.unsqueeze(1), labels.long()))
    return parts


def _read_idx(path: Path, *, dimensions: int) -> Tensor:
    """An idx file of unsigned bytes: magic number, sizes as big-endian 32-bit numbers, then the values."""
    packed = path.with_name(path.name + ".gz")
    source = path if path.exists() else packed
    content = _bytes_of(source, gzip.decompress if source == packed else bytes)
    start = 4 * (1 + dimensions)
    if len(content) < start or content[:4] != bytes((0, 0, 8, dimensions)):
        raise _Unusable(f"{source} is not an idx file of {dimensions} dimensions")
    shape = struct.unpack(f">{dimensions}I", content[4:start])
    _require_size(source, len(content), start + math.prod(shape))
    return torch.frombuffer(bytearray(content), dtype=torch.uint8, offset=start).view(shape)


def _read_stl10(binary: Path) -> list[tuple[Tensor, Tensor]]:
    parts = []
    for part in ("train", "test"):
        labels = _bytes_of(binary / f"{part}_y.bin")
        pixels = _bytes_of(binary / f"{part}_X.bin")
        _require_size(binary / f"{part}_X.bin", len(pixels), len(labels) * _STL10_IMAGE)
        images = torch.frombuffer(pixels, dtype=torch.uint8).view(-1, 3, 96, 96)
        # Stored column by column; labels from 1.
        parts.append(
            (images.transpose(2, 3).contiguous(), torch.frombuffer(labels, dtype=torch.uint8).long() - 1)
        )
    return parts


def _bytes_of(path: Path, unpack: Callable[[bytes], bytes] = bytes) -> bytearray:
    try:
        content = bytearray(unpack(path.read_bytes()))
    except FileNotFoundError:
        raise _Unusable(f"{path} is not there") from None
    except (EOFError, OSError, zlib.error) as error:
        raise _Unusable(f"{path} is damaged ({error})") from error
    if not content:
        raise _Unusable(f"{path} is empty")
    return content


def _require_size(path: Path, size: int, expected: int) -> None:
    if size != expected:
        how = "cut short" if size < expected else "too long"
        raise _Unusable(f"{path} is {how}: {size:,} bytes of {expected:,}; remove it")


def _size(size: int) -> str:
    for unit, factor in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if size >= factor:
            return f"{size / factor:.1f} {unit}"
    return f"{size} bytes"
