"""The configuration of a training run: frozen records whose fields are the flags, and each dataset's recipe.

Must not import torch: values and combinations that cannot work are refused here, before torch is imported. cli.py makes
flags of the fields; their docstrings are the help text, and `Annotated` their limits.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal, TypeAlias, get_args, get_type_hints

import tyro

from train.errors import UsageError

# The defaults of each dataset where no flag says otherwise. One of the places to edit for data of your own.
RECIPES: dict[str, dict[str, Any]] = {
    "digits": {
        "model": "small", "epochs": 8, "batch_size": 64, "optimizer": "adamw", "lr": 0.006, "weight_decay": 0.01,
        "scheduler": "cosine",
    },
    "mnist": {"model": "mnist", "epochs": 5, "batch_size": 64, "optimizer": "adadelta", "lr": 0.01},
    "stl10": {
        "model": "resnet18", "epochs": 2, "batch_size": 128, "optimizer": "sgd", "lr": 0.1, "weight_decay": 1e-4,
        "scheduler": "step",
    },
    "folder": {
        "model": "resnet18", "epochs": 90, "batch_size": 256, "optimizer": "sgd", "lr": 0.1, "weight_decay": 1e-4,
        "scheduler": "step",
    },
    "text": {
        "model": "transformer", "epochs": 2, "batch_size": 32, "optimizer": "adamw", "lr": 0.003, "weight_decay": 0.01,
        "scheduler": "cosine",
    },
    "toy": {"model": "linear", "epochs": 5, "batch_size": 32, "optimizer": "sgd", "lr": 0.001},
    "synthetic": {"model": "small", "epochs": 2, "batch_size": 64, "optimizer": "sgd", "lr": 0.02},
}  # fmt: skip

Dataset: TypeAlias = Literal["digits", "mnist", "stl10", "folder", "text", "toy", "synthetic"]
Model: TypeAlias = Literal["small", "mnist", "resnet18", "resnet50", "linear", "transformer"]
Optimizer: TypeAlias = Literal["sgd", "adadelta", "adamw"]
Scheduler: TypeAlias = Literal["none", "step", "cosine"]
Parallel: TypeAlias = Literal["ddp", "fsdp", "hsdp", "tensor", "pipeline", "gpipe", "1f1b"]
DATASETS: tuple[str, ...] = get_args(Dataset)


@dataclass(frozen=True, slots=True)
class Limit:
    """What a number must be; given in the annotation of its field."""

    at_least: float | None = None
    above: float | None = None
    below: float | None = None

    def problem(self, value: float) -> str | None:
        """Return what a value must be instead, or None if it is within the limit."""
        if not math.isfinite(value):
            return "must be a finite number"
        if self.at_least is not None and value < self.at_least:
            return f"must be at least {self.at_least:g}"
        if self.above is not None and value <= self.above:
            return f"must be above {self.above:g}"
        if self.below is not None and value >= self.below:
            return f"must be below {self.below:g}" if self.below < 1e6 else f"must be below {int(self.below)}"
        return None


class Fixed:
    """Marks a flag that a snapshot must agree with to be resumed."""


class Free:
    """Marks a flag that does not change what is trained: it may be another one whenever a run is resumed."""


Count: TypeAlias = Annotated[int, Limit(at_least=0)]
Positive: TypeAlias = Annotated[int, Limit(at_least=1)]
Share: TypeAlias = Annotated[float, Limit(at_least=0, below=1)]
NotNegative: TypeAlias = Annotated[float, Limit(at_least=0, below=1e38)]


@dataclass(frozen=True, slots=True, kw_only=True)
class DataFlags:
    """Data"""

    dataset: Annotated[Dataset, Fixed] = "digits"
    """Dataset to train on; folder: images in DATA/train/CLASS and DATA/val/CLASS."""
    data: Annotated[str, Free] = "data"
    """Folder with the files of mnist, stl10 and folder."""
    download: Annotated[bool, Free] = False
    """Download missing files of mnist or stl10 (local rank 0 of each node)."""
    image_size: Count = 0
    """Image side in pixels, for stl10, folder and synthetic; 0: 224, for synthetic 32."""
    synthetic_size: Positive = 2048
    """Number of training samples of synthetic and text."""
    augment: bool = False
    """Random crops and flips, a function of (seed, epoch, sample)."""
    workers: Annotated[Count, Free] = 0
    """Data-loading processes per rank."""
    prefetch: Annotated[Positive, Free] = 2
    """Batches that each data-loading process prepares ahead."""
    on_device: Annotated[bool, Free] = False
    """Keep the whole dataset in device memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFlags:
    """Model"""

    model: Annotated[Model, Fixed] = "small"
    """Model to train."""
    weights: str = ""
    """File with weights to begin with: best.pt of another run, or a state dictionary; layers of other shapes stay new."""
    freeze: str = ""
    """Layers whose weights do not change, for example conv1,layer1."""
    activation_checkpointing: Annotated[bool, Free] = False
    """Compute activations again in the backward pass instead of keeping them: less memory, a third more work."""
    ema: Share = 0.0
    """Decay of an exponential moving average of the weights, with which the model is evaluated; 0: none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizationFlags:
    """Optimization"""

    epochs: Positive = 1
    """Passes over the training set."""
    max_steps: Count = 0
    """End after this many steps; 0: after the last epoch."""
    batch_size: Annotated[Positive, Fixed] = 64
    """GLOBAL batch size: samples per step over all ranks."""
    accumulate: Positive = 1
    """Gradient accumulation: compute each rank's part of a batch in this many chunks."""
    optimizer: Annotated[Optimizer, Fixed] = "sgd"
    """Optimizer."""
    lr: Annotated[float, Limit(above=0, below=1e38)] = 0.1
    """Learning rate."""
    lr_batch: Count = 0
    """Batch size that --lr is meant for; scales lr in proportion; 0: no scaling."""
    min_lr: NotNegative = 0.0
    """Learning rate at the end of the cosine schedule."""
    momentum: Share = 0.9
    """Momentum (sgd only)."""
    betas: tuple[float, float] = (0.9, 0.999)
    """Decay of the moments (adamw only)."""
    eps: Annotated[float, Limit(above=0, below=1e38)] = 1e-8
    """Added to the denominator (adamw only)."""
    weight_decay: NotNegative = 0.0
    """Weight decay."""
    decay_all: bool = True
    """Also decay biases and the weights of normalization layers."""
    clip: NotNegative = 0.0
    """Maximum gradient norm; 0: no clipping."""
    label_smoothing: Share = 0.0
    """Label smoothing."""
    scheduler: Annotated[Scheduler, Fixed] = "none"
    """Learning rate schedule; step: divide by 10 every --lr-epochs; cosine: decay to --min-lr."""
    lr_epochs: Positive = 30
    """Epochs between the drops of the step schedule."""
    warmup_epochs: Annotated[float, Limit(at_least=0, below=1e6)] = 0.0
    """Epochs of linear warm-up from 0."""
    seed: Annotated[int, Limit(at_least=0, below=2**31), Fixed] = 0
    """Seed of initial weights, data order, dropout and augmentation."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelFlags:
    """Parallelism"""

    parallel: Annotated[Parallel, Free] = "ddp"
    """ddp: replicas; fsdp: sharded parameters; hsdp: sharded in groups of --group-size, replicas of those; tensor: layers
    split over groups of --group-size, replicas of those; pipeline: two devices per process; gpipe, 1f1b: one stage per
    rank."""
    group_size: Annotated[Count, Free] = 0
    """hsdp, tensor: ranks per group; 0: those of a node."""
    bucket_mb: Annotated[int, Limit(at_least=1, below=2**20), Free] = 25
    """ddp: gradient bucket size in megabytes."""
    static_graph: Annotated[bool, Free] = False
    """ddp: declare that every step uses the same parameters."""
    find_unused_parameters: Annotated[bool, Free] = False
    """ddp: allow steps that do not use every parameter."""
    sync_bn: bool = False
    """ddp on GPUs: BatchNorm over the global batch."""
    split_size: Count = 0
    """pipeline: samples per chunk; 0: the whole batch, one device at a time."""
    copy_stream: Annotated[bool, Free] = True
    """pipeline on GPUs: copy between the devices on a separate stream."""
    microbatches: Positive = 4
    """gpipe, 1f1b: microbatches per batch; must divide the batch size."""
    cuts: Annotated[str, Free] = ""
    """Pipelines: layers that begin the later stages, for example layer2,layer3; default: balance the stages."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PrecisionFlags:
    """Precision and speed"""

    amp: Literal["none", "bf16", "fp16"] = "none"
    """Automatic mixed precision."""
    tf32: bool = True
    """GPUs: TF32 for float32 matrix products."""
    channels_last: Annotated[bool, Free] = False
    """Use the channels_last memory format, which is faster on GPUs."""
    compile: Annotated[bool, Free] = False
    """torch.compile the model."""
    fused: Annotated[bool, Free] = False
    """Use the fused optimizer kernel."""
    deterministic: Annotated[bool, Free] = False
    """Use deterministic algorithms only; slower on GPUs."""
    device: Annotated[Literal["auto", "cpu", "cuda"], Free] = "auto"
    """auto: cuda if available."""
    backend: Annotated[Literal["auto", "gloo", "nccl"], Free] = "auto"
    """auto: nccl on cuda, else gloo."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationFlags:
    """Evaluation"""

    evaluate: Annotated[bool, Free] = False
    """Only evaluate: the best weights in --out, or those of --weights."""
    eval_every: Annotated[Count, Free] = 0
    """Steps between evaluations within an epoch; 0: only after each epoch."""
    eval_batch_size: Annotated[Positive, Free] = 256
    """Samples per rank and forward pass; does not affect the result."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SnapshotFlags:
    """Snapshots"""

    save_every: Annotated[Count, Free] = 0
    """Steps between extra snapshots; 0: only after each epoch."""
    snapshot: Annotated[Literal["full", "sharded"], Free] = "full"
    """full: one file; sharded: each rank writes its part (needs shared storage)."""
    snapshot_per_node: Annotated[bool, Free] = False
    """Local rank 0 of every node writes the snapshot, not only rank 0."""
    snapshot_async: Annotated[bool, Free] = False
    """Write snapshots while the training continues, from a copy in memory."""
    keep_best: Annotated[Count, Free] = 1
    """Keep the weights of this many best evaluations."""
    best_metric: Annotated[str, Free] = ""
    """Metric of the best weights, such as accuracy or loss; default: the task's own."""
    fresh: Annotated[bool, Free] = False
    """Remove the snapshots of an earlier run in --out and start from scratch."""
    resume: Annotated[Literal["auto", "require"], Free] = "auto"
    """auto: resume if there is a snapshot; require: fail if there is none."""
    force: Annotated[bool, Free] = False
    """Resume even if the snapshot has another model, seed or global batch size."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputFlags:
    """Output"""

    out: Annotated[str, Free] = ""
    """Folder for snapshots and metrics; default: runs/DATASET."""
    log_every: Annotated[Count, Free] = 10
    """Steps between `train` lines in metrics.jsonl; 0: none."""
    print_steps: Annotated[bool, Free] = False
    """Also print the `train` lines."""
    tensorboard: Annotated[bool, Free] = True
    """Write TensorBoard events if tensorboard is installed."""
    wandb: Annotated[str, Free] = ""
    """Project of Weights & Biases to log to, if wandb is installed."""
    profile: Annotated[str, Free] = ""
    """FIRST:LAST steps (from 1) of which each rank writes a Chrome trace to OUT/trace-rankN.json."""
    peak_tflops: Annotated[NotNegative, Free] = 0.0
    """Peak TFLOP/s of one device, for MFU; 0: known GPUs only."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RendezvousFlags:
    """Rendezvous"""

    spawn: Annotated[Count, Free] = 0
    """Start this many ranks on this machine, without torchrun."""
    init_method: Annotated[str, Free] = "env://"
    """env://, tcp://HOST:PORT or file:///PATH."""
    world_size: Annotated[Count, Free] = 0
    """Number of ranks, for starts without torchrun; 0: the variable WORLD_SIZE."""
    timeout: Annotated[float, Limit(above=0, below=1e6), Free] = 600.0
    """Seconds to wait for other ranks, at rendezvous and in each collective."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultFlags:
    """Fault injection"""

    fail_rank: Annotated[int, Limit(at_least=-1), Free] = -1
    """Rank that exits, to test recovery; -1: none."""
    fail_code: Annotated[int, Limit(at_least=0, below=256), Free] = 1
    """Exit code of --fail-rank."""
    fail_step: Annotated[Positive, Free] = 1
    """Step (from 1) before which --fail-rank exits; ignored in a resumed run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """One training run. Raises `UsageError` on construction for a value or a combination that cannot work."""

    data: DataFlags = field(default_factory=DataFlags)
    """Data"""
    model: ModelFlags = field(default_factory=ModelFlags)
    """Model"""
    optimization: OptimizationFlags = field(default_factory=OptimizationFlags)
    """Optimization"""
    parallel: ParallelFlags = field(default_factory=ParallelFlags)
    """Parallelism"""
    precision: PrecisionFlags = field(default_factory=PrecisionFlags)
    """Precision and speed"""
    evaluation: EvaluationFlags = field(default_factory=EvaluationFlags)
    """Evaluation"""
    snapshots: SnapshotFlags = field(default_factory=SnapshotFlags)
    """Snapshots"""
    output: OutputFlags = field(default_factory=OutputFlags)
    """Output"""
    rendezvous: RendezvousFlags = field(default_factory=RendezvousFlags)
    """Rendezvous"""
    faults: FaultFlags = field(default_factory=FaultFlags)
    """Fault injection"""
    position: tyro.conf.Positional[tuple[int, ...]] = ()
    """RANK LOCAL_RANK of this process, for starts without torchrun."""

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


