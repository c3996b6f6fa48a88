"""The models. Each is an `nn.Sequential` that maps a batch of images, or of texts, to scores.

Models do not depend on ranks or devices: parallelism is wrapped around them from outside. As a sequence of
named layers a model can be split into stages without changing it; names, and so snapshots, stay the same. To
train a model of your own, write a script of your own (docs/training.md), or add it to `build` and flags.py;
only pipelines need a sequence.
"""

from __future__ import annotations

from collections import OrderedDict

import torch
import torch.nn.functional as F  # noqa: N812  (the name that PyTorch code uses)
from torch import Tensor, nn

from train.errors import UsageError

MIN_IMAGE_SIZE = {"small": 2, "mnist": 10, "resnet18": 32, "resnet50": 32, "linear": 1}


def build(name: str, *, shape: tuple[int, ...], classes: int, seed: int) -> nn.Module:
    """Return the model `name`, with weights determined by `seed`.

    `shape` is (channels, height, width) of the images, or (length,) of the texts, whose tokens are 0 to
    `classes` - 1. Raises `UsageError` where the model does not fit the data, or torchvision is missing.
    """
    torch.manual_seed(seed)
    if name == "own":
        raise UsageError(
            "--model own is that of a script of your own (see docs/training.md): name another model"
        )
    if (name == "transformer") != (len(shape) == 1):
        raise UsageError(
            f"--model {name} does not fit this dataset: the transformer takes texts, the others images"
        )
    if name == "transformer":
        return transformer(classes, shape[0])
    channels, height, width = shape
    smallest = MIN_IMAGE_SIZE[name]
    if min(height, width) < smallest:
        raise UsageError(
            f"--model {name} needs images of at least {smallest}x{smallest}; these are {height}x{width}"
        )
    if name == "small":
        return small(channels, height, width, classes)
    if name == "mnist":
        return mnist(channels, height, width, classes)
    if name == "linear":
        return _sequence(flatten=nn.Flatten(), fc=nn.Linear(channels * height * width, classes))
    return resnet(name, channels, classes)


def small(channels: int, height: int, width: int, classes: int) -> nn.Sequential:
    """Return two convolutions and two linear layers, for images as small as 8x8.

    Without BatchNorm, so that data-parallel training equals training on one process up to the order of
    additions.
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


def transformer(
    tokens: int, length: int, *, width: int = 64, heads: int = 4, blocks: int = 2
) -> nn.Sequential:
    """Return a small decoder: int64 tokens [n, length] to scores [n, length, tokens] of the next one."""
    layers = {f"block{number}": Block(width, heads) for number in range(blocks)}
    return _sequence(
        embedding=Embedding(tokens, length, width),
        **layers,
        norm=nn.LayerNorm(width),
        head=nn.Linear(width, tokens, bias=False),
    )


class Embedding(nn.Module):
    """The sum of a vector for each token and one for its position."""

    def __init__(self, tokens: int, length: int, width: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(tokens, width)
        self.positions = nn.Embedding(length, width)

    def forward(self, tokens: Tensor) -> Tensor:
        places = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
        values: Tensor = self.tokens(tokens) + self.positions(places)
        return values


class Attention(nn.Module):
    """Causal self-attention. The heads may be split over ranks: their number follows from the shapes of the
    projections."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.head_width = width // heads
        self.query, self.key, self.value, self.output = (nn.Linear(width, width) for _ in range(4))

    def forward(self, values: Tensor) -> Tensor:
        count, length = values.shape[:2]
        query, key, value = (
            layer(values).view(count, length, -1, self.head_width).transpose(1, 2)
            for layer in (self.query, self.key, self.value)
        )
        attended = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        mixed: Tensor = self.output(attended.transpose(1, 2).flatten(2))
        return mixed


class Block(nn.Module):
    """Attention and two linear layers, each added to its input and preceded by a normalization."""

    SPLIT_BY_COLUMNS = ("attention.query", "attention.key", "attention.value", "wide")
    SPLIT_BY_ROWS = ("attention.output", "narrow")

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = Attention(width, heads)
        self.wide, self.narrow = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, values: Tensor) -> Tensor:
        values = values + self.attention(self.norm1(values))
        widened: Tensor = values + self.narrow(F.gelu(self.wide(self.norm2(values))))
        return widened


def _sequence(**layers: nn.Module) -> nn.Sequential:
    return nn.Sequential(OrderedDict(layers))
