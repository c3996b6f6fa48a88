"""What the user asked for: one frozen record whose fields are the flags, and the recipe of each dataset.

It must not know torch. Each field of `Config` is one flag; its `option` holds the help text and the limits. What
cannot be together is refused here, before torch is imported.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from train import flags
from train.errors import UsageError
from train.flags import FROM_RECIPE, option

MODELS = ("small", "mnist", "resnet18", "resnet50", "linear")
OPTIMIZERS = ("sgd", "adadelta", "adamw")
SCHEDULERS = ("none", "step", "cosine")
PARALLEL = ("ddp", "fsdp", "pipeline", "gpipe", "1f1b")

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

# Flags that would do nothing, without a word, but with these values of another one.
ONLY_WITH = (
    ("cuts", "parallel", ("pipeline", "gpipe", "1f1b")),
    ("static_graph", "parallel", ("ddp", "pipeline")),
    ("split_size", "parallel", ("pipeline",)),
    ("image_size", "dataset", ("stl10", "synthetic")),
    ("label_smoothing", "dataset", ("digits", "mnist", "stl10", "synthetic")),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """One training run. Values are checked when it is made; `UsageError` says what is allowed."""

    dataset: str = option("digits", "what to train on", choices=DATASETS, section="What is trained on what")
    data: str = option("data", "folder that holds the files of mnist and stl10")
    download: bool = option(False, "fetch missing files of mnist or stl10 (local rank 0 of each node)")
    image_size: int = option(
        0, "side of the images of stl10 and synthetic; 0: 224 for stl10, 32 for synthetic", at_least=0
    )
    synthetic_size: int = option(2048, "number of synthetic training samples", at_least=1)
    augment: bool = option(False, "random crops and flips, on the device, by (seed, epoch, sample)")
    workers: int = option(0, "data-loading processes per rank", at_least=0)
    prefetch: int = option(2, "batches that each data-loading process keeps ready", at_least=1)
    on_device: bool = option(False, "keep the whole dataset in the memory of the device")
    model: str = option(FROM_RECIPE, "the network", choices=MODELS)

    epochs: int = option(
        FROM_RECIPE, "passes over the training set", at_least=1, section="How the weights are updated"
    )
    batch_size: int = option(FROM_RECIPE, "GLOBAL batch: samples per step over all ranks", at_least=1)
    accumulate: int = option(
        1, "parts that each rank's share of a batch is computed in, to need less memory", at_least=1
    )
    optimizer: str = option(FROM_RECIPE, "update rule", choices=OPTIMIZERS)
    lr: float = option(FROM_RECIPE, "learning rate", above=0, below=1e38)
    lr_batch: int = option(
        0, "the global batch that --lr is meant for; lr grows in proportion; 0: as given", at_least=0
    )
    momentum: float = option(0.9, "momentum (sgd only)", at_least=0, below=1)
    weight_decay: float = option(FROM_RECIPE, "weight decay", at_least=0)
    clip: float = option(0.0, "largest norm of the gradient; 0: no clipping", at_least=0)
    label_smoothing: float = option(0.0, "share of the target spread over all classes", at_least=0, below=1)
    scheduler: str = option(
        FROM_RECIPE, "step: lr divided by ten every --lr-epochs; cosine: down to 0", choices=SCHEDULERS
    )
    lr_epochs: int = option(30, "epochs between drops of the step scheduler", at_least=1)
    warmup_epochs: float = option(
        0.0, "epochs in which the learning rate rises from 0", at_least=0, below=1e6
    )
    seed: int = option(
        0, "decides initial weights, data order, dropout and augmentation", at_least=0, below=2**31
    )
    deterministic: bool = option(False, "only operations that give the same bits each time; slower on GPUs")

    parallel: str = option(
        "ddp",
        "ddp: replicas; fsdp: shards; pipeline: two devices in each process; gpipe, 1f1b: one stage per rank",
        choices=PARALLEL,
        section="How it is spread over devices, and how fast",
    )
    bucket_mb: int = option(
        25, "ddp: megabytes of gradients that are reduced at once", at_least=1, below=2**20
    )
    static_graph: bool = option(False, "ddp: promise that each step uses the same parameters")
    sync_bn: bool = option(False, "ddp on GPUs: BatchNorm over the global batch")
    split_size: int = option(
        0, "pipeline: samples per piece; 0: the whole batch, one device at a time", at_least=0
    )
    copy_stream: bool = option(True, "pipeline on GPUs: copies between the devices on a stream of their own")
    microbatches: int = option(4, "gpipe, 1f1b: pieces of a batch; must divide the batch size", at_least=1)
    cuts: str = option(
        "",
        "pipelines: layers that begin the later stages, as layer3 or layer2,layer3; default: as many layers each",
    )
    amp: str = option("none", "mixed precision", choices=("none", "bf16", "fp16"))
    tf32: bool = option(True, "GPUs: float32 matrix products with 10 bits of mantissa")
    channels_last: bool = option(False, "store images with the channel last, which GPUs convolve faster")
    compile: bool = option(False, "torch.compile the network")
    fused: bool = option(False, "one kernel for a whole update, where the optimizer has it")
    device: str = option("auto", "auto: cuda where there is one", choices=("auto", "cpu", "cuda"))
    backend: str = option("auto", "auto: nccl for cuda, else gloo", choices=("auto", "gloo", "nccl"))

    out: str = option(
        "", "folder for snapshots and metrics; default runs/DATASET", section="What it leaves behind"
    )
    log_every: int = option(10, "steps between training lines in metrics.jsonl; 0: none", at_least=0)
    print_steps: bool = option(False, "print the training lines, too, each --log-every steps")
    save_every: int = option(0, "steps between extra snapshots; 0: at the end of an epoch only", at_least=0)
    snapshot: str = option(
        "full",
        "full: one file; sharded: each rank writes its part (shared storage)",
        choices=("full", "sharded"),
    )
    snapshot_per_node: bool = option(False, "local rank 0 of every node writes the snapshot, not only rank 0")
    fresh: bool = option(False, "remove the snapshots of an earlier run in --out and start again")
    resume: str = option(
        "auto",
        "auto: go on from a snapshot where there is one; require: refuse to start without",
        choices=("auto", "require"),
    )
    force: bool = option(False, "resume although the snapshot is of another model, seed or global batch")
    tensorboard: bool = option(True, "write TensorBoard events where tensorboard is installed")
    peak_tflops: float = option(0.0, "peak of one device, for the MFU; 0: known GPUs only", at_least=0)

    spawn: int = option(
        0, "start this many ranks on this machine, without torchrun", at_least=0, section="How the ranks meet"
    )
    init_method: str = option("env://", "env://, tcp://HOST:PORT or file:///PATH")
    world_size: int = option(
        0, "ranks in the job, for starts without torchrun; 0: the variable WORLD_SIZE", at_least=0
    )
    timeout: float = option(
        600.0, "seconds that the ranks wait for each other, to meet and in each operation", above=0, below=1e6
    )

    fail_rank: int = option(
        -1, "rehearsal: this rank exits on purpose; -1: none", at_least=-1, section="Rehearsal"
    )
    fail_code: int = option(1, "rehearsal: its exit code", at_least=0, below=256)
    fail_step: int = option(
        1, "rehearsal: the step before which it exits (from 1); not in a run that resumed", at_least=1
    )
    place: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        flags.check(self)
        if not self.init_method.startswith(("env://", "tcp://", "file://")):
            raise UsageError(f"--init-method {self.init_method}: must begin with env://, tcp:// or file://")
        if len(self.place) not in (0, 2) or any(number < 0 for number in self.place):
            raise UsageError(f"RANK LOCAL_RANK: two numbers from 0 up, or neither; got {list(self.place)}")
        if self.fresh and self.resume == "require":
            raise UsageError("--fresh and --resume require contradict each other: give one of them")
        if self.spawn and self.place:
            raise UsageError("--spawn numbers the ranks itself: leave RANK LOCAL_RANK out")
        if self.spawn and self.world_size:
            raise UsageError("--spawn is the number of ranks: leave --world-size out")
        self._check_unused()
        self._check_parallel()

    def _check_unused(self) -> None:
        for name, other, values in ONLY_WITH:
            if getattr(self, name) and getattr(self, other) not in values:
                raise UsageError(
                    f"--{name.replace('_', '-')} does nothing with --{other} {getattr(self, other)}, only with "
                    f"{', '.join(values)}: leave it out"
                )
        if self.on_device and self.workers:
            raise UsageError("--workers has nothing to read with --on-device: leave one of them out")

    def _check_parallel(self) -> None:
        staged = self.parallel in ("gpipe", "1f1b")
        if staged and self.batch_size % (self.microbatches * self.accumulate):
            raise UsageError(
                f"--parallel {self.parallel}: the batch size {self.batch_size} cannot be divided into "
                f"{self.microbatches * self.accumulate} equal microbatches; change --batch-size or --microbatches"
            )
        if self.amp == "fp16" and self.parallel != "ddp":
            raise UsageError(
                f"--amp fp16 works with --parallel ddp only, not {self.parallel}: give --amp bf16"
            )
        if self.accumulate > self.batch_size:
            raise UsageError(
                f"--accumulate {self.accumulate}: more parts than a batch has samples ({self.batch_size})"
            )
        if self.static_graph and self.accumulate > 1:
            raise UsageError("--static-graph cannot go with --accumulate (DDP fails): leave one of them out")
        if self.fused and self.optimizer == "sgd" and self.parallel == "fsdp":
            raise UsageError(
                "--fused: PyTorch has no fused kernel of sgd for sharded parameters; choose adamw, or leave it out"
            )
        if self.snapshot == "sharded" and self.parallel not in ("ddp", "fsdp"):
            raise UsageError(
                f"--snapshot sharded works with ddp and fsdp, not {self.parallel}: leave it at full"
            )
        if self.snapshot == "sharded" and self.snapshot_per_node:
            raise UsageError("--snapshot sharded needs shared storage: it cannot go with --snapshot-per-node")

    @property
    def folder(self) -> Path:
        """Where this run writes."""
        return Path(self.out or f"runs/{self.dataset}")

    @property
    def scaled_lr(self) -> float:
        """The learning rate for this global batch."""
        return self.lr * self.batch_size / self.lr_batch if self.lr_batch else self.lr

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
    given = flags.read(
        Config, argv, prog="train/main.py", description="Train a network on one process, one node or many."
    )
    return make(**given)
