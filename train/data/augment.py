"""Random crops and flips of a whole batch, on the device that holds it.

The augmentation of a sample is a pure function of (seed, epoch, index of the sample): a resumed run, one with
another number of ranks, and one with other batches all see the same images, and there is no random state to
save.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

_GOLDEN = 0x9E3779B97F4A7C15


@dataclass(frozen=True, slots=True, kw_only=True)
class Augment:
    """Shifts each image by up to `pad` pixels in both directions, padding with 0, and flips half of them
    horizontally if `flip`. `Augment(seed=0, pad=4, flip=True)` is usual for images of 32x32."""

    seed: int
    pad: int
    flip: bool

    def __call__(self, images: Tensor, *, epoch: int, indices: Sequence[int]) -> Tensor:
        """Return the augmented images: a new tensor of the same shape, dtype, device and memory format, or
        `images` itself if there is nothing to do.

        `images` is [n, channels, height, width] of any dtype, `indices` the n positions in the dataset.
        Raises `ValueError` where the two numbers differ.
        """
        if len(images) != len(indices):
            raise ValueError(f"{len(images)} images, but {len(indices)} indices")
        if not self.pad and not self.flip:
            return images
        height, width = images.shape[2:]
        down, right, flipped = self.draws(epoch, indices).to(images.device, non_blocking=True)
        rows = torch.arange(height, device=images.device) + down[:, None]
        columns = torch.arange(width, device=images.device)
        columns = torch.where(flipped[:, None] > 0, width - 1 - columns, columns) + right[:, None]
        return _pick(images, rows, columns)

    def of_batch(
        self, batch: tuple[Tensor, ...], *, epoch: int, indices: Sequence[int]
    ) -> tuple[Tensor, ...]:
        """Return the batch with its inputs augmented."""
        return (self(batch[0], epoch=epoch, indices=indices), *batch[1:])

    def draws(self, epoch: int, indices: Sequence[int]) -> Tensor:
        """Return the draws of each sample: int64 [3, n], the shifts down and right in -pad..pad, and 1 to
        flip."""
        # Drawn on the CPU: three small numbers per sample, equal for every kind of device.
        epoch_key = _mix(_mix(_signed(self.seed)) + _signed(epoch))
        keys = _mix(epoch_key ^ torch.as_tensor(indices, dtype=torch.int64))
        down, right, flipped = (_shift_right(_mix(keys + _signed(_GOLDEN * turn)), 33) for turn in (1, 2, 3))
        span = 2 * self.pad + 1
        return torch.stack([down % span - self.pad, right % span - self.pad, flipped % 2 * int(self.flip)])


def _pick(images: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
    """Return images[i, :, rows[i], columns[i]] for each i, and 0 outside the image."""
    count, channels, height, width = images.shape
    image_index = torch.arange(count, device=images.device)
    inside = ((rows >= 0) & (rows < height))[:, :, None] & ((columns >= 0) & (columns < width))[:, None, :]
    rows, columns = rows.clamp(0, height - 1), columns.clamp(0, width - 1)
    if images.is_contiguous():
        channel_index = torch.arange(channels, device=images.device)[:, None, None]
        picked = images[
            image_index[:, None, None, None], channel_index, rows[:, None, :, None], columns[:, None, None]
        ]
        return picked.masked_fill_(~inside[:, None], 0)
    # channels_last: all channels of a pixel are adjacent and are copied together.
    picked = images.permute(0, 2, 3, 1)[image_index[:, None, None], rows[:, :, None], columns[:, None, :]]
    return picked.masked_fill_(~inside[..., None], 0).permute(0, 3, 1, 2)


def _mix(state: int | Tensor) -> Tensor:
    """Apply the output function of splitmix64 (Steele, Lea and Flood, 2014), in int64 that wraps around."""
    x = torch.as_tensor(state, dtype=torch.int64) + _signed(_GOLDEN)
    x = (x ^ _shift_right(x, 30)) * _signed(0xBF58476D1CE4E5B9)
    x = (x ^ _shift_right(x, 27)) * _signed(0x94D049BB133111EB)
    return x ^ _shift_right(x, 31)


def _shift_right(x: Tensor, by: int) -> Tensor:
    # torch's >> copies the sign bit of an int64; the mask makes it an unsigned shift.
    return (x >> by) & ((1 << (64 - by)) - 1)


def _signed(number: int) -> int:
    number &= (1 << 64) - 1
    return number - (1 << 64) if number >> 63 else number
