"""The settings of `python -m bench.train.sweep`. Must not import torch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from train import cli as options
from train.cli import option
from train.config import MODELS
from train.errors import UsageError


@dataclass(frozen=True, slots=True, kw_only=True)
class Sweep:
    """What to measure. Raises `UsageError` on construction for a value that cannot work."""

    model: str = option("resnet50", "model to time", choices=MODELS)
    batch_size: int = option(120, "samples per step", at_least=1)
    image_size: int = option(128, "image side in pixels; images have 3 channels", at_least=1)
    classes: int = option(1000, "number of classes", at_least=2)
    splits: str = option(
        "1,3,5,8,10,12,20,40,60", "chunk sizes to try; those above the batch size are skipped"
    )
    cuts: str = option("", "layer that begins the second stage; default: balance the stages")
    steps: int = option(3, "training steps per measurement", at_least=1)
    repeats: int = option(10, "measurements of each mode, after one for warm-up", at_least=1)
    amp: str = option("none", "automatic mixed precision", choices=("none", "bf16"))
    channels_last: bool = option(False, "use the channels_last memory format")
    device: str = option("auto", "auto: cuda if available", choices=("auto", "cpu", "cuda"))
    json: str = option("", "file for the results as JSON")
    plot: str = option("", "file for a plot of the results as SVG")

    def __post_init__(self) -> None:
        options.validate(self)
        if not self.split_sizes:
            raise UsageError(f"--splits {self.splits}: none is within the batch size {self.batch_size}")
        for path in (self.json, self.plot):
            if path and not Path(path).parent.is_dir():
                raise UsageError(f"{path}: the folder does not exist; create it, or give another path")

    @property
    def split_sizes(self) -> list[int]:
        """The sizes to try, in order. Raises `UsageError` if it is not a list of positive integers."""
        sizes = [size.strip() for size in self.splits.split(",")]
        if not all(size.isdecimal() and int(size) > 0 for size in sizes):
            raise UsageError(f"--splits {self.splits}: must be positive integers, for example 5,10,20")
        return sorted({int(size) for size in sizes if int(size) <= self.batch_size})
