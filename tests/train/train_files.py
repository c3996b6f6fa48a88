"""Small files in the formats of MNIST and STL-10. It must not know who reads them."""

from __future__ import annotations

import gzip
import struct
from pathlib import Path


def write_mnist(folder: Path, samples: int) -> None:
    """The four idx files, gzipped as they are distributed; pixel values and labels follow from the position."""
    raw = folder / "MNIST" / "raw"
    raw.mkdir(parents=True)
    for part in ("train", "t10k"):
        pixels = bytes(index % 251 for index in range(samples * 28 * 28))
        labels = bytes(index % 10 for index in range(samples))
        header = struct.pack(">IIII", 0x803, samples, 28, 28)
        (raw / f"{part}-images-idx3-ubyte.gz").write_bytes(gzip.compress(header + pixels))
        (raw / f"{part}-labels-idx1-ubyte.gz").write_bytes(
            gzip.compress(struct.pack(">II", 0x801, samples) + labels)
        )
        for name in ("images-idx3", "labels-idx1"):
            packed = raw / f"{part}-{name}-ubyte.gz"
            packed.with_suffix("").write_bytes(gzip.decompress(packed.read_bytes()))


def write_stl10(folder: Path, samples: int) -> None:
    """The binary files of STL-10: images column by column, labels from 1."""
    binary = folder / "stl10_binary"
    binary.mkdir(parents=True)
    (binary / "class_names.txt").write_text("\n".join(f"class{number}" for number in range(10)))
    for part in ("train", "test"):
        image = bytes(index % 256 for index in range(3 * 96 * 96))
        (binary / f"{part}_X.bin").write_bytes(image * samples)
        (binary / f"{part}_y.bin").write_bytes(bytes(1 + index % 10 for index in range(samples)))
