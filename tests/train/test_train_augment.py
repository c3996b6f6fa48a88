"""Random crops and flips depend on seed, epoch and sample index only."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")

import torch
import torch.nn.functional as F  # noqa: N812

from train.data.augment import Augment, _mix

pytestmark = pytest.mark.torch
USUAL = Augment(seed=3, pad=2, flip=True)


def images(count: int, *, dtype: torch.dtype = torch.float32, channels: int = 3) -> torch.Tensor:
    """Return images whose pixels all differ, as far as the dtype allows, and none of which is 0."""
    pixels = torch.arange(count * channels * 6 * 5).view(count, channels, 6, 5)
    return (pixels % 251 + 1).to(dtype) if dtype is torch.uint8 else (pixels + 1).to(dtype)


def reference(image: torch.Tensor, down: int, right: int, flipped: int, pad: int) -> torch.Tensor:
    """Pad, crop, flip, one image at a time."""
    height, width = image.shape[1:]
    padded = F.pad(image.float(), (pad, pad, pad, pad)).to(image.dtype)
    crop = padded[:, pad + down : pad + down + height, pad + right : pad + right + width]
    return crop.flip(2) if flipped else crop


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8])
@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
def test_each_image_is_padded_cropped_and_flipped_as_drawn(
    dtype: torch.dtype, memory_format: torch.memory_format
) -> None:
    batch, indices = images(40, dtype=dtype), list(range(100, 140))
    augmented = USUAL(batch.to(memory_format=memory_format), epoch=4, indices=indices)
    draws = USUAL.draws(4, indices).T.tolist()
    expected = torch.stack(
        [reference(image, *drawn, pad=2) for image, drawn in zip(batch, draws, strict=True)]
    )
    assert augmented.dtype == dtype
    assert torch.equal(augmented, expected)
    assert augmented.is_contiguous(memory_format=memory_format)


def test_augmented_sample_does_not_depend_on_its_batch() -> None:
    batch = images(12)
    whole = USUAL(batch, epoch=1, indices=range(12))
    for world in (2, 3):
        for rank in range(world):
            own = list(range(rank, 12, world))
            assert torch.equal(USUAL(batch[own], epoch=1, indices=own), whole[own])
    backwards = list(reversed(range(12)))
    assert torch.equal(USUAL(batch[backwards], epoch=1, indices=backwards), whole[backwards])


def test_epoch_seed_and_index_each_change_the_draws() -> None:
    indices = list(range(200))
    one = USUAL.draws(1, indices)
    others = (
        USUAL.draws(2, indices),
        Augment(seed=4, pad=2, flip=True).draws(1, indices),
        USUAL.draws(1, [index + 1 for index in indices]),
    )
    for other in others:
        assert 0.5 < (one != other).any(0).float().mean().item() < 1.0
    # Seed and epoch are not interchangeable: seed 4 at epoch 1 is not seed 3 at epoch 2.
    assert not torch.equal(others[0], others[1])


def test_shifts_and_flips_are_uniform_and_uncorrelated() -> None:
    down, right, flipped = Augment(seed=0, pad=4, flip=True).draws(0, range(20_000))
    assert flipped.float().mean().item() == pytest.approx(0.5, abs=0.02)
    pairs = torch.bincount((down + 4) * 9 + right + 4, minlength=81)
    expected = 20_000 / 81
    assert ((pairs - expected) ** 2 / expected).sum().item() < 125  # chi-square with 80 degrees: 1 in 1000
    for one, other in ((down, right), (down, flipped), (right, flipped)):
        assert abs(torch.corrcoef(torch.stack([one, other]).double())[0, 1].item()) < 0.03


def test_hash_is_splitmix64() -> None:
    # The first outputs of the reference implementation for the seed 1234567.
    state, golden, outputs = 1234567, 0x9E3779B97F4A7C15, []
    for _ in range(3):
        outputs.append(_mix(torch.tensor(state)).item() % 2**64)
        state += golden
        state -= 2**64 if state >= 2**63 else 0
    assert outputs == [6457827717110365317, 3203168211198807973, 9817491932198370423]


def test_without_padding_and_flip_images_are_unchanged() -> None:
    batch = images(4)
    assert Augment(seed=0, pad=0, flip=False)(batch, epoch=0, indices=range(4)) is batch


def test_number_of_images_and_indices_must_agree() -> None:
    with pytest.raises(ValueError, match="3 images, but 2 indices"):
        USUAL(images(3), epoch=0, indices=[1, 2])


def test_augmentation_does_not_change_the_global_random_state() -> None:
    before = torch.get_rng_state()
    USUAL(images(3), epoch=0, indices=range(3))
    assert torch.equal(torch.get_rng_state(), before)
