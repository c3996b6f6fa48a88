"""How fast the trainer is, side by side with the loops of pytorch/examples in the same process.

    python -m train.bench                 the cases that this machine can show, as a table
    python -m train.bench resnet50 --batch-size 256 --steps 50 --json out.json

Each case is timed in turns (ours, theirs, ours, ...) with the same weights, batches, precision and threads. Theirs is
handed batches that lie ready in memory; ours does all that a user's run does, reading by index and writing metrics
included. It must not know how a training is started: it gives a model and data to the Trainer that main.py uses.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import dataclasses
import io
import json
import platform
import runpy
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from train import dist, models, parallel
from train.config import make
from train.data import Data, Tensors, on_device
from train.errors import TrainError, UsageError
from train.metrics import Metrics
from train.trainer import Trainer

EXAMPLES = Path(__file__).resolve().parents[1] / "bench" / "peers" / "pytorch-examples"
HEAD = f"{'case':<34} {'ours':>9} {'theirs':>9}  {'ratio':>5}   samples/s, median (smallest to largest)"


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """What is timed: `steps` batches of random images a turn. `peer` is the file of pytorch/examples whose loop is
    the other side, or empty; with `jpeg` the images are decoded from JPEG bytes as they are read."""

    model: str
    shape: tuple[int, int, int]
    classes: int
    batch_size: int
    steps: int
    peer: str = ""
    jpeg: bool = False
    flags: dict[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def name(self) -> str:
        chosen = [name if value is True else str(value) for name, value in self.flags.items() if value]
        return " ".join(
            [self.model, *["jpeg"] * self.jpeg, str(self.shape[-1]), f"b{self.batch_size}", *chosen]
        )


CPU = {
    "resnet18": Case(
        model="resnet18", shape=(3, 96, 96), classes=1000, batch_size=16, steps=6, peer="imagenet/main.py"
    ),
    "mnist": Case(
        model="mnist", shape=(1, 28, 28), classes=10, batch_size=64, steps=60, peer="mnist/main.py"
    ),
}
SGD_OF_TORCH = {"lr": 0.01, "momentum": 0.9, "weight_decay": 1e-4}
SGD = {"optimizer": "sgd", **SGD_OF_TORCH}
CPU["jpeg"] = dataclasses.replace(CPU["resnet18"], peer="", jpeg=True, flags={"workers": 1})
FAST = {"on_device": True, "amp": "bf16", "channels_last": True}
GPU = {
    "resnet50": Case(
        model="resnet50",
        shape=(3, 224, 224),
        classes=1000,
        batch_size=256,
        steps=50,
        peer="imagenet/main.py",
        flags=FAST,
    ),
    "resnet18": Case(
        model="resnet18",
        shape=(3, 224, 224),
        classes=1000,
        batch_size=512,
        steps=50,
        peer="imagenet/main.py",
        flags=FAST,
    ),
    "mnist": dataclasses.replace(CPU["mnist"], steps=200),
}
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
    device = dist.pick_device(make(device=args.device), dist.Place())
    if device.type == "cuda":
        torch.cuda.set_device(device)
    machine = describe(device, args.threads)
    print(", ".join(f"{name} {value}" for name, value in machine.items()))
    print(HEAD, flush=True)
    rows = []
    for case in choose(args, device):
        rows.append(measure(case, device, Path(args.examples), turns=args.turns))
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


def measure(case: Case, device: torch.device, examples: Path, *, turns: int) -> dict[str, Any]:
    """Time `turns` turns of each side, after one that does not count. Returns the row of the report."""
    samples = case.steps * case.batch_size
    module = models.build(case.model, shape=case.shape, classes=case.classes, seed=0)
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as later:
        sides: dict[str, Callable[[], Any]] = {}
        data = jpegs(case) if case.jpeg else noise(case)
        if case.peer:
            sides["theirs"] = their_epoch(case, device, copy.deepcopy(module), data.train, examples)
        trainer = our_trainer(case, device, module, data, Path(folder))
        later.callback(trainer.close)
        sides["ours"] = trainer.train_epoch
        rates: dict[str, list[float]] = {side: [] for side in sides}
        for turn in range(turns + 1):
            for side, epoch in sides.items():
                seconds, seen = timed(epoch, device)
                if turn:
                    rates[side].append(samples / seconds)
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


def noise(case: Case) -> Data:
    """Random images, in memory."""
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(case.steps * case.batch_size, *case.shape, generator=generator)
    sets = Tensors(images, torch.randint(0, case.classes, (len(images),), generator=generator))
    return Data(train=sets, test=sets, shape=case.shape, classes=case.classes, prepare=lambda images: images)


def jpegs(case: Case) -> Data:
    """Pictures of the size of ImageNet's, decoded, cut and resized where they are read."""
    try:
        from train.bench_data import JpegImages
    except ImportError as error:
        raise UsageError(
            f"the jpeg case needs Pillow and numpy ({error}): pip install torchvision"
        ) from error
    sets = JpegImages(case.steps * case.batch_size, case.shape[-1])
    return Data(
        train=sets,
        test=sets,
        shape=case.shape,
        classes=case.classes,
        prepare=lambda images: images.float() / 255,
    )


