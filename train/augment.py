"""Random crops and flips of a whole batch, on the device that holds it.

What happens to a sample is a pure function of (seed, epoch, index of the sample): a resumed run, one with another
number of ranks, and one whose batches are cut otherwise all see the same images, and there is no random state to
save. It must not know datasets, ranks or steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

_GOLDEN = 0x9E3779B97F4A7C15


@dataclass(frozen=True, slots=True, kw_only=True)
class Augment:
    """Shift each image by up to `pad` pixels in both directions, what comes in from outside being 0, and mirror
    every second one if `flip`. `Augment(seed=0, pad=4, flip=True)` is the usual one for images of 32x32."""

    seed: int
    pad: int
    flip: bool

    def __call__(self, images: Tensor, *, epoch: int, indices: Sequence[int]) -> Tensor:
        """The augmented images: a new tensor of the same shape, type, device and memory format; with nothing to
        do, `images` itself.

        `images` is [n, channels, height, width] of any type, `indices` the n places in the dataset. Raises
        `ValueError` where the two numbers differ.
        """
        if len(images) != len(indices):
            raise ValueError(f"{len(images)} images, but {len(indices)} indices")
        if not self.pad and not self.flip:
            return images
        height, width = images.shape[2:]
        down, right, mirrored = self.draws(epoch, indices).to(images.device, non_blocking=True)
        rows = torch.arange(height, device=images.device) + down[:, None]
        columns = torch.arange(width, device=images.device)
        columns = torch.where(mirrored[:, None] > 0, width - 1 - columns, columns) + right[:, None]
        return _pick(images, rows, columns)

    def draws(self, epoch: int, indices: Sequence[int]) -> Tensor:
        """What is drawn for each sample: int64 [3, n], the shifts down and right in -pad..pad, and 1 to mirror."""
        # Drawn on the CPU: three small numbers per sample, and then no two kinds of device can disagree.
        of_epoch = _mix(_mix(_signed(self.seed)) + _signed(epoch))
        keys = _mix(of_epoch ^ torch.as_tensor(indices, dtype=torch.int64))
        down, right, mirrored = (_shifted(_mix(keys + _signed(_GOLDEN * turn)), 33) for turn in (1, 2, 3))
        span = 2 * self.pad + 1
        return torch.stack([down % span - self.pad, right % span - self.pad, mirrored % 2 * int(self.flip)])


def _pick(images: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
    """images[i, :, rows[i], columns[i]] for each i, and 0 where that is outside."""
    count, channels, height, width = images.shape
    of_image = torch.arange(count, device=images.device)
    inside = ((rows >= 0) & (rows < height))[:, :, None] & ((columns >= 0) & (columns < width))[:, None, :]
    rows, columns = rows.clamp(0, height - 1), columns.clamp(0, width - 1)
    if images.is_contiguous():
        of_channel = torch.arange(channels, device=images.device)[:, None, None]
        picked = images[
            of_image[:, None, None, None], of_channel, rows[:, None, :, None], columns[:, None, None]
        ]
        return picked.masked_fill_(~inside[:, None], 0)
    # Channels last: all channels of a pixel lie together and are copied together.
    picked = images.permute(0, 2, 3, 1)[of_image[:, None, None], rows[:, :, None], columns[:, None, :]]
    return picked.masked_fill_(~inside[..., None], 0).permute(0, 3, 1, 2)


def _mix(state: int | Tensor) -> Tensor:
    """The output function of splitmix64 (Steele, Lea and Flood, 2014), in int64 that wraps around."""
    x = torch.as_tensor(state, dtype=torch.int64) + _signed(_GOLDEN)
    x = (x ^ _shifted(x, 30)) * _signed(0xBF58476D1CE4E5B9)
    x = (x ^ _shifted(x, 27)) * _signed(0x94D049BB133111EB)
    return x ^ _shifted(x, 31)


def _shifted(x: Tensor, by: int) -> Tensor:
    # torch's >> copies the sign bit of an int64; the mask makes it the shift of an unsigned number.
    return (x >> by) & ((1 << (64 - by)) - 1)


def _signed(number: int) -> int:
    number &= (1 << 64) - 1
    return number - (1 << 64) if number >> 63 else number
