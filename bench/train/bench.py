"""Measure the trainer's speed, side by side with the training loops of pytorch/examples where a checkout is
given.

    python -m bench.train.bench                            the cases that this machine can run, as a table
    python -m bench.train.bench --peers ../examples the same, in turn with the loops of pytorch/examples
    python -m bench.train.bench resnet50 --batch-size 256 --steps 50 --json out.json

With --peers each case is timed in turns (theirs, ours, theirs, ...) with the same weights, batches, precision
and threads. Each side runs in a process of its own that waits while the other computes. Theirs gets batches
that are ready in memory; ours does everything that a user's run does, including reading by index and writing
metrics. The jpeg case compares our loader with the DataLoader of imagenet/main.py; worker.py says what is
equal and what differs.

On a CPU there is a third side: `kept` is theirs in a process whose glibc keeps freed memory, as our trainer
sets it. On a GPU both sides use cudnn.benchmark, the fused optimizer and channels_last; a row names the side
that does not.
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

from bench.train.worker import Case, serve
from train.config import make
from train.distributed.device import select_device
from train.distributed.rank_info import RankInfo
from train.errors import TrainError, UsageError
from train.process_exit import exit_process

KEPT = "theirs_kept"
SIDES = {"ours": "ours", "theirs": "theirs", KEPT: "kept"}
NOTES = {
    "cpu": "Ours makes glibc keep freed memory; theirs: as it is, without that setting; kept: theirs with "
    "that setting.",
    "cuda": "All sides use cudnn.benchmark, the fused optimizer and channels_last; a row names those that do "
    "not.",
}
HEADER = (
    f"{'case':<34} {'ours':>9} {'theirs':>9}  {'ratio':>5} {'kept':>9}  {'ratio':>5}   "
    "samples/s, median (min to max)"
)
VARIANT_FLAGS = ("amp", "channels_last", "compile", "fused", "on_device", "workers")

CPU_CASES = {
    "resnet18": Case(
        model="resnet18", shape=(3, 96, 96), classes=1000, batch_size=16, steps=6, peer="imagenet/main.py"
    ),
    "mnist": Case(
        model="mnist", shape=(1, 28, 28), classes=10, batch_size=64, steps=60, peer="mnist/main.py"
    ),
}
CPU_CASES["jpeg"] = dataclasses.replace(CPU_CASES["resnet18"], jpeg=True, flags={"workers": 1})
CPU_CASES["resnet50"] = dataclasses.replace(CPU_CASES["resnet18"], model="resnet50")
ONLY_BY_NAME = {"cpu": ("resnet50",), "cuda": ()}  # slow, and no faster relative to the peer than resnet18
FAST = {"amp": "bf16", "channels_last": True, "fused": True}
GPU_CASES = {
    "resnet50": Case(
        model="resnet50",
        shape=(3, 224, 224),
        classes=1000,
        batch_size=256,
        steps=20,  # 3 GB of images
        peer="imagenet/main.py",
        flags={"on_device": True, **FAST},
    ),
    "mnist": dataclasses.replace(CPU_CASES["mnist"], steps=200, flags={"channels_last": True, "fused": True}),
}
GPU_CASES["resnet18"] = dataclasses.replace(GPU_CASES["resnet50"], model="resnet18", batch_size=512)
GPU_CASES["jpeg"] = dataclasses.replace(GPU_CASES["resnet50"], jpeg=True, flags={"workers": 12, **FAST})


def main(argv: Sequence[str] | None = None) -> int:
    """Time the cases that the command line names. Returns the exit code: 0; 1 failed; 2 bad usage."""
    args = _parser().parse_args(argv)
    try:
        run(args)
    except TrainError as error:
        print(f"bench.train.bench: {error}", file=sys.stderr)
        return error.exit_code
    return 0


def run(args: argparse.Namespace) -> None:
    """Print a row per case; with --json also write the rows and the single turns."""
    torch.set_num_threads(args.threads)
    if args.worker:
        serve(json.loads(args.worker))
        return
    device = select_device(make(device=args.device), RankInfo())
    machine = describe_machine(device, args.threads)
    cases = select_cases(args, device)
    if args.peers:
        print(NOTES[device.type])
    print(", ".join(f"{name} {value}" for name, value in machine.items()))
    print(HEADER, flush=True)
    rows = []
    for case in cases:
        rows.append(measure(case, args, sides_of(case, device)))
        print(table_line(rows[-1], on_gpu=device.type == "cuda"), flush=True)
    if args.json:
        report = {"note": NOTES[device.type], "machine": machine, "cases": rows}
        Path(args.json).write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")


def select_cases(args: argparse.Namespace, device: torch.device) -> list[Case]:
    """Return the cases that `args` names, with its changes. Raises `UsageError` for a case that does not
    exist on this device, or a program that --peers does not hold."""
    known = GPU_CASES if device.type == "cuda" else CPU_CASES
    for name in args.cases:
        if name not in known:
            raise UsageError(f"{name}: unknown case on {device.type}; choose from {', '.join(known)}")
    default = [name for name in known if name not in ONLY_BY_NAME[device.type]]
    selected = [known[name] for name in args.cases or default]
    for field in ("batch_size", "steps"):
        if getattr(args, field):
            selected = [dataclasses.replace(case, **{field: getattr(args, field)}) for case in selected]
    if args.image_size:
        size = args.image_size
        selected = [dataclasses.replace(case, shape=(case.shape[0], size, size)) for case in selected]
    if not args.peers:
        selected = [dataclasses.replace(case, peer="") for case in selected]
    for case in selected:
        if case.peer and not Path(args.peers, case.peer).is_file():
            raise UsageError(
                f"{Path(args.peers, case.peer)} does not exist: --peers must be a checkout of "
                "github.com/pytorch/examples"
            )
    return [
        dataclasses.replace(case, flags={**case.flags, **flags})
        for flags in parse_variants(args.variants)
        for case in selected
    ]


def parse_variants(text: str) -> list[dict[str, Any]]:
    """Return the sets of flags to time each case with: "amp=none;amp=bf16,compile" is two. Raises
    `UsageError`."""
    variants = []
    for part in text.split(";"):
        flags: dict[str, Any] = {}
        for item in filter(None, part.split(",")):
            name, _, value = item.partition("=")
            if name not in VARIANT_FLAGS:
                raise UsageError(f"--variants {text}: {name} is not one of {', '.join(VARIANT_FLAGS)}")
            flags[name] = int(value) if value.isdecimal() else value or True
        variants.append(flags)
    return variants


def sides_of(case: Case, device: torch.device) -> list[str]:
    """Return the sides of a case, in the order of a turn. Only glibc has the setting that `kept` is about."""
    if not case.peer:
        return ["ours"]
    return ["theirs", *([KEPT] if device.type == "cpu" and sys.platform == "linux" else []), "ours"]


def measure(case: Case, args: argparse.Namespace, sides: Sequence[str]) -> dict[str, Any]:
    """Time `args.turns` turns of each side, after one for warm-up. Returns the row of the report."""
    turns: dict[str, list[dict[str, Any]]] = {side: [] for side in sides}
    with contextlib.ExitStack() as stack:
        workers = {side: stack.enter_context(Worker(side, case, args)) for side in sides}
        for turn in range(args.turns + 1):
            for side, worker in workers.items():
                figures = worker.run_turn()
                if turn:
                    turns[side].append(figures)
    rates = {
        side: [case.steps * case.batch_size / figure["seconds"] for figure in figures]
        for side, figures in turns.items()
    }
    row: dict[str, Any] = {"case": case.name}
    for side in sides:
        row[side] = {**summarize(rates[side]), **other_figures(turns[side])}
    for side, name in (("theirs", "ratio"), (KEPT, "ratio_kept")):
        if side in rates:
            row[name] = statistics.median(a / b for a, b in zip(rates["ours"], rates[side], strict=True))
    return {**row, "turns": rates}


def other_figures(turns: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return what one side reported besides its speed: medians over the turns, and its settings."""
    names = ("data_wait", "mfu", "peak_memory_bytes", "processor_seconds", "page_faults")
    medians = {name: statistics.median(turn[name] for turn in turns) for name in names if name in turns[0]}
    return {**medians, "settings": turns[0]["settings"]}


