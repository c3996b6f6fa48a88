"""Writes small files in the formats of MNIST and STL-10."""

from __future__ import annotations

import gzip
import struct
from pathlib import Path


def write_mnist(folder: Path, samples: int) -> None:
    """Write the four idx files, gzipped as they are distributed and unzipped. Pixels and labels follow from
    the position."""
    raw = folder / "MNIST" / "raw"
    raw.mkdir(parents=True)
    for part in ("train", "t10k"):
        pixels = bytes(index % 251 for index in range(samples * 28 * 28))
        labels = bytes(index % 10 for index in range(samples))
        images_file = struct.pack(">IIII", 0x803, samples, 28, 28) + pixels
        labels_file = struct.pack(">II", 0x801, samples) + labels
        for name, content in (("images-idx3", images_file), ("labels-idx1", labels_file)):
            (raw / f"{part}-{name}-ubyte").write_bytes(content)
            (raw / f"{part}-{name}-ubyte.gz").write_bytes(gzip.compress(content))


def write_stl10(folder: Path, samples: int) -> None:
    """Write the binary files of STL-10: images column by column, labels from 1."""
    binary = folder / "stl10_binary"
    binary.mkdir(parents=True)
    (binary / "class_names.txt").write_text("\n".join(f"class{number}" for number in range(10)))
    for part in ("train", "test"):
        image = bytes(index % 256 for index in range(3 * 96 * 96))
        (binary / f"{part}_X.bin").write_bytes(image * samples)
        (binary / f"{part}_y.bin").write_bytes(bytes(1 + index % 10 for index in range(samples)))