def _flags(config: Config) -> list[tuple[str, Any, tuple[Any, ...]]]:
    """Return (name, value, notes) of every flag."""
    return [
        (name, getattr(getattr(config, group), name), notes)
        for group, kind in _groups().items()
        for name, notes in _notes(kind).items()
    ]


# -- combinations that cannot work -------------------------------------------------------------------------

# Flags that take effect only with these values of another flag: (flag, other flag, values).
_ONLY_WITH = (
    ("cuts", "parallel", ("pipeline", "gpipe", "1f1b")),
    ("static_graph", "parallel", ("ddp", "pipeline")),
    ("find_unused_parameters", "parallel", ("ddp", "pipeline")),
    ("split_size", "parallel", ("pipeline",)),
    ("group_size", "parallel", ("hsdp", "tensor")),
    ("image_size", "dataset", ("stl10", "folder", "synthetic")),
    ("label_smoothing", "dataset", ("digits", "mnist", "stl10", "folder", "synthetic", "text")),
    ("min_lr", "scheduler", ("cosine",)),
)


def _check_unused(config: Config) -> None:
    values = config.flags()
    for name, other, allowed in _ONLY_WITH:
        if values[name] and values[other] not in allowed:
            raise UsageError(
                f"{flag(name)} has no effect with {flag(other)} {values[other]}, only with {', '.join(allowed)}: remove it"
            )
    if config.data.on_device and config.data.workers:
        raise UsageError("--workers has no effect with --on-device: remove one of them")


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
            f"--parallel {mode}: the batch size {optimization.batch_size} cannot be divided into {parts} equal "
            "microbatches; change --batch-size or --microbatches"
        )
    if config.precision.amp == "fp16" and mode != "ddp":
        raise UsageError(f"--amp fp16 works only with --parallel ddp, not {mode}: use --amp bf16")
    if optimization.accumulate > optimization.batch_size:
        raise UsageError(
            f"--accumulate {optimization.accumulate}: more chunks than samples in a batch ({optimization.batch_size})"
        )
    if flags.static_graph and optimization.accumulate > 1:
        raise UsageError("DDP does not support --static-graph with --accumulate: remove one of them")
    if config.precision.fused and optimization.optimizer == "sgd" and mode in ("fsdp", "hsdp", "tensor"):
        raise UsageError(
            "--fused: PyTorch has no fused sgd for sharded parameters; use adamw, or remove --fused"
        )
    if mode == "tensor" and config.model.model != "transformer":
        raise UsageError(
            f"--parallel tensor splits the layers of a transformer, not of {config.model.model}: use --model transformer"
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