def our_trainer(case: Case, device: torch.device, module: nn.Module, data: Data, folder: Path) -> Trainer:
    """The Trainer of a user's run of one process, writing its metrics into `folder`."""
    config = make(
        dataset="synthetic", batch_size=case.batch_size, out=str(folder), epochs=10**6, **SGD, **case.flags
    )
    ranks = dist.Ranks(place=dist.Place(), device=device)
    dist.choose_arithmetic(config)
    if config.on_device:
        data = on_device(data, device)
    metrics = Metrics(folder, enabled=True, tensorboard=False)
    metrics.open(0)
    spread = parallel.build(config, ranks, module, shape=case.shape)
    return Trainer(config=config, ranks=ranks, parallel=spread, data=data, metrics=metrics)


def their_epoch(
    case: Case, device: torch.device, module: nn.Module, data: Tensors, examples: Path
) -> Callable[[], object]:
    """One epoch of the peer's `train` function, with the precision and layout of ours. Raises `UsageError` where the
    file of pytorch/examples is missing."""
    path = examples / case.peer
    if not path.is_file():
        raise UsageError(f"{path} is missing: give --examples, a checkout of github.com/pytorch/examples")
    train = runpy.run_path(str(path), run_name="peer")["train"]
    layout = torch.channels_last if case.flags.get("channels_last") else torch.contiguous_format
    module = module.to(device, memory_format=layout)
    images, labels = data.inputs, data.labels
    where = device if case.flags.get("on_device") else torch.device("cpu")
    loader = [
        (part.to(where).contiguous(memory_format=layout), label.to(where))
        for part, label in zip(images.split(case.batch_size), labels.split(case.batch_size), strict=True)
    ]
    network: nn.Module = Cast(module, device, case.flags.get("amp", "none"))
    if case.flags.get("compile"):
        network = torch.compile(network)
    optimizer = torch.optim.SGD(module.parameters(), **SGD_OF_TORCH)
    args = SimpleNamespace(no_accel=device.type == "cpu", print_freq=10, log_interval=10, dry_run=False)
    if case.peer == "mnist/main.py":
        network = nn.Sequential(network, nn.LogSoftmax(1))
        return quietly(lambda: train(args, network, device, Batches(loader), optimizer, 1))
    criterion = nn.CrossEntropyLoss()
    return quietly(lambda: train(loader, network, criterion, optimizer, 0, device, args))


class Cast(nn.Module):
    """The network under autocast; its scores are float32, as a user of the peer would write it."""

    def __init__(self, module: nn.Module, device: torch.device, amp: str) -> None:
        super().__init__()
        self.module, self.device_type, self.amp = module, device.type, amp

    def forward(self, images: Tensor) -> Tensor:
        with torch.autocast(
            self.device_type, parallel.HALF.get(self.amp, torch.bfloat16), enabled=self.amp != "none"
        ):
            return self.module(images).float()


class Batches(list[tuple[Tensor, Tensor]]):
    """Ready batches that also have the `dataset` whose length the peer's progress line names."""

    @property
    def dataset(self) -> range:
        return range(sum(len(labels) for _, labels in self))


def quietly(act: Callable[[], object]) -> Callable[[], object]:
    """`act` with its progress lines kept off the table; they are still written, as ours are to a file."""

    def silent() -> object:
        with contextlib.redirect_stdout(io.StringIO()):
            return act()

    return silent


def timed(act: Callable[[], Any], device: torch.device) -> tuple[float, Any]:
    """(seconds until the device is done too, what `act` returned)."""
    begun = time.perf_counter()
    seen = act()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - begun, seen


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
    return parser


if __name__ == "__main__":
    sys.exit(main())
