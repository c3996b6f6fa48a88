"""The networks. A model here is an `nn.Sequential` that maps a batch of images to one score per class.

It must not know ranks, devices or process groups: parallelism is wrapped around it from outside. As a sequence of
named layers a network can be cut into stages without a word of its own; names, and so snapshots, stay the same. To
train a model of your own, add it to `build` and its name to MODELS in config.py; only pipelines need a sequence.
"""

from __future__ import annotations

from collections import OrderedDict

import torch
from torch import nn

from train.errors import UsageError

LEAST_SIZE = {"small": 2, "mnist": 10, "resnet18": 32, "resnet50": 32, "linear": 1}


def build(name: str, *, shape: tuple[int, int, int], classes: int, seed: int) -> nn.Module:
    """The model `name` for images of `shape` (channels, height, width), with weights decided by `seed`.

    Raises `UsageError` where the model and the images do not fit, or torchvision is missing.
    """
    channels, height, width = shape
    size = min(height, width)
    if size < LEAST_SIZE[name]:
        raise UsageError(
            f"--model {name} needs images of at least {LEAST_SIZE[name]}x{LEAST_SIZE[name]}; these are {height}x{width}"
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
    """Two convolutions and two linear layers for images as small as 8x8. No BatchNorm, so that data-parallel
    training is equal to training on one process up to the order of additions."""
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
    """The MNIST network of the PyTorch DDP walk-throughs: 225,226 parameters at 1x28x28 and 10 classes.

    It returns scores; cross-entropy on them is what log_softmax followed by nll_loss computes."""
    left = [((side - 2) // 2 - 2) // 2 for side in (height, width)]
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
        fc1=nn.Linear(64 * left[0] * left[1], 128),
        fc2=nn.Linear(128, classes),
    )


def resnet(name: str, channels: int, classes: int) -> nn.Sequential:
    """torchvision's ResNet as a sequence of its own layers: the parameters keep torchvision's names.

    Raises `UsageError` where torchvision is missing or the images are not of 3 channels.
    """
    if channels != 3:
        raise UsageError(f"--model {name} needs images of 3 channels; these have {channels}")
    try:
        from torchvision import models
    except (ImportError, RuntimeError) as error:  # RuntimeError: a torchvision built for another torch
        raise UsageError(
            f"--model {name} needs a torchvision that matches torch ({error}); pip install torchvision"
        ) from error
    network = models.get_model(name, weights=None, num_classes=classes)
    layers = dict(network.named_children())
    return _sequence(
        **{key: layers[key] for key in layers if key != "fc"}, flatten=nn.Flatten(), fc=layers["fc"]
    )


def _sequence(**layers: nn.Module) -> nn.Sequential:
    return nn.Sequential(OrderedDict(layers))
