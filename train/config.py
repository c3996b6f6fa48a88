"""What the user asked for: one frozen record, the flags that fill it, and the checks on its values.

It must not know torch: parsing, `--help` and every refusal happen before torch is imported. Each field of
`Config` is one flag; its `option` holds the help text and the limits.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from train.errors import UsageError

MODELS = ("small", "mnist", "resnet18", "linear")
OPTIMIZERS = ("sgd", "adadelta", "adamw")
SCHEDULERS = ("none", "step", "cosine")

# What each dataset is trained with where no flag says otherwise. This is one of the places to change for data
# of your own.
RECIPES: dict[str, dict[str, Any]] = {
    "digits": {
        "model": "small",
        "epochs": 8,
        "batch_size": 64,
        "optimizer": "adamw",
        "lr": 0.006,
        "weight_decay": 0.01,
        "scheduler": "cosine",
    },
    "mnist": {
        "model": "mnist",
        "epochs": 5,
        "batch_size": 64,
        "optimizer": "adadelta",
        "lr": 0.01,
        "weight_decay": 0.0,
        "scheduler": "none",
    },
    "stl10": {
        "model": "resnet18",
        "epochs": 2,
        "batch_size": 128,
        "optimizer": "sgd",
        "lr": 0.1,
        "weight_decay": 1e-4,
        "scheduler": "step",
    },
    "synthetic": {
        "model": "small",
        "epochs": 2,
        "batch_size": 64,
        "optimizer": "sgd",
        "lr": 0.02,
        "weight_decay": 0.0,
        "scheduler": "none",
    },
}
DATASETS = tuple(RECIPES)
_FROM_RECIPE = "by dataset"


def option(default: Any, help_text: str, **limits: Any) -> Any:
    """A dataclass field which is also a flag. Limits: choices, at_least, above, below."""
    return dataclasses.field(default=default, metadata={"help": help_text, **limits})


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """One training run. Values are checked when it is made; `UsageError` says what is allowed."""

    dataset: str = option("digits", "what to train on", choices=DATASETS)
    data: str = option("data", "folder that holds the files of mnist and stl10")
    download: bool = option(False, "fetch missing files of mnist or stl10 (local rank 0 of each node)")
    image_size: int = option(0, "side of the images of stl10 and synthetic; 0: 224 and 32", at_least=0)
    synthetic_size: int = option(2048, "number of synthetic training samples", at_least=1)
    model: str = option(_FROM_RECIPE, "the network", choices=MODELS)
    epochs: int = option(_FROM_RECIPE, "passes over the training set", at_least=1)
    batch_size: int = option(_FROM_RECIPE, "GLOBAL batch: samples per step over all ranks", at_least=1)
    optimizer: str = option(_FROM_RECIPE, "update rule", choices=OPTIMIZERS)
    lr: float = option(_FROM_RECIPE, "learning rate", above=0)
    momentum: float = option(0.9, "momentum (sgd only)", at_least=0, below=1)
    weight_decay: float = option(_FROM_RECIPE, "weight decay", at_least=0)
    scheduler: str = option(_FROM_RECIPE, "step: a tenth every --lr-epochs; cosine: to 0", choices=SCHEDULERS)
    lr_epochs: int = option(30, "epochs between drops of the step scheduler", at_least=1)
    seed: int = option(0, "decides initial weights and data order", at_least=0, below=2**31)
    amp: str = option("none", "mixed precision", choices=("none", "bf16"))
    device: str = option("auto", "auto: cuda where there is one", choices=("auto", "cpu", "cuda"))
    backend: str = option("auto", "auto: nccl for cuda, else gloo", choices=("auto", "gloo", "nccl"))
    workers: int = option(0, "data-loading processes per rank", at_least=0)
    out: str = option("", "folder for snapshots and metrics; default runs/DATASET")
    log_every: int = option(10, "steps between training lines in metrics.jsonl; 0: none", at_least=0)
    save_every: int = option(0, "steps between extra snapshots; 0: at the end of an epoch only", at_least=0)
    snapshot_per_node: bool = option(False, "local rank 0 of every node writes the snapshot, not only rank 0")
    fresh: bool = option(False, "remove the snapshots of an earlier run in --out and start again")
    resume: str = option("auto", "require: refuse to start without a snapshot", choices=("auto", "require"))
    tensorboard: bool = option(True, "write TensorBoard events where tensorboard is installed")
    init_method: str = option("env://", "env://, tcp://HOST:PORT or file:///PATH")
    world_size: int = option(0, "ranks in the job, for starts without torchrun; 0: WORLD_SIZE", at_least=0)
    timeout: float = option(600.0, "seconds that a collective operation may take", above=0)
    fail_rank: int = option(-1, "rehearsal: this rank exits on purpose; -1: none", at_least=-1)
    fail_code: int = option(1, "rehearsal: with this exit code", at_least=0, below=256)
    fail_step: int = option(1, "rehearsal: before this step (from 1), unless the run resumed", at_least=1)
    place: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            _check(field, getattr(self, field.name))
        if not self.init_method.startswith(("env://", "tcp://", "file://")):
            raise UsageError(f"--init-method {self.init_method}: must begin with env://, tcp:// or file://")
        if len(self.place) not in (0, 2) or any(number < 0 for number in self.place):
            raise UsageError(f"RANK LOCAL_RANK: two numbers from 0 up, or neither; got {list(self.place)}")
        if self.fresh and self.resume == "require":
            raise UsageError("--fresh and --resume require contradict each other: give one of them")

    @property
    def folder(self) -> Path:
        """Where this run writes."""
        return Path(self.out or f"runs/{self.dataset}")

    @property
    def fingerprint(self) -> dict[str, Any]:
        """What a snapshot must agree with to be continued by this run."""
        names = ("dataset", "model", "batch_size", "optimizer", "scheduler", "seed")
        return {name: getattr(self, name) for name in names}


def make(**given: Any) -> Config:
    """A Config from the values given, the dataset's recipe, and the defaults, in that order.

    Raises `UsageError` for a value out of its limits.
    """
    name = given.get("dataset", "digits")
    if name not in RECIPES:
        raise UsageError(f"--dataset {name}: there is no such dataset; choose from {', '.join(DATASETS)}")
    return Config(**{**RECIPES[name], **given})


def parse(argv: list[str]) -> Config:
    """The Config that the command line asks for. Exits 0 after --help; raises `UsageError` for bad flags."""
    parser = _Parser(
        prog="train/main.py",
        description="Train a network on one process, one node or many.",
        allow_abbrev=False,
    )
    for field in dataclasses.fields(Config):
        _add(parser, field)
    return make(**vars(parser.parse_intermixed_args(argv)))


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message} (--help lists the flags)")


def _add(parser: argparse.ArgumentParser, field: dataclasses.Field[Any]) -> None:
    if field.name == "place":
        parser.add_argument(
            "place",
            nargs="*",
            type=int,
            default=argparse.SUPPRESS,
            metavar="RANK LOCAL_RANK",
            help="this process's place, for starts without torchrun",
        )
        return
    flag = "--" + field.name.replace("_", "-")
    # Suppressed defaults leave out what was not given, so that a recipe can fill it.
    shared: dict[str, Any] = {"dest": field.name, "default": argparse.SUPPRESS}
    if field.type == "bool":
        text = f"{field.metadata['help']} (default: {'on' if field.default else 'off'})"
        parser.add_argument(flag, action=argparse.BooleanOptionalAction, help=text, **shared)
        return
    choices = field.metadata.get("choices")
    text = field.metadata["help"] + (f"; one of {', '.join(choices)}" if choices else "")
    if field.default != "":
        text += f" (default: {field.default})"
    kind = {"int": int, "float": float, "str": str}[str(field.type)]
    parser.add_argument(flag, type=kind, metavar=field.name.upper(), help=text.replace("%", "%%"), **shared)


def _check(field: dataclasses.Field[Any], value: Any) -> None:
    flag = "--" + field.name.replace("_", "-")
    limits = field.metadata
    if "choices" in limits and value not in limits["choices"]:
        allowed = ", ".join(limits["choices"])
        raise UsageError(f"{flag} {value}: there is no such {field.name}; choose from {allowed}")
    if isinstance(value, float) and not math.isfinite(value):
        raise UsageError(f"{flag} {value}: must be a finite number")
    if "at_least" in limits and value < limits["at_least"]:
        raise UsageError(f"{flag} {value}: must be at least {limits['at_least']}")
    if "above" in limits and value <= limits["above"]:
        raise UsageError(f"{flag} {value}: must be above {limits['above']}")
    if "below" in limits and value >= limits["below"]:
        raise UsageError(f"{flag} {value}: must be below {limits['below']}")
