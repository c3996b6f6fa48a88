"""The flags of the trainer: records by group, whose fields are the flags.

cli.py makes flags of the fields: a docstring is the help text, and `Annotated` holds the limits. Must not
import torch.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, Literal, TypeAlias, get_args

import tyro

Dataset: TypeAlias = Literal["digits", "mnist", "stl10", "folder", "text", "toy", "synthetic", "own"]
Model: TypeAlias = Literal["small", "mnist", "resnet18", "resnet50", "linear", "transformer", "own"]
Optimizer: TypeAlias = Literal["sgd", "adadelta", "adamw"]
Scheduler: TypeAlias = Literal["none", "step", "cosine"]
Parallel: TypeAlias = Literal["ddp", "fsdp", "hsdp", "tensor", "pipeline", "gpipe", "1f1b"]
DATASETS: tuple[str, ...] = get_args(Dataset)


MAX_LR = 1e38  # of float32
MAX_COUNT = 2**53  # up to here a float64, with which rates are computed, holds every integer


@dataclass(frozen=True, slots=True)
class Limit:
    """What a number must be; given in the annotation of its field."""

    at_least: float | None = None
    above: float | None = None
    below: float | None = None

    def problem(self, value: float) -> str | None:
        """Return what a value must be instead, or None if it is within the limit."""
        if isinstance(value, float) and not math.isfinite(value):
            return "must be a finite number"
        if self.at_least is not None and value < self.at_least:
            return f"must be at least {self.at_least:g}"
        if self.above is not None and value <= self.above:
            return f"must be above {self.above:g}"
        if self.below is not None and value >= self.below:
            whole = 1 <= self.below <= MAX_COUNT
            return f"must be below {int(self.below) if whole else f'{self.below:g}'}"
        return None


class Fixed:
    """Marks a flag that a snapshot must agree with to be resumed."""


class Free:
    """Marks a flag that does not change what is trained: it may be another one whenever a run is resumed."""


def _shown_default(default: str) -> str:
    """Return how --help shows a default: not at all where it is empty."""
    return "" if default in ("", "''") else f"(default: {default})"


_HIDDEN_IF_EMPTY = tyro.conf.arg(help_behavior_hint=_shown_default)
Count: TypeAlias = Annotated[int, Limit(at_least=0, below=MAX_COUNT)]
Positive: TypeAlias = Annotated[int, Limit(at_least=1, below=MAX_COUNT)]
Processes: TypeAlias = Annotated[int, Limit(at_least=0, below=1025)]
Share: TypeAlias = Annotated[float, Limit(at_least=0, below=1)]
NotNegative: TypeAlias = Annotated[float, Limit(at_least=0, below=1e38)]


@dataclass(frozen=True, slots=True, kw_only=True)
class DataFlags:
    """What is trained on, and how it is read."""

    dataset: Annotated[Dataset, Fixed] = "digits"
    """Dataset to train on; folder: images in DATA/train/CLASS and DATA/val/CLASS; own: that of a script of
    your own."""
    data: Annotated[str, Free] = "data"
    """Folder with the files of mnist, stl10 and folder."""
    download: Annotated[bool, Free] = False
    """Download missing files of mnist or stl10 (local rank 0 of each node)."""
    image_size: Annotated[int, Limit(at_least=0, below=65537)] = 0
    """Image side in pixels, for stl10, folder and synthetic; 0: 224, for synthetic 32."""
    steps_per_epoch: Count = 0
    """Steps of an epoch, for a stream of samples without a length."""
    synthetic_size: Positive = 2048
    """Number of training samples of synthetic and text."""
    augment: bool = False
    """Random crops and flips, a function of (seed, epoch, sample)."""
    workers: Annotated[Processes, Free] = 0
    """Data-loading processes per rank."""
    prefetch: Annotated[int, Limit(at_least=1, below=1025), Free] = 2
    """Batches that each data-loading process prepares ahead."""
    on_device: Annotated[bool, Free] = False
    """Keep the whole dataset in device memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFlags:
    """What is trained, and from which weights."""

    model: Annotated[Model, Fixed] = "small"
    """Model to train; own: that of a script of your own."""
    weights: Annotated[str, _HIDDEN_IF_EMPTY] = ""
    """File with weights to begin with: best.pt of another run, or a state dictionary; layers of other shapes
    stay new."""
    freeze: Annotated[str, _HIDDEN_IF_EMPTY] = ""
    """Layers whose weights do not change, for example conv1,layer1."""
    activation_checkpointing: Annotated[bool, Free] = False
    """Compute activations again in the backward pass instead of keeping them: less memory, a third more
    work."""
    ema: Share = 0.0
    """Decay of an exponential moving average of the weights, with which the model is evaluated, lower in the
    first steps; 0: none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizationFlags:
    """How long and how the weights are changed."""

    epochs: Positive = 1
    """Passes over the training set."""
    max_steps: Count = 0
    """End after this many steps; 0: after the last epoch."""
    batch_size: Annotated[Positive, Fixed] = 64
    """GLOBAL batch size: samples per step over all ranks."""
    accumulate: Positive = 1
    """Gradient accumulation: forward and backward passes per step, each on a part of the rank's share."""
    optimizer: Annotated[Optimizer, Fixed] = "sgd"
    """Optimizer."""
    lr: Annotated[float, Limit(above=0, below=MAX_LR)] = 0.1
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
    """How the work is divided among ranks and devices."""

    parallel: Annotated[Parallel, Free] = "ddp"
    """ddp: replicas; fsdp: sharded parameters; hsdp: sharded in groups of --group-size, replicas of those;
    tensor: layers split over groups of --group-size, parameters sharded over the groups; pipeline: two
    devices per process; gpipe, 1f1b: one stage per rank."""
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
    cuts: Annotated[str, Free, _HIDDEN_IF_EMPTY] = ""
    """Pipelines: layers that begin the later stages, for example layer2,layer3; default: balance the
    stages."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PrecisionFlags:
    """Number formats, kernels and devices."""

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
    """When and how the test set is evaluated."""

    evaluate: Annotated[bool, Free] = False
    """Only evaluate: the best weights in --out, or those of --weights."""
    eval_every: Annotated[Count, Free] = 0
    """Steps between evaluations within an epoch; 0: only after each epoch."""
    eval_batch_size: Annotated[Positive, Free] = 256
    """Samples per rank and forward pass; does not affect the result."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SnapshotFlags:
    """What is kept of a run, and how it is resumed."""

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
    best_metric: Annotated[str, _HIDDEN_IF_EMPTY] = ""
    """Metric of the best weights, such as accuracy or loss; default: the task's own."""
    fresh: Annotated[bool, Free] = False
    """Remove the snapshots of an earlier run in --out and start from scratch."""
    resume: Annotated[Literal["auto", "require"], Free] = "auto"
    """auto: resume if there is a snapshot; require: fail if there is none."""
    force: Annotated[bool, Free] = False
    """Resume even if the snapshot has another model, seed or global batch size."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputFlags:
    """What a run reports, and where."""

    out: Annotated[str, Free, _HIDDEN_IF_EMPTY] = ""
    """Folder for snapshots and metrics; default: runs/DATASET."""
    log_every: Annotated[Count, Free] = 10
    """Steps between `train` lines in metrics.jsonl; 0: none."""
    print_steps: Annotated[bool, Free] = False
    """Also print the `train` lines."""
    tensorboard: Annotated[bool, Free] = True
    """Write TensorBoard events if tensorboard is installed."""
    wandb: Annotated[str, Free, _HIDDEN_IF_EMPTY] = ""
    """Project of Weights & Biases to log to, if wandb is installed."""
    profile: Annotated[str, Free, _HIDDEN_IF_EMPTY] = ""
    """FIRST:LAST steps (from 1) of which each rank writes a Chrome trace to OUT/trace-rankN.json."""
    peak_tflops: Annotated[NotNegative, Free] = 0.0
    """Peak TFLOP/s of one device, for MFU; 0: known GPUs only."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RendezvousFlags:
    """How the ranks find one another."""

    spawn: Annotated[Processes, Free] = 0
    """Start this many ranks on this machine, without torchrun."""
    init_method: Annotated[str, Free] = "env://"
    """env://, tcp://HOST:PORT or file:///PATH."""
    world_size: Annotated[Count, Free] = 0
    """Number of ranks, for starts without torchrun; 0: the variable WORLD_SIZE."""
    timeout: Annotated[float, Limit(above=0, below=1e6), Free] = 600.0
    """Seconds to wait for other ranks, at rendezvous and in each collective."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultFlags:
    """A failure on purpose, to test recovery."""

    fail_rank: Annotated[int, Limit(at_least=-1, below=MAX_COUNT), Free] = -1
    """Rank that exits, to test recovery; -1: none."""
    fail_code: Annotated[int, Limit(at_least=0, below=256), Free] = 1
    """Exit code of --fail-rank."""
    fail_step: Annotated[Positive, Free] = 1
    """Step (from 1) before which --fail-rank exits; ignored in a resumed run."""
