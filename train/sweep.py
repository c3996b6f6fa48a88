"""How the size of the pieces decides the speed of a two-device pipeline: `python -m train.sweep`.

Times training steps on one device, on two without pieces, and on two with pieces of each size, with and without a
copy stream; prints a table, and writes JSON and a plot where asked to. It must not know the trainer: a step here is
a forward and a backward pass and an update, on one batch that stays on the device. torch is imported after the flags
are checked.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from train import flags
from train.config import MODELS
from train.errors import TrainError, UsageError
from train.flags import option

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

ONE_PROCESSOR = "Both devices are the one processor of this machine: this shows that the modes run, and nothing about speed."


@dataclass(frozen=True, slots=True, kw_only=True)
class Sweep:
    """What is timed. Values are checked when it is made; `UsageError` says what is allowed."""

    model: str = option("resnet50", "the network", choices=MODELS)
    batch_size: int = option(120, "samples per step", at_least=1)
    image_size: int = option(128, "side of the images, which have 3 channels", at_least=1)
    classes: int = option(1000, "classes to tell apart", at_least=2)
    splits: str = option(
        "1,3,5,8,10,12,20,40,60", "samples per piece to try; those above the batch are left out"
    )
    cuts: str = option("", "the layer that begins the second stage; default even")
    steps: int = option(3, "training steps in one timing", at_least=1)
    repeats: int = option(10, "timings of each mode, after one that does not count", at_least=1)
    amp: str = option("none", "mixed precision", choices=("none", "bf16"))
    channels_last: bool = option(False, "store images with the channel as the last dimension")
    device: str = option("auto", "auto: cuda where there is one", choices=("auto", "cpu", "cuda"))
    json: str = option("", "file for the results as JSON")
    plot: str = option("", "file for a plot of them as SVG")

    def __post_init__(self) -> None:
        flags.check(self)
        if not self.split_sizes:
            raise UsageError(f"--splits {self.splits}: none is within the batch of {self.batch_size}")
        for path in (self.json, self.plot):
            if path and not Path(path).parent.is_dir():
                raise UsageError(f"{path}: there is no such folder to write in; make it, or give another")

    @property
    def split_sizes(self) -> list[int]:
        """The sizes to try, in order. Raises `UsageError` for what is not a list of numbers from 1 up."""
        sizes = [size.strip() for size in self.splits.split(",")]
        if not all(size.isdecimal() and int(size) > 0 for size in sizes):
            raise UsageError(
                f"--splits {self.splits}: must be numbers from 1 up with commas between, as 5,10,20"
            )
        return sorted({int(size) for size in sizes if int(size) <= self.batch_size})


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """The timings of one mode: seconds per step. `split_size` is 0 where the batch goes through in one piece.
    `against_one_device` is how many times as fast as one device it is; None on a CPU, where there is no second."""

    mode: str
    split_size: int
    copy_stream: bool
    seconds: float
    least: float
    most: float
    images_per_second: float
    against_one_device: float | None


def main(argv: list[str] | None = None) -> int:
    """Time what the command line asks for. Returns the exit code: 0; 1 failed; 2 bad usage."""
    try:
        given = flags.read(
            Sweep,
            sys.argv[1:] if argv is None else argv,
            prog="python -m train.sweep",
            description="Time a two-device pipeline over the size of its pieces.",
        )
        sweep = Sweep(**given)
        report = run(sweep, print)
        for path, text in ((sweep.json, json.dumps(report, indent=1) + "\n"), (sweep.plot, plot(report))):
            if path:
                _write(Path(path), text)
    except TrainError as error:
        print(f"sweep: {error}", file=sys.stderr)
        return error.exit_code
    return 0


def run(sweep: Sweep, say: Callable[[str], None]) -> dict[str, Any]:
    """Time every mode; a line of the table goes to `say` as soon as it is known. Returns what --json writes.

    Raises `UsageError` where there are too few GPUs.
    """
    import torch

    from train import models
    from train.parallel import single_samples_explained

    pair = _devices(sweep)
    on = torch.cuda.get_device_name(pair[0]) if pair[0].type == "cuda" else "CPU"
    note = "" if pair[0].type == "cuda" else ONE_PROCESSOR
    say(
        f"{sweep.model}, batch of {sweep.batch_size} at 3x{sweep.image_size}x{sweep.image_size}, {sweep.amp} amp, "
        f"{on}, torch {torch.__version__}; seconds per step, median of {sweep.repeats} x {sweep.steps} steps"
    )
    if note:
        say(note)
    say(f"{'mode':<26}{'seconds':>10}{'least':>10}{'most':>10}{'images/s':>11}{'gain':>8}")

    torch.manual_seed(0)
    shape = (3, sweep.image_size, sweep.image_size)
    module = models.build(sweep.model, shape=shape, classes=sweep.classes, seed=0)
    inputs = torch.randn(sweep.batch_size, *shape).to(pair[0], memory_format=_layout(sweep))
    labels = torch.randint(0, sweep.classes, (sweep.batch_size,))
    rows: list[Row] = []
    for mode, split_size, copy_stream, model in _modes(sweep, module, pair):
        with single_samples_explained():
            seconds = _time(sweep, model, inputs, labels.to(pair[mode != "one device"]))
        median = statistics.median(seconds)
        row = Row(
            mode=mode,
            split_size=split_size,
            copy_stream=copy_stream,
            seconds=median,
            least=min(seconds),
            most=max(seconds),
            images_per_second=sweep.batch_size / median,
            against_one_device=None if note else (rows[0].seconds if rows else median) / median,
        )
        rows.append(row)
        say(_line(row))
    settings = {**asdict(sweep), "device": str(pair[0].type), "name": on, "torch": str(torch.__version__)}
    return {"settings": settings, "note": note, "rows": [asdict(row) for row in rows]}


def _devices(sweep: Sweep) -> tuple[torch.device, torch.device]:
    import torch

    from train.pipeline import devices

    if sweep.device == "cpu" or (sweep.device == "auto" and not torch.cuda.is_available()):
        return devices(torch.device("cpu"))
    count = torch.cuda.device_count()
    if count < 2:
        raise UsageError(f"the sweep needs two GPUs, and torch sees {count}: give --device cpu to see it run")
    return devices(torch.device("cuda", 0))


def _layout(sweep: Sweep) -> torch.memory_format:
    import torch

    return torch.channels_last if sweep.channels_last else torch.contiguous_format


def _modes(
    sweep: Sweep, module: nn.Module, pair: tuple[torch.device, torch.device]
) -> Iterator[tuple[str, int, bool, nn.Module]]:
    """(mode, split size, copy stream, model) of each line. They share their weights: the model moves along."""
    from train.pipeline import TwoDevices

    layout = _layout(sweep)
    yield "one device", 0, False, module.to(pair[0], memory_format=layout)
    for copy_stream in (False, True) if pair[0].type == "cuda" else (False,):
        for size in ([] if copy_stream else [0]) + sweep.split_sizes:
            model = TwoDevices(
                module,
                pair,
                cuts=sweep.cuts,
                split_size=size,
                copy_stream=copy_stream,
                memory_format=layout,
            )
            yield "pipeline" if size else "two devices, naive", size, copy_stream, model


def _time(sweep: Sweep, model: nn.Module, inputs: Tensor, labels: Tensor) -> list[float]:
    """Seconds per step, for each repeat."""
    import torch

    optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
    model.train()
    seconds = []
    for _ in range(sweep.repeats + 1):
        begun = time.perf_counter()
        for _ in range(sweep.steps):
            optimizer.zero_grad()
            with torch.autocast(inputs.device.type, torch.bfloat16, enabled=sweep.amp == "bf16"):
                outputs = model(inputs)
            torch.nn.functional.cross_entropy(outputs.float(), labels).backward()
            optimizer.step()
        if inputs.device.type == "cuda":
            for device in {inputs.device, labels.device}:
                torch.cuda.synchronize(device)
        seconds.append((time.perf_counter() - begun) / sweep.steps)
    return seconds[1:]


def _line(row: Row) -> str:
    name = row.mode + (f", pieces of {row.split_size}" if row.split_size else "")
    name += " *" if row.copy_stream else ""
    gain = "-" if row.against_one_device is None else f"{100 * (row.against_one_device - 1):+.0f}%"
    times = "".join(f"{value:>10.4f}" for value in (row.seconds, row.least, row.most))
    return f"{name:<26}{times}{row.images_per_second:>11.1f}{gain:>8}" + (
        "  (* copy stream)" if row.copy_stream else ""
    )


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UsageError(
            f"{path} cannot be written ({error}): give a path in a folder that exists"
        ) from error


def plot(report: dict[str, Any]) -> str:
    """The rows of `run` as an SVG: seconds per step over the size of the pieces, bars from least to most."""
    rows = report["rows"]
    settings = report["settings"]
    sizes = sorted({row["split_size"] for row in rows if row["split_size"]})
    top = 1.05 * max(row["most"] for row in rows)

    def x(size: int) -> float:
        return 80 + 600 * (sizes.index(size) + 0.5) / len(sizes)

    def y(seconds: float) -> float:
        return 360 - 300 * seconds / top

    def text(at_x: float, at_y: float, words: str, anchor: str = "middle") -> str:
        return f'<text x="{at_x:.1f}" y="{at_y:.1f}" text-anchor="{anchor}">{words}</text>'

    def level(row: dict[str, Any], colour: str) -> str:
        at = y(row["seconds"])
        rule = (
            f'<line x1="80" x2="680" y1="{at:.1f}" y2="{at:.1f}" stroke="{colour}" stroke-dasharray="6 4"/>'
        )
        return rule + text(685, at + 4, row["mode"], "start")

    def curve(points: list[dict[str, Any]], colour: str, name: str) -> str:
        places = [(x(row["split_size"]), row) for row in points]
        line = " ".join(f"{at:.1f},{y(row['seconds']):.1f}" for at, row in places)
        bars = "".join(
            f'<line x1="{at:.1f}" x2="{at:.1f}" y1="{y(row["least"]):.1f}" y2="{y(row["most"]):.1f}" stroke="{colour}"/>'
            for at, row in places
        )
        label = text(685, y(points[-1]["seconds"]) + 4, name, "start")
        return f'<polyline points="{line}" fill="none" stroke="{colour}"/>{bars}{label}'

    pipelined = [
        [row for row in rows if row["split_size"] and row["copy_stream"] is own] for own in (False, True)
    ]
    title = f"{settings['model']}, batch {settings['batch_size']}, {settings['name']}"
    parts = [
        '<svg xmlns="http://www.w3.org/2000/svg" width="860" height="430" font-family="sans-serif" font-size="12">',
        '<rect width="860" height="430" fill="white"/>',
        '<path d="M80 60V360H680" fill="none" stroke="black"/>',
        text(380, 18, title),
        text(380, 34, report["note"]),
        text(380, 405, "samples per piece"),
        text(80, 54, "seconds per step"),
        *[text(x(size), 378, str(size)) for size in sizes],
        *[text(72, y(top * part / 5) + 4, f"{top * part / 5:.3g}", "end") for part in range(6)],
        level(rows[0], "black"),
        level(rows[1], "grey"),
        curve(pipelined[0], "steelblue", "pipeline"),
        curve(pipelined[1], "firebrick", "with copy stream") if pipelined[1] else "",
        "</svg>",
    ]
    return "\n".join(part for part in parts if part) + "\n"


if __name__ == "__main__":
    sys.exit(main())
