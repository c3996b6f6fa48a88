"""How fast the trainer is, side by side with the loops of pytorch/examples in the same process.

    python -m train.bench                 the cases that this machine can show, as a table
    python -m train.bench resnet50 --batch-size 256 --steps 50 --json out.json

Each case is timed in turns (theirs, ours, theirs, ...) with the same weights, batches, precision and threads, each side
in a process of its own that waits while the other computes. Theirs is handed batches that lie ready in memory; ours
does all that a user's run does, reading by index and writing metrics included. This room gives a model and data to the
Trainer that main.py uses; how a job is started it must not know.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import platform
import statistics
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from train import dist
from train.bench_sides import Case, serve
from train.config import make
from train.errors import TrainError, UsageError

EXAMPLES = Path(__file__).resolve().parents[1] / "bench" / "peers" / "pytorch-examples"
HEAD = f"{'case':<34} {'ours':>9} {'theirs':>9}  {'ratio':>5}   samples/s, median (smallest to largest)"

CPU = {
    "resnet18": Case(
        model="resnet18", shape=(3, 96, 96), classes=1000, batch_size=16, steps=6, peer="imagenet/main.py"
    ),
    "mnist": Case(
        model="mnist", shape=(1, 28, 28), classes=10, batch_size=64, steps=60, peer="mnist/main.py"
    ),
}
CPU["jpeg"] = dataclasses.replace(CPU["resnet18"], peer="", jpeg=True, flags={"workers": 1})
FAST = {"on_device": True, "amp": "bf16", "channels_last": True}
GPU = {
    "resnet50": Case(
        model="resnet50",
        shape=(3, 224, 224),
        classes=1000,
        batch_size=256,
        steps=20,  # 3 GB of images
        peer="imagenet/main.py",
        flags=FAST,
    ),
    "mnist": dataclasses.replace(CPU["mnist"], steps=200),
}
GPU["resnet18"] = dataclasses.replace(GPU["resnet50"], model="resnet18", batch_size=512)
GPU["jpeg"] = dataclasses.replace(
    GPU["resnet50"], peer="", jpeg=True, flags={"workers": 12, "amp": "bf16", "channels_last": True}
)


def main(argv: Sequence[str] | None = None) -> int:
    """Time the cases that the command line names. Returns the exit code: 0, or 2 for what cannot be run."""
    args = _parser().parse_args(argv)
    try:
        run(args)
    except TrainError as error:
        print(f"train.bench: {error}", file=sys.stderr)
        return error.exit_code
    return 0


def run(args: argparse.Namespace) -> None:
    """Print a row per case; with --json write the same and the turns themselves."""
    torch.set_num_threads(args.threads)
    if args.side:
        serve(json.loads(args.side))
        return
    device = dist.pick_device(make(device=args.device), dist.Place())
    machine = describe(device, args.threads)
    print(", ".join(f"{name} {value}" for name, value in machine.items()))
    print(HEAD, flush=True)
    rows = []
    for case in choose(args, device):
        rows.append(measure(case, args))
        print(line(rows[-1]), flush=True)
    if args.json:
        Path(args.json).write_text(
            json.dumps({"machine": machine, "cases": rows}, indent=2) + "\n", encoding="utf-8"
        )


def choose(args: argparse.Namespace, device: torch.device) -> list[Case]:
    """The cases that `args` names, with its changes. Raises `UsageError` for a name that this device has not."""
    known = GPU if device.type == "cuda" else CPU
    for name in args.cases:
        if name not in known:
            raise UsageError(
                f"{name}: there is no such case on {device.type}; choose from {', '.join(known)}"
            )
    chosen = [known[name] for name in args.cases or known]
    for field in ("batch_size", "steps"):
        if getattr(args, field):
            chosen = [dataclasses.replace(case, **{field: getattr(args, field)}) for case in chosen]
    if args.image_size:
        size = args.image_size
        chosen = [dataclasses.replace(case, shape=(case.shape[0], size, size)) for case in chosen]
    for case in chosen:
        if case.peer and not Path(args.examples, case.peer).is_file():
            raise UsageError(
                f"{Path(args.examples, case.peer)} is missing: give --examples, a checkout of github.com/pytorch/examples"
            )
    return [
        dataclasses.replace(case, flags={**case.flags, **flags})
        for flags in variants(args.variants)
        for case in chosen
    ]


def variants(text: str) -> list[dict[str, Any]]:
    """Sets of flags to time each case with: "amp=none;amp=bf16,compile" is two. Raises `UsageError`."""
    sets = []
    for part in text.split(";"):
        flags: dict[str, Any] = {}
        for item in filter(None, part.split(",")):
            name, _, value = item.partition("=")
            if name not in ("amp", "channels_last", "compile", "fused", "on_device", "workers"):
                raise UsageError(
                    f"--variants {text}: {name} is not amp, channels_last, compile, fused, on_device or workers"
                )
            flags[name] = int(value) if value.isdecimal() else value or True
        sets.append(flags)
    return sets


def measure(case: Case, args: argparse.Namespace) -> dict[str, Any]:
    """Time `args.turns` turns of each side, after one that does not count. Returns the row of the report."""
    sides = ["theirs", "ours"] if case.peer else ["ours"]
    rates: dict[str, list[float]] = {side: [] for side in sides}
    seen: dict[str, Any] = {}
    with contextlib.ExitStack() as stack:
        processes = {side: stack.enter_context(Side(side, case, args)) for side in sides}
        for turn in range(args.turns + 1):
            for side, process in processes.items():
                seen = process.turn()
                if turn:
                    rates[side].append(case.steps * case.batch_size / seen["seconds"])
    known = {name: seen[name] for name in ("data_wait", "mfu", "peak_memory_bytes") if name in seen}
    row = {
        "case": case.name,
        **{side: summary(values) for side, values in rates.items()},
        **known,
        "turns": rates,
    }
    if case.peer:
        row["ratio"] = statistics.median(a / b for a, b in zip(rates["ours"], rates["theirs"], strict=True))
    return row


class Side:
    """One side of a case, in a process that computes an epoch whenever it is asked to."""

    def __init__(self, side: str, case: Case, args: argparse.Namespace) -> None:
        root = str(Path(__file__).resolve().parents[1])
        path = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))
        wish = {
            "side": side,
            "case": dataclasses.asdict(case),
            "device": args.device,
            "examples": args.examples,
        }
        self._process = subprocess.Popen(
            [sys.executable, "-m", "train.bench", "--threads", str(args.threads), "--side", json.dumps(wish)],
            env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": str(args.threads)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def __enter__(self) -> Side:
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(timeout=60)
        finally:
            self._process.kill()
            self._process.wait()

    def turn(self) -> dict[str, Any]:
        """The `seconds` of one epoch, and what else it saw. Raises `TrainError` where the process has ended."""
        assert self._process.stdin is not None and self._process.stdout is not None
        try:
            self._process.stdin.write("\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            pass  # it has said why on stderr
        answer = self._process.stdout.readline()
        if not answer:
            raise TrainError("a benchmark process ended before it was done; what it said is above")
        return json.loads(answer)


def summary(values: Sequence[float]) -> dict[str, float]:
    return {"median": statistics.median(values), "smallest": min(values), "largest": max(values)}


def line(row: dict[str, Any]) -> str:
    """A row of the table."""
    ours, theirs = row["ours"], row.get("theirs")
    peer = f"{theirs['median']:9.1f}  {row['ratio']:5.2f}" if theirs else f"{'-':>9}  {'-':>5}"
    spread = f"ours {ours['smallest']:.1f} to {ours['largest']:.1f}"
    if theirs:
        spread += f", theirs {theirs['smallest']:.1f} to {theirs['largest']:.1f}"
    if "mfu" in row:
        spread += f", MFU {row['mfu']:.1%}"
    return f"{row['case']:<34} {ours['median']:9.1f} {peer}   {spread}, data wait {row['data_wait']:.1%}"


def describe(device: torch.device, threads: int) -> dict[str, str]:
    """What was measured on."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else f"{platform.machine()} CPU"
    return {
        "torch": str(torch.__version__),
        "Python": platform.python_version(),
        "device": name,
        "threads": str(threads),
    }


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m train.bench",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("cases", nargs="*", help="default: all of this device")
    parser.add_argument("--device", default="auto", choices=("auto", "cpu", "cuda"))
    parser.add_argument("--threads", type=int, default=1, help="threads of the CPU (default: 1)")
    parser.add_argument("--turns", type=int, default=5, help="turns of each side that count (default: 5)")
    parser.add_argument("--batch-size", type=int, help="instead of the case's own")
    parser.add_argument("--image-size", type=int, help="instead of the case's own")
    parser.add_argument("--steps", type=int, help="batches per turn, instead of the case's own")
    parser.add_argument(
        "--variants", default="", help='sets of flags to time each case with: "amp=none;amp=bf16,compile"'
    )
    parser.add_argument("--examples", default=str(EXAMPLES), help="checkout of github.com/pytorch/examples")
    parser.add_argument("--json", help="file for the report")
    parser.add_argument("--side", help=argparse.SUPPRESS)
    return parser


if __name__ == "__main__":
    sys.exit(main())
