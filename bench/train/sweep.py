"""Times a two-device pipeline over the size of its chunks: `python -m bench.train.sweep`.

Measures training steps on one device, on two without chunks, and on two with chunks of each size, with and
without a copy stream; prints a table, and writes JSON and a plot on request. A step is a forward and a
backward pass and an update, on one batch that stays on the device. torch is imported after the flags are
checked.
"""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

from bench.train.sweep_config import Sweep
from train.cli import parse_record
from train.errors import TrainError, UsageError


def main(argv: list[str] | None = None) -> int:
    """Run the measurements that the command line names. Returns the exit code: 0; 1 failed; 2 bad usage."""
    try:
        run(
            parse_record(
                Sweep,
                sys.argv[1:] if argv is None else argv,
                prog="python -m bench.train.sweep",
                description="Time a two-device pipeline over the size of its chunks.",
            )
        )
    except TrainError as error:
        print(f"sweep: {error}", file=sys.stderr)
        return error.exit_code
    return 0


def run(sweep: Sweep) -> None:
    """Measure every mode, print the table, and write the files. Raises `UsageError` if there are too few
    GPUs, or matplotlib is missing for --plot."""
    if sweep.plot and importlib.util.find_spec("matplotlib") is None:
        raise UsageError("--plot needs matplotlib: pip install matplotlib")
    from bench.train import sweep_timing  # imports torch

    report = sweep_timing.measure(sweep)
    try:
        if sweep.json:
            Path(sweep.json).write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
        if sweep.plot:
            draw(report, Path(sweep.plot))
    except (OSError, ValueError) as error:  # ValueError: matplotlib does not know the format
        raise UsageError(f"cannot write the results ({error}): give another path") from error


def draw(report: dict[str, Any], path: Path) -> None:
    """Draw the rows of a report: seconds per step over the chunk size, bars from minimum to maximum.

    In an SVG the id of each series is its name with dashes: one-device, two-devices-naive, pipeline,
    pipeline-with-copy-stream.
    """
    import matplotlib  # may be missing otherwise
    from matplotlib.figure import Figure

    rows, settings = report["rows"], report["settings"]
    with matplotlib.rc_context({"svg.fonttype": "none"}):  # the text of an SVG stays text
        figure = Figure(layout="constrained", figsize=(9, 4.5))
        axes = figure.subplots()
        for row, colour in zip(rows[:2], ("black", "grey"), strict=True):
            line = axes.axhline(row["seconds"], color=colour, linestyle="--", label=row["mode"])
            line.set_gid(_id(row["mode"]))
        for stream, name in ((False, "pipeline"), (True, "pipeline with copy stream")):
            points = [row for row in rows if row["split_size"] and row["copy_stream"] is stream]
            if points:
                seconds = [row["seconds"] for row in points]
                bars = [
                    [row["seconds"] - row["least"] for row in points],
                    [row["most"] - row["seconds"] for row in points],
                ]
                sizes = [str(row["split_size"]) for row in points]
                drawn = axes.errorbar(sizes, seconds, bars, marker="o", capsize=3, label=name)
                drawn.lines[0].set_gid(_id(name))
        axes.set(
            xlabel="samples per chunk",
            ylabel="seconds per step",
            ylim=(0, None),
            title=f"{settings['model']}, batch size {settings['batch_size']}, "
            f"{settings['name']}\n{report['note']}",
        )
        axes.legend()
        figure.savefig(path)


def _id(name: str) -> str:
    return name.replace(",", "").replace(" ", "-")


if __name__ == "__main__":
    sys.exit(main())
