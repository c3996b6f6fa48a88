"""The settings of `python -m bench.train.sweep`. Must not import torch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_type_hints

from train.errors import UsageError
from train.flags import Limit, Positive


@dataclass(frozen=True, slots=True, kw_only=True)
class Sweep:
    """What to measure. Raises `UsageError` on construction for a value that cannot work."""

    model: Literal["small", "mnist", "resnet18", "resnet50"] = "resnet50"
    """Model to time."""
    batch_size: Positive = 120
    """Samples per step."""
    image_size: Positive = 128
    """Image side in pixels; images have 3 channels."""
    splits: str = "1,3,5,8,10,12,20,40,60"
    """Chunk sizes to try; those above the batch size are skipped."""
    steps: Positive = 3
    """Training steps per measurement."""
    repeats: Positive = 10
    """Measurements of each mode, after one for warm-up."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto: cuda if available."""
    json: str = ""
    """File for the results as JSON."""
    plot: str = ""
    """File for a plot of the results: .svg, .png or .pdf; needs matplotlib."""

    def __post_init__(self) -> None:
        for name, hint in get_type_hints(type(self), include_extras=True).items():
            for limit in (one for one in getattr(hint, "__metadata__", ()) if isinstance(one, Limit)):
                if problem := limit.problem(getattr(self, name)):
                    raise UsageError(f"--{name.replace('_', '-')} {getattr(self, name)}: {problem}")
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
