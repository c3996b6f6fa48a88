"""Times a two-device pipeline over the size of its chunks: `python -m bench.train.sweep`.

Measures training steps on one device, on two without chunks, and on two with chunks of each size, with and without a
copy stream; prints a table, and writes JSON and a plot on request. A step is a forward and a backward pass and an
update, on one batch that stays on the device. torch is imported after the flags are checked.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from bench.train.sweep_config import Sweep
from train import cli as options
from train.errors import TrainError, UsageError


def main(argv: list[str] | None = None) -> int:
    """Run the measurements that the command line names. Returns the exit code: 0; 1 failed; 2 bad usage."""
    try:
        given = options.parse_args(
            Sweep,
            sys.argv[1:] if argv is None else argv,
            prog="python -m bench.train.sweep",
            description="Time a two-device pipeline over the size of its chunks.",
        )
        run(Sweep(**given))
    except TrainError as error:
        print(f"sweep: {error}", file=sys.stderr)
        return error.exit_code
    return 0


def run(sweep: Sweep) -> None:
    """Measure every mode, print the table, and write the files. Raises `UsageError` if there are too few GPUs."""
    from bench.train import sweep_timing  # imports torch

    report = sweep_timing.measure(sweep)
    for path, text in ((sweep.json, json.dumps(report, indent=1) + "\n"), (sweep.plot, plot(report))):
        if path:
            _write(Path(path), text)


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UsageError(f"cannot write {path} ({error}): give another path") from error


def plot(report: dict[str, Any]) -> str:
    """Return the rows of a report as an SVG: seconds per step over the chunk size, bars from minimum to maximum."""
    rows = report["rows"]
    settings = report["settings"]
    sizes = sorted({row["split_size"] for row in rows if row["split_size"]})
    top = 1.05 * max(row["most"] for row in rows)

    def x(size: int) -> float:
        return 80 + 600 * (sizes.index(size) + 0.5) / len(sizes)

    def y(seconds: float) -> float:
        return float(360 - 300 * seconds / top)

    def text(at_x: float, at_y: float, words: str, anchor: str = "middle") -> str:
        return f'<text x="{at_x:.1f}" y="{at_y:.1f}" text-anchor="{anchor}">{words}</text>'

    def level(row: dict[str, Any], colour: str) -> str:
        at = y(row["seconds"])
        rule = (
            f'<line x1="80" x2="680" y1="{at:.1f}" y2="{at:.1f}" stroke="{colour}" stroke-dasharray="6 4"/>'
        )
        return rule + text(685, at + 4, row["mode"], "start")

    def curve(points: list[dict[str, Any]], colour: str, name: str) -> str:
        at_sizes = [(x(row["split_size"]), row) for row in points]
        line = " ".join(f"{at:.1f},{y(row['seconds']):.1f}" for at, row in at_sizes)
        bars = "".join(
            f'<line x1="{at:.1f}" x2="{at:.1f}" y1="{y(row["least"]):.1f}" '
            f'y2="{y(row["most"]):.1f}" stroke="{colour}"/>'
            for at, row in at_sizes
        )
        label = text(685, y(points[-1]["seconds"]) + 4, name, "start")
        return f'<polyline points="{line}" fill="none" stroke="{colour}"/>{bars}{label}'

    pipelined = [
        [row for row in rows if row["split_size"] and row["copy_stream"] is stream]
        for stream in (False, True)
    ]
    title = f"{settings['model']}, batch size {settings['batch_size']}, {settings['name']}"
    parts = [
        '<svg xmlns="http://www.w3.org/2000/svg" width="860" height="430" font-family="sans-serif" font-size="12">',
        '<rect width="860" height="430" fill="white"/>',
        '<path d="M80 60V360H680" fill="none" stroke="black"/>',
        text(380, 18, title),
        text(380, 34, report["note"]),
        text(380, 405, "samples per chunk"),
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
