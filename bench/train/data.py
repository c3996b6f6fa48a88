"""Data as heavy as photographs, for benchmarks: folders of real JPEG files, which the workers decode, crop
and resize.

The pictures are generated here, so that nothing has to be downloaded; their labels mean nothing.
"""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
from PIL import Image

WIDTH, HEIGHT = 500, 375  # a common size in ImageNet, whose files are about 110 kB on average
DISTINCT, CLASSES = 8, 10
_NOISE, _QUALITY = 27.0, 90  # chosen so that a picture takes 110 kB


def write_image_folder(folder: Path, samples: int) -> None:
    """Write FOLDER/train with `samples` pictures in up to 10 classes, and FOLDER/val with one in each.

    8 pictures are distinct, and the others are hard links to them: they are read from the page cache, as a
    data set that fits into memory is from its second epoch on.
    """
    classes = min(CLASSES, samples)
    distinct = [folder / f"{number}.jpg" for number in range(DISTINCT)]
    for number, path in enumerate(distinct):
        path.write_bytes(picture(number))
    for part, count in (("train", samples), ("val", classes)):
        for label in range(classes):
            (folder / part / str(label)).mkdir(parents=True)
        for number in range(count):
            link = folder / part / str(number % classes) / f"{number}.jpg"
            link.hardlink_to(distinct[number % DISTINCT])


def picture(seed: int) -> bytes:
    """Return a picture as the bytes of a JPEG file of about 110 kB."""
    noise = np.random.default_rng(seed)
    slope = np.linspace(40, 200, WIDTH)[None, :, None] + np.linspace(-30, 30, HEIGHT)[:, None, None]
    pixels = slope + noise.normal(0.0, _NOISE, (HEIGHT, WIDTH, 3))
    buffer = io.BytesIO()
    Image.fromarray(pixels.clip(0, 255).astype(np.uint8)).save(buffer, "JPEG", quality=_QUALITY)
    return buffer.getvalue()
