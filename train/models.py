"""The networks. A model here is a plain module that maps a batch of images to one score per class.

It must not know ranks, devices or process groups: parallelism is wrapped around it from outside. To train a model
of your own, add it to `build` and its name to MODELS in config.py.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812  (the name that PyTorch code uses)
from torch import Tensor, nn

from train.errors import UsageError


class SmallNet(nn.Module):
    """Two convolutions and two linear layers for images as small as 8x8. No BatchNorm, so that data-parallel
    training is equal to training on one process up to the order of additions."""

    def __init__(self, channels: int, size: int, classes: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, 16, 3, padding=1)
        self.conv2 = nn.Conv2d(16, 32, 3, padding=1)
        self.fc1 = nn.Linear(32 * (size // 2) ** 2, 64)
        self.fc2 = nn.Linear(64, classes)

    def forward(self, images: Tensor) -> Tensor:
        """Images [batch, channels, size, size] to scores [batch, classes]."""
        x = F.relu(self.conv1(images))
        x = F.max_pool2d(F.relu(self.conv2(x)), 2)
        return self.fc2(F.relu(self.fc1(x.flatten(1))))


class MnistNet(nn.Module):
    """The MNIST network of the PyTorch DDP walk-throughs: 225,226 parameters at 1x28x28 and 10 classes.

    It returns scores; cross-entropy on them is what log_softmax followed by nll_loss computes."""

    def __init__(self, channels: int, size: int, classes: int) -> None:
        super().__init__()
        left = ((size - 2) // 2 - 2) // 2
        self.conv1 = nn.Conv2d(channels, 32, 3)
        self.norm1 = nn.BatchNorm2d(32)
        self.conv2 = nn.Conv2d(32, 64, 3)
        self.norm2 = nn.BatchNorm2d(64)
        self.fc1 = nn.Linear(64 * left * left, 128)
        self.fc2 = nn.Linear(128, classes)

    def forward(self, images: Tensor) -> Tensor:
        """Images [batch, channels, size, size] to scores [batch, classes]."""
        x = F.max_pool2d(F.relu(self.norm1(self.conv1(images))), 2)
        x = F.max_pool2d(F.relu(self.norm2(self.conv2(x))), 2)
        return self.fc2(self.fc1(x.flatten(1)))


def build(name: str, *, shape: tuple[int, int, int], classes: int, seed: int) -> nn.Module:
    """The model `name` for images of `shape` (channels, height, width), with weights decided by `seed`.

    Raises `UsageError` where the model and the images do not fit, or torchvision is missing.
    """
    channels, size, _ = shape
    least = {"small": 2, "mnist": 10, "resnet18": 32, "linear": 1}[name]
    if size < least:
        raise UsageError(f"--model {name} needs images of at least {least}x{least}; these are {size}x{size}")
    torch.manual_seed(seed)
    if name == "small":
        return SmallNet(channels, size, classes)
    if name == "mnist":
        return MnistNet(channels, size, classes)
    if name == "linear":
        return nn.Sequential(nn.Flatten(), nn.Linear(channels * size * size, classes))
    return _resnet18(channels, classes)


def _resnet18(channels: int, classes: int) -> nn.Module:
    if channels != 3:
        raise UsageError(f"--model resnet18 needs images of 3 channels; these have {channels}")
    try:
        from torchvision.models import resnet18
    except (ImportError, RuntimeError) as error:  # RuntimeError: a torchvision built for another torch
        raise UsageError(
            f"--model resnet18 needs a torchvision that matches torch ({error}); pip install torchvision"
        ) from error
    return resnet18(weights=None, num_classes=classes)
