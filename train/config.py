"""The configuration of a training run: all flags, each dataset's recipe, and the combinations that cannot
work.

Must not import torch: what cannot work is refused here, before torch is imported.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import tyro

from train.errors import UsageError
from train.flags import (
    MAX_LR,
    DataFlags,
    EvaluationFlags,
    FaultFlags,
    Fixed,
    Free,
    Limit,
    ModelFlags,
    OptimizationFlags,
    OutputFlags,
    ParallelFlags,
    PrecisionFlags,
    RendezvousFlags,
    SnapshotFlags,
)

_RESNET18 = {"model": "resnet18", "optimizer": "sgd", "lr": 0.1, "weight_decay": 1e-4, "scheduler": "step"}
# The defaults of each dataset where no flag says otherwise. One of the places to edit for data of your own.
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
    "mnist": {"model": "mnist", "epochs": 5, "batch_size": 64, "optimizer": "adadelta", "lr": 0.01},
    "stl10": {**_RESNET18, "epochs": 2, "batch_size": 128},
    "folder": {**_RESNET18, "epochs": 90, "batch_size": 256},
    "text": {
        "model": "transformer",
        "epochs": 2,
        "batch_size": 32,
        "optimizer": "adamw",
        "lr": 0.003,
        "weight_decay": 0.01,
        "scheduler": "cosine",
    },
    "toy": {"model": "linear", "epochs": 5, "batch_size": 32, "optimizer": "sgd", "lr": 0.001},
    "synthetic": {"model": "small", "epochs": 2, "batch_size": 64, "optimizer": "sgd", "lr": 0.02},
    "own": {"model": "own"},
}


_POSITION = tyro.conf.arg(metavar="[RANK LOCAL_RANK]", help_behavior_hint="")


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """One training run. Raises `UsageError` on construction for a value or a combination that cannot work."""

    data: DataFlags = field(default_factory=DataFlags)
    model: ModelFlags = field(default_factory=ModelFlags)
    optimization: OptimizationFlags = field(default_factory=OptimizationFlags)
    parallel: ParallelFlags = field(default_factory=ParallelFlags)
    precision: PrecisionFlags = field(default_factory=PrecisionFlags)
    evaluation: EvaluationFlags = field(default_factory=EvaluationFlags)
    snapshots: SnapshotFlags = field(default_factory=SnapshotFlags)
    output: OutputFlags = field(default_factory=OutputFlags)
    rendezvous: RendezvousFlags = field(default_factory=RendezvousFlags)
    faults: FaultFlags = field(default_factory=FaultFlags)
    position: Annotated[tuple[int, ...], tyro.conf.Positional, _POSITION] = ()
    """Of this process, for starts without torchrun."""

    def __post_init__(self) -> None:
        for name, value, notes in _flags(self):
            for limit in (note for note in notes if isinstance(note, Limit)):
                if problem := limit.problem(value):
                    raise UsageError(f"{flag(name)} {value}: {problem}")
        _check_rendezvous(self)
        _check_unused(self)
        _check_parallel(self)
        _check_snapshots(self)
        _check_steps(self)

    @property
    def folder(self) -> Path:
        """The output folder of this run."""
        return Path(self.output.out or f"runs/{self.data.dataset}")

    @property
    def scaled_lr(self) -> float:
        """The learning rate for this global batch size."""
        flags = self.optimization
        return flags.lr * flags.batch_size / flags.lr_batch if flags.lr_batch else flags.lr

    def flags(self) -> dict[str, Any]:
        """Return the value of every flag, by its name."""
        return {name: value for name, value, _ in _flags(self)}

    def recorded(self) -> dict[str, Any]:
        """Return the flags that determine what is trained, by name: they are kept in a snapshot."""
        return {
            name: list(value) if isinstance(value, tuple) else value
            for name, value, notes in _flags(self)
            if Free not in notes
        }


def fixed_flags() -> frozenset[str]:
    """Return the names of the flags that a snapshot must agree with."""
    return frozenset(name for name, _, notes in _flags(Config()) if Fixed in notes)


def flag(name: str) -> str:
    """Return a flag as it is typed."""
    return "--" + name.replace("_", "-")


def make(**given: Any) -> Config:
    """Return a Config from the flags given by name, the dataset's recipe, and the defaults, in that order.

    Raises `UsageError` for a value out of its limits.
    """
    recipe = RECIPES[given.get("dataset", "digits")]
    values = {**recipe, **given}
    position = values.pop("position", ())
    groups: dict[str, Any] = {}
    for group, kind in _groups().items():
        own = {one.name: values.pop(one.name) for one in dataclasses.fields(kind) if one.name in values}
        groups[group] = kind(**own)
    if values:
        raise TypeError(f"no flags are named {', '.join(values)}")
    return Config(**groups, position=position)


@cache
def _groups() -> dict[str, Any]:
    """Return the records of flags by the name of their field in Config."""
    return {name: kind for name, kind in get_type_hints(Config).items() if dataclasses.is_dataclass(kind)}


@cache
def _notes(kind: Any) -> dict[str, tuple[Any, ...]]:
    """Return what the annotations of a record say of each field."""
    hints = get_type_hints(kind, include_extras=True)
    return {name: getattr(hint, "__metadata__", ()) for name, hint in hints.items()}


@cache
def _defaults() -> dict[str, Any]:
    """Return the default of each flag where no recipe has another one."""
    return {one.name: one.default for kind in _groups().values() for one in dataclasses.fields(kind)}


def _flags(config: Config) -> list[tuple[str, Any, tuple[Any, ...]]]:
    """Return (name, value, notes) of every flag."""
    return [
        (name, getattr(getattr(config, group), name), notes)
        for group, kind in _groups().items()
        for name, notes in _notes(kind).items()
    ]


# -- combinations that cannot work -------------------------------------------------------------------------

_IMAGES = ("digits", "mnist", "stl10", "folder", "synthetic")

# Flags that take effect only with these values of another flag: (flag, other flag, values). A script of your
# own reads what it needs of the flags of data.
_ONLY_WITH = (
    ("cuts", "parallel", ("pipeline", "gpipe", "1f1b")),
    ("static_graph", "parallel", ("ddp", "pipeline")),
    ("find_unused_parameters", "parallel", ("ddp", "pipeline")),
    ("bucket_mb", "parallel", ("ddp", "pipeline")),
    ("sync_bn", "parallel", ("ddp", "fsdp", "hsdp")),
    ("split_size", "parallel", ("pipeline",)),
    ("copy_stream", "parallel", ("pipeline",)),
    ("microbatches", "parallel", ("gpipe", "1f1b")),
    ("group_size", "parallel", ("hsdp", "tensor")),
    ("data", "dataset", ("mnist", "stl10", "folder", "own")),
    ("download", "dataset", ("mnist", "stl10", "own")),
    ("image_size", "dataset", ("stl10", "folder", "synthetic", "own")),
    ("synthetic_size", "dataset", ("synthetic", "text")),
    ("steps_per_epoch", "dataset", ("own",)),
    ("augment", "dataset", (*_IMAGES, "own")),
    ("label_smoothing", "dataset", (*_IMAGES, "text", "own")),
    ("min_lr", "scheduler", ("cosine",)),
    ("lr_epochs", "scheduler", ("step",)),
    ("momentum", "optimizer", ("sgd",)),
    ("betas", "optimizer", ("adamw",)),
    ("eps", "optimizer", ("adamw",)),
)


def _check_unused(config: Config) -> None:
    values, defaults = config.flags(), _defaults()
    for name, other, allowed in _ONLY_WITH:
        if values[name] != defaults[name] and values[other] not in allowed:
            raise UsageError(
                f"{flag(name)} has no effect with {flag(other)} {values[other]}, only with "
                f"{', '.join(allowed)}: remove it"
            )
    if config.data.on_device and config.data.workers:
        raise UsageError("--workers has no effect with --on-device: remove one of them")
    if values["prefetch"] != defaults["prefetch"] and not config.data.workers:
        raise UsageError("--prefetch has no effect without --workers: remove it, or give both")


def _check_rendezvous(config: Config) -> None:
    flags = config.rendezvous
    if not flags.init_method.startswith(("env://", "tcp://", "file://")):
        raise UsageError(f"--init-method {flags.init_method}: must begin with env://, tcp:// or file://")
    if len(config.position) not in (0, 2) or any(number < 0 for number in config.position):
        raise UsageError(
            f"RANK LOCAL_RANK: give both or neither, each at least 0; got {list(config.position)}"
        )
    if flags.spawn and config.position:
        raise UsageError("--spawn assigns the ranks itself: remove RANK LOCAL_RANK")
    if flags.spawn and flags.world_size:
        raise UsageError("--spawn sets the number of ranks: remove --world-size")


def _check_parallel(config: Config) -> None:
    mode, flags, optimization = config.parallel.parallel, config.parallel, config.optimization
    parts = flags.microbatches * optimization.accumulate
    if mode in ("gpipe", "1f1b") and optimization.batch_size % parts:
        raise UsageError(
            f"--parallel {mode}: the batch size {optimization.batch_size} cannot be divided into {parts} "
            "equal microbatches; change --batch-size or --microbatches"
        )
    if config.precision.amp == "fp16" and mode != "ddp":
        raise UsageError(f"--amp fp16 works only with --parallel ddp, not {mode}: use --amp bf16")
    if optimization.accumulate > optimization.batch_size:
        raise UsageError(
            f"--accumulate {optimization.accumulate}: more parts than samples in a batch "
            f"({optimization.batch_size})"
        )
    if flags.static_graph and optimization.accumulate > 1:
        raise UsageError("DDP does not support --static-graph with --accumulate: remove one of them")
    if config.precision.fused and optimization.optimizer == "sgd" and mode in ("fsdp", "hsdp", "tensor"):
        raise UsageError(
            "--fused: PyTorch has no fused sgd for sharded parameters; use adamw, or remove --fused"
        )
    if mode == "tensor" and config.model.model != "transformer":
        raise UsageError(
            f"--parallel tensor splits the layers of a transformer, not of {config.model.model}: use "
            "--dataset text"
        )
    if config.model.ema and mode in ("gpipe", "1f1b"):
        raise UsageError(f"--ema does not work with --parallel {mode}: remove it")


def _check_snapshots(config: Config) -> None:
    flags, mode = config.snapshots, config.parallel.parallel
    if flags.fresh and flags.resume == "require":
        raise UsageError("--fresh contradicts --resume require: give only one of them")
    if flags.snapshot == "sharded" and mode in ("pipeline", "gpipe", "1f1b"):
        raise UsageError(f"--snapshot sharded works with ddp, fsdp, hsdp and tensor, not {mode}: use full")
    if flags.snapshot == "sharded" and flags.snapshot_per_node:
        raise UsageError(
            "--snapshot sharded needs shared storage and cannot be combined with --snapshot-per-node"
        )


def _check_steps(config: Config) -> None:
    if config.output.profile:
        profiled_steps(config)
    if config.optimization.min_lr > config.optimization.lr:
        raise UsageError(
            f"--min-lr {config.optimization.min_lr}: must not be above --lr {config.optimization.lr}"
        )
    if config.scaled_lr >= MAX_LR:
        raise UsageError(
            f"--lr-batch {config.optimization.lr_batch}: the learning rate becomes {config.scaled_lr:g}, and "
            f"must be below {MAX_LR:g}"
        )
    if not all(0 <= beta < 1 for beta in config.optimization.betas):
        raise UsageError(
            f"--betas {' '.join(map(str, config.optimization.betas))}: each must be at least 0 and below 1"
        )


def profiled_steps(config: Config) -> range:
    """Return the steps (from 1) that --profile names. Raises `UsageError`."""
    first, _, last = config.output.profile.partition(":")
    if not (first.isdecimal() and last.isdecimal() and 1 <= int(first) <= int(last)):
        raise UsageError(f"--profile {config.output.profile}: must be FIRST:LAST, for example 10:12")
    return range(int(first), int(last) + 1)
