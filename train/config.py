"""The configuration of a training run: one frozen record whose fields are the flags, and each dataset's recipe.

Must not import torch: combinations that cannot work are refused here, before torch is imported. `option` holds the
help text and the limits of a flag.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from train import options
from train.errors import UsageError
from train.options import FROM_RECIPE, option, positional

MODELS = ("small", "mnist", "resnet18", "resnet50", "linear")
OPTIMIZERS = ("sgd", "adadelta", "adamw")
SCHEDULERS = ("none", "step", "cosine")
PARALLEL = ("ddp", "fsdp", "pipeline", "gpipe", "1f1b")

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
    "toy": {
        "model": "linear",
        "epochs": 5,
        "batch_size": 32,
        "optimizer": "sgd",
        "lr": 0.001,
        "weight_decay": 0.0,
        "scheduler": "none",
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

# Flags that take effect only with these values of another flag: (flag, other flag, values).
ONLY_WITH = (
    ("cuts", "parallel", ("pipeline", "gpipe", "1f1b")),
    ("static_graph", "parallel", ("ddp", "pipeline")),
    ("split_size", "parallel", ("pipeline",)),
    ("image_size", "dataset", ("stl10", "synthetic")),
    ("label_smoothing", "dataset", ("digits", "mnist", "stl10", "synthetic")),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """One training run. Raises `UsageError` on construction for a value or a combination that cannot work."""

    dataset: str = option("digits", "dataset to train on", choices=DATASETS, section="Data and model")
    data: str = option("data", "folder that holds the files of mnist and stl10")
    download: bool = option(False, "download missing files of mnist or stl10 (local rank 0 of each node)")
    image_size: int = option(
        0, "image side in pixels, for stl10 and synthetic; 0: 224 for stl10, 32 for synthetic", at_least=0
    )
    synthetic_size: int = option(2048, "number of synthetic training samples", at_least=1)
    augment: bool = option(False, "random crops and flips on the device, a function of (seed, epoch, sample)")
    workers: int = option(0, "data-loading processes per rank", at_least=0)
    prefetch: int = option(2, "batches that each data-loading process prepares ahead", at_least=1)
    on_device: bool = option(False, "keep the whole dataset in device memory")
    model: str = option(FROM_RECIPE, "model to train", choices=MODELS)

    epochs: int = option(FROM_RECIPE, "passes over the training set", at_least=1, section="Optimization")
    batch_size: int = option(FROM_RECIPE, "GLOBAL batch size: samples per step over all ranks", at_least=1)
    accumulate: int = option(
        1, "gradient accumulation: compute each rank's share of a batch in this many parts", at_least=1
    )
    optimizer: str = option(FROM_RECIPE, "optimizer", choices=OPTIMIZERS)
    lr: float = option(FROM_RECIPE, "learning rate", above=0, below=1e38)
    lr_batch: int = option(
        0, "batch size that --lr is meant for; scale lr in proportion; 0: no scaling", at_least=0
    )
    momentum: float = option(0.9, "momentum (sgd only)", at_least=0, below=1)
    weight_decay: float = option(FROM_RECIPE, "weight decay", at_least=0)
    clip: float = option(0.0, "maximum gradient norm; 0: no clipping", at_least=0)
    label_smoothing: float = option(0.0, "label smoothing", at_least=0, below=1)
    scheduler: str = option(
        FROM_RECIPE,
        "learning rate schedule; step: divide by 10 every --lr-epochs; cosine: decay to 0",
        choices=SCHEDULERS,
    )
    lr_epochs: int = option(30, "epochs between the drops of the step schedule", at_least=1)
    warmup_epochs: float = option(0.0, "epochs of linear warm-up from 0", at_least=0, below=1e6)
    seed: int = option(
        0, "seed of initial weights, data order, dropout and augmentation", at_least=0, below=2**31
    )
    deterministic: bool = option(False, "use deterministic algorithms only; slower on GPUs")

    parallel: str = option(
        "ddp",
        "ddp: replicas; fsdp: sharded parameters; pipeline: two devices per process; gpipe, 1f1b: one stage per rank",
        choices=PARALLEL,
        section="Parallelism and speed",
    )
    bucket_mb: int = option(25, "ddp: gradient bucket size in megabytes", at_least=1, below=2**20)
    static_graph: bool = option(False, "ddp: declare that every step uses the same parameters")
    sync_bn: bool = option(False, "ddp on GPUs: BatchNorm over the global batch")
    split_size: int = option(
        0, "pipeline: samples per chunk; 0: the whole batch, one device at a time", at_least=0
    )
    copy_stream: bool = option(True, "pipeline on GPUs: copy between the devices on a separate stream")
    microbatches: int = option(
        4, "gpipe, 1f1b: microbatches per batch; must divide the batch size", at_least=1
    )
    cuts: str = option(
        "",
        "pipelines: layers that begin the later stages, for example layer2,layer3; default: balance the stages",
    )
    amp: str = option("none", "automatic mixed precision", choices=("none", "bf16", "fp16"))
    tf32: bool = option(True, "GPUs: TF32 for float32 matrix products")
    channels_last: bool = option(False, "use the channels_last memory format, which is faster on GPUs")
    compile: bool = option(False, "torch.compile the model")
    fused: bool = option(False, "use the fused optimizer kernel")
    device: str = option("auto", "auto: cuda if available", choices=("auto", "cpu", "cuda"))
    backend: str = option("auto", "auto: nccl on cuda, else gloo", choices=("auto", "gloo", "nccl"))

    out: str = option("", "folder for snapshots and metrics; default runs/DATASET", section="Output")
    log_every: int = option(10, "steps between `train` lines in metrics.jsonl; 0: none", at_least=0)
    print_steps: bool = option(False, "also print the `train` lines")
    save_every: int = option(0, "steps between extra snapshots; 0: only after each epoch", at_least=0)
    snapshot: str = option(
        "full",
        "full: one file; sharded: each rank writes its part (needs shared storage)",
        choices=("full", "sharded"),
    )
    snapshot_per_node: bool = option(False, "local rank 0 of every node writes the snapshot, not only rank 0")
    fresh: bool = option(False, "remove the snapshots of an earlier run in --out and start from scratch")
    resume: str = option(
        "auto",
        "auto: resume if there is a snapshot; require: fail if there is none",
        choices=("auto", "require"),
    )
    force: bool = option(False, "resume even if the snapshot has another model, seed or global batch size")
    tensorboard: bool = option(True, "write TensorBoard events if tensorboard is installed")
    peak_tflops: float = option(0.0, "peak TFLOP/s of one device, for MFU; 0: known GPUs only", at_least=0)

    spawn: int = option(
        0, "start this many ranks on this machine, without torchrun", at_least=0, section="Rendezvous"
    )
    init_method: str = option("env://", "env://, tcp://HOST:PORT or file:///PATH")
    world_size: int = option(
        0, "number of ranks, for starts without torchrun; 0: the variable WORLD_SIZE", at_least=0
    )
    timeout: float = option(
        600.0, "seconds to wait for other ranks, at rendezvous and in each collective", above=0, below=1e6
    )

    fail_rank: int = option(
        -1, "rank that exits, to test recovery; -1: none", at_least=-1, section="Fault injection"
    )
    fail_code: int = option(1, "exit code of --fail-rank", at_least=0, below=256)
    fail_step: int = option(
        1, "step (from 1) before which --fail-rank exits; ignored in a resumed run", at_least=1
    )
    position: tuple[int, ...] = positional(
        "RANK LOCAL_RANK", "rank and local rank of this process, for starts without torchrun"
    )

    def __post_init__(self) -> None:
        options.validate(self)
        if not self.init_method.startswith(("env://", "tcp://", "file://")):
            raise UsageError(f"--init-method {self.init_method}: must begin with env://, tcp:// or file://")
        if len(self.position) not in (0, 2) or any(number < 0 for number in self.position):
            raise UsageError(
                f"RANK LOCAL_RANK: give both or neither, each at least 0; got {list(self.position)}"
            )
        if self.fresh and self.resume == "require":
            raise UsageError("--fresh contradicts --resume require: give only one of them")
        if self.spawn and self.position:
            raise UsageError("--spawn assigns the ranks itself: remove RANK LOCAL_RANK")
        if self.spawn and self.world_size:
            raise UsageError("--spawn sets the number of ranks: remove --world-size")
        self._check_unused()
        self._check_parallel()
        self._check_snapshot()

    def _check_unused(self) -> None:
        for name, other, values in ONLY_WITH:
            if getattr(self, name) and getattr(self, other) not in values:
                raise UsageError(
                    f"--{name.replace('_', '-')} has no effect with --{other} {getattr(self, other)}, only with "
                    f"{', '.join(values)}: remove it"
                )
        if self.on_device and self.workers:
            raise UsageError("--workers has no effect with --on-device: remove one of them")

    def _check_parallel(self) -> None:
        staged = self.parallel in ("gpipe", "1f1b")
        if staged and self.batch_size % (self.microbatches * self.accumulate):
            raise UsageError(
                f"--parallel {self.parallel}: the batch size {self.batch_size} cannot be divided into "
                f"{self.microbatches * self.accumulate} equal microbatches; change --batch-size or --microbatches"
            )
        if self.amp == "fp16" and self.parallel != "ddp":
            raise UsageError(
                f"--amp fp16 works only with --parallel ddp, not {self.parallel}: use --amp bf16"
            )
        if self.accumulate > self.batch_size:
            raise UsageError(
                f"--accumulate {self.accumulate}: more parts than samples in a batch ({self.batch_size})"
            )
        if self.static_graph and self.accumulate > 1:
            raise UsageError("DDP does not support --static-graph with --accumulate: remove one of them")
        if self.fused and self.optimizer == "sgd" and self.parallel == "fsdp":
            raise UsageError(
                "--fused: PyTorch has no fused sgd for sharded parameters; use adamw, or remove --fused"
            )

    def _check_snapshot(self) -> None:
        if self.snapshot == "sharded" and self.parallel not in ("ddp", "fsdp"):
            raise UsageError(f"--snapshot sharded works with ddp and fsdp, not {self.parallel}: use full")
        if self.snapshot == "sharded" and self.snapshot_per_node:
            raise UsageError(
                "--snapshot sharded needs shared storage and cannot be combined with --snapshot-per-node"
            )

    @property
    def folder(self) -> Path:
        """The output folder of this run."""
        return Path(self.out or f"runs/{self.dataset}")

    @property
    def scaled_lr(self) -> float:
        """The learning rate for this global batch size."""
        return self.lr * self.batch_size / self.lr_batch if self.lr_batch else self.lr

    @property
    def fingerprint(self) -> dict[str, Any]:
        """The settings that a snapshot must agree with to be resumed by this run."""
        names = ("dataset", "model", "batch_size", "optimizer", "scheduler", "seed")
        return {name: getattr(self, name) for name in names}


def make(**given: Any) -> Config:
    """Return a Config from the values given, the dataset's recipe, and the defaults, in that order.

    Raises `UsageError` for a value out of its limits.
    """
    name = given.get("dataset", "digits")
    if name not in RECIPES:
        raise UsageError(f"--dataset {name}: unknown dataset; choose from {', '.join(DATASETS)}")
    return Config(**{**RECIPES[name], **given})


def parse(argv: Sequence[str]) -> Config:
    """Return the Config that the command line describes. Exits 0 after --help; raises `UsageError` for bad flags."""
    given = options.parse_args(
        Config,
        argv,
        prog="train/main.py",
        description="Train a model on one process, one node or many nodes.",
    )
    return make(**given)