class Worker:
    """One side of a case, in a process that computes an epoch on request."""

    def __init__(self, side: str, case: Case, args: argparse.Namespace) -> None:
        root = str(Path(__file__).resolve().parents[2])
        path = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))
        task = {"side": side, "case": dataclasses.asdict(case), "device": args.device, "peers": args.peers}
        self._process = subprocess.Popen(
            [
                sys.executable,
                "-m",
                "bench.train.bench",
                "--threads",
                str(args.threads),
                "--worker",
                json.dumps(task),
            ],
            env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": str(args.threads)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(timeout=60)
        finally:
            self._process.kill()
            self._process.wait()

    def run_turn(self) -> dict[str, Any]:
        """Return the `seconds` of one epoch and its figures. Raises `TrainError` if the process has
        exited."""
        assert self._process.stdin is not None and self._process.stdout is not None
        try:
            self._process.stdin.write("\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            pass  # its error is on stderr
        answer = self._process.stdout.readline()
        if not answer:
            raise TrainError("a benchmark process exited early; its error is above")
        figures: dict[str, Any] = json.loads(answer)
        return figures


def summarize(values: Sequence[float]) -> dict[str, float]:
    return {"median": statistics.median(values), "smallest": min(values), "largest": max(values)}


def table_line(row: dict[str, Any], *, on_gpu: bool = False) -> str:
    """Return the row as a line of the table."""
    columns, spread = f"{row['case']:<34} {row['ours']['median']:9.1f}", []
    for side, ratio in (("theirs", "ratio"), (KEPT, "ratio_kept")):
        known = side in row
        columns += f" {row[side]['median']:9.1f}  {row[ratio]:5.2f}" if known else f" {'-':>9}  {'-':>5}"
    for side, name in SIDES.items():
        if side in row:
            figures = row[side]
            text = f"{name} {figures['smallest']:.1f} to {figures['largest']:.1f}"
            spread.append(f"{text}, data wait {figures['data_wait']:.1%}")
    if "mfu" in row["ours"]:
        spread.append(f"MFU {row['ours']['mfu']:.1%}")
    return "; ".join([f"{columns}   {spread[0]}", *spread[1:], *(missing_settings(row) if on_gpu else [])])


def missing_settings(row: dict[str, Any]) -> list[str]:
    """Return what each side trained without, of the settings that make a GPU faster: "ours without fused"."""
    return [
        f"{name} without {setting}"
        for side, name in SIDES.items()
        if side in row
        for setting, used in row[side]["settings"].items()
        if not used
    ]


def describe_machine(device: torch.device, threads: int) -> dict[str, str]:
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else f"{platform.machine()} CPU"
    return {
        "torch": str(torch.__version__),
        "Python": platform.python_version(),
        "device": name,
        "threads": str(threads),
    }


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m bench.train.bench",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("cases", nargs="*", help="default: all cases of this device")
    parser.add_argument("--device", default="auto", choices=("auto", "cpu", "cuda"))
    parser.add_argument("--threads", type=int, default=1, help="CPU threads (default: 1)")
    parser.add_argument("--turns", type=int, default=5, help="measured turns of each side (default: 5)")
    parser.add_argument("--batch-size", type=int, help="instead of the case's own")
    parser.add_argument("--image-size", type=int, help="instead of the case's own")
    parser.add_argument("--steps", type=int, help="batches per turn, instead of the case's own")
    parser.add_argument(
        "--variants", default="", help='sets of flags to time each case with: "amp=none;amp=bf16,compile"'
    )
    parser.add_argument(
        "--peers", metavar="DIR", default="", help="checkout of github.com/pytorch/examples to compare with"
    )
    parser.add_argument("--json", help="file for the report")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    return parser


if __name__ == "__main__":
    exit_process(main())
