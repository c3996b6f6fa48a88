"""The models. Each is an `nn.Sequential` that maps a batch of images to one score per class.

Models do not depend on ranks or devices: parallelism is wrapped around them from outside. As a sequence of named layers
a model can be split into stages without changing it; names, and so snapshots, stay the same. To train a model of your
own, add it to `build` and its name to MODELS in config.py; only pipelines need a sequence.
"""

from __future__ import annotations

from collections import OrderedDict

import torch
from torch import nn

from train.errors import UsageError

MIN_IMAGE_SIZE = {"small": 2, "mnist": 10, "resnet18": 32, "resnet50": 32, "linear": 1}


def build(name: str, *, shape: tuple[int, int, int], classes: int, seed: int) -> nn.Module:
    """Return the model `name` for images of `shape` (channels, height, width), with weights determined by `seed`.

    Raises `UsageError` where the model does not fit the images, or torchvision is missing.
    """
    channels, height, width = shape
    smallest = MIN_IMAGE_SIZE[name]
    if min(height, width) < smallest:
        raise UsageError(
            f"--model {name} needs images of at least {smallest}x{smallest}; these are {height}x{width}"
        )
    torch.manual_seed(seed)
    if name == "small":
        return small(channels, height, width, classes)
    if name == "mnist":
        return mnist(channels, height, width, classes)
    if name == "linear":
        return _sequence(flatten=nn.Flatten(), fc=nn.Linear(channels * height * width, classes))
    return resnet(name, channels, classes)


def small(channels: int, height: int, width: int, classes: int) -> nn.Sequential:
    """Return two convolutions and two linear layers, for images as small as 8x8.

    Without BatchNorm, so that data-parallel training equals training on one process up to the order of additions.
    """
    return _sequence(
        conv1=nn.Conv2d(channels, 16, 3, padding=1),
        relu1=nn.ReLU(),
        conv2=nn.Conv2d(16, 32, 3, padding=1),
        relu2=nn.ReLU(),
        pool=nn.MaxPool2d(2),
        flatten=nn.Flatten(),
        fc1=nn.Linear(32 * (height // 2) * (width // 2), 64),
        relu3=nn.ReLU(),
        fc2=nn.Linear(64, classes),
    )


def mnist(channels: int, height: int, width: int, classes: int) -> nn.Sequential:
    """Return the MNIST model of the PyTorch DDP tutorials: 225,226 parameters at 1x28x28 and 10 classes.

    It returns scores; cross-entropy on them equals log_softmax followed by nll_loss.
    """
    pooled = [((side - 2) // 2 - 2) // 2 for side in (height, width)]
    return _sequence(
        conv1=nn.Conv2d(channels, 32, 3),
        norm1=nn.BatchNorm2d(32),
        relu1=nn.ReLU(),
        pool1=nn.MaxPool2d(2),
        conv2=nn.Conv2d(32, 64, 3),
        norm2=nn.BatchNorm2d(64),
        relu2=nn.ReLU(),
        pool2=nn.MaxPool2d(2),
        flatten=nn.Flatten(),
        fc1=nn.Linear(64 * pooled[0] * pooled[1], 128),
        fc2=nn.Linear(128, classes),
    )


def resnet(name: str, channels: int, classes: int) -> nn.Sequential:
    """Return torchvision's ResNet as a sequence of its own layers, whose parameters keep torchvision's names.

    Raises `UsageError` where torchvision is missing or the images do not have 3 channels.
    """
    if channels != 3:
        raise UsageError(f"--model {name} needs images of 3 channels; these have {channels}")
    try:
        from torchvision import models
    except (ImportError, RuntimeError) as error:  # RuntimeError: a torchvision built for another torch
        raise UsageError(
            f"--model {name} needs a torchvision that matches torch ({error}): pip install torchvision"
        ) from error
    network = models.get_model(name, weights=None, num_classes=classes)
    layers = dict(network.named_children())
    return _sequence(
        **{key: layers[key] for key in layers if key != "fc"}, flatten=nn.Flatten(), fc=layers["fc"]
    )


def _sequence(**layers: nn.Module) -> nn.Sequential:
    return nn.Sequential(OrderedDict(layers))
