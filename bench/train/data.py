"""Data as heavy as photographs, for benchmarks: real JPEG bytes that the workers decode, crop and resize.

The pictures are generated here, so that nothing has to be downloaded; their labels mean nothing.
"""

from __future__ import annotations

import io
import random

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import Dataset

WIDTH, HEIGHT = 500, 375  # a common size in ImageNet, whose files are about 110 kB on average
DISTINCT = 8
_NOISE, _QUALITY = 27.0, 90  # chosen so that a picture takes 110 kB


class JpegImages(Dataset[tuple[Tensor, int]]):
    """`samples` pictures, 8 of them distinct, as JPEG bytes.

    Reading one decodes it and resizes a random crop, the same for the same index, to `size` x `size`: (uint8 [3, size,
    size], label 0..9).
    """

    def __init__(self, samples: int, size: int = 224) -> None:
        self.samples = samples
        self.size = size
        self.files = [_picture(seed) for seed in range(DISTINCT)]

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        if not 0 <= index < self.samples:
            raise IndexError(index)
        with Image.open(io.BytesIO(self.files[index % DISTINCT])) as picture:
            # As torchvision's pipelines do: decode the whole picture, then crop and resize with antialiasing.
            crop = picture.convert("RGB").resize(
                (self.size, self.size), Image.Resampling.BILINEAR, box=_crop_box(index)
            )
        return torch.from_numpy(np.array(crop)).permute(2, 0, 1).contiguous(), index % 10


def _crop_box(index: int) -> tuple[float, float, float, float]:
    """Return a box of 8 to 100 % of the area with an aspect ratio of 3:4 to 4:3, as RandomResizedCrop draws it."""
    draw = random.Random(index)
    area, ratio = WIDTH * HEIGHT * draw.uniform(0.08, 1.0), draw.uniform(3 / 4, 4 / 3)
    width, height = min(WIDTH, (area * ratio) ** 0.5), min(HEIGHT, (area / ratio) ** 0.5)
    left, top = draw.uniform(0, WIDTH - width), draw.uniform(0, HEIGHT - height)
    return left, top, left + width, top + height


def _picture(seed: int) -> bytes:
    noise = np.random.default_rng(seed)
    slope = np.linspace(40, 200, WIDTH)[None, :, None] + np.linspace(-30, 30, HEIGHT)[:, None, None]
    pixels = slope + noise.normal(0.0, _NOISE, (HEIGHT, WIDTH, 3))
    buffer = io.BytesIO()
    Image.fromarray(pixels.clip(0, 255).astype(np.uint8)).save(buffer, "JPEG", quality=_QUALITY)
    return buffer.getvalue()
