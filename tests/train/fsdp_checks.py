"""Runs on the ranks: what test_train_fsdp.py compares. Many checks in one job, since starting one costs seconds.

`fsdp_checks.py FOLDER SHARED` saves what this rank saw as FOLDER/rank<r>.pt. SHARED holds the snapshots that a job of
two ranks leaves for the others. It must not know what is right: it only reports.
"""

from __future__ import annotations

import functools
import os
import resource
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from train import dist, models, parallel, sharded
from train.config import make
from train.data import Data, Tensors
from train.dist import Ranks
from train.errors import TrainError
from train.main import leave
from train.metrics import Metrics
from train.trainer import Trainer

SAMPLES, TESTS, BATCH, CLASSES = 22, 7, 5, 4  # the last batch has 2 samples: with 3 ranks one of them is idle
SGD = {"optimizer": "sgd", "lr": 0.05}
WAYS: dict[str, dict[str, Any]] = {
    "plain": {},
    "two parts, smoothed": {"accumulate": 2, "label_smoothing": 0.1},
    "three parts, clipped": {"accumulate": 3, "clip": 0.3},  # a rank often has fewer samples than parts
}
# --snapshot, type, and the modes that write and that read
CHANGES = [
    ("sharded", torch.float64, writer, reader) for writer in ("fsdp", "ddp") for reader in ("fsdp", "ddp")
]
CHANGES += [("full", torch.float64, "fsdp", "ddp"), ("full", torch.float64, "ddp", "fsdp")]
CHANGES += [("sharded", torch.float32, "fsdp", "fsdp")]


class Listed(nn.Module):
    """Not a sequence: parameters of its own, and layers in a list, which has no forward."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.full((1,), 0.5))
        self.blocks = nn.ModuleList([nn.Linear(64, 48), nn.Linear(48, 32)])
        self.head = nn.Linear(32, CLASSES)

    def forward(self, inputs: Tensor) -> Tensor:
        values = inputs.flatten(1) * self.scale
        for block in self.blocks:
            values = block(values).relu()
        return self.head(values)


def images(samples: int, size: int, seed: int, dtype: torch.dtype) -> Tensors:
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(samples, 1, size, size, generator=generator, dtype=dtype)
    return Tensors(inputs, torch.randint(0, CLASSES, (samples,), generator=generator))


def trainer(ranks: Ranks, model: str, dtype: torch.dtype, out: Path, **settings: Any) -> Trainer:
    size = 12 if model in ("mnist", "nested") else 8
    network = {"listed": "small", "nested": "mnist"}.get(model, model)
    config = make(
        dataset="synthetic",
        model=network,
        batch_size=BATCH,
        out=str(out),
        **settings,
    )
    data = Data(
        train=images(SAMPLES, size, 1, dtype),
        test=images(TESTS, size, 2, dtype),
        shape=(1, size, size),
        classes=CLASSES,
        prepare=lambda inputs: inputs,
    )
    if model == "listed":
        torch.manual_seed(0)
        module: nn.Module = Listed()
    else:
        module = models.build(network, shape=data.shape, classes=CLASSES, seed=config.seed)
    if model == "nested":
        module = nn.Sequential(module)
    if model == "mnist":  # stands for all networks that draw random numbers
        module.add_module("dropout", nn.Dropout(0.3))
    config.folder.mkdir(parents=True, exist_ok=True)
    metrics = Metrics(config.folder, enabled=False, tensorboard=False)
    spread = parallel.build(config, ranks, module.to(dtype), shape=data.shape)
    return Trainer(config=config, ranks=ranks, parallel=spread, data=data, metrics=metrics)


def weights(subject: Trainer) -> dict[str, Tensor]:
    """The whole model, on every rank."""
    state = subject.parallel.module.state_dict()
    return {
        name: (value.full_tensor() if hasattr(value, "full_tensor") else value).detach().clone()
        for name, value in state.items()
    }


def epoch(
    ranks: Ranks, folder: Path, model: str, dtype: torch.dtype, mode: str, **settings: Any
) -> dict[str, Any]:
    """One epoch and a validation."""
    subject = trainer(ranks, model, dtype, folder / "epoch", epochs=1, parallel=mode, **{**SGD, **settings})
    subject.train_epoch()
    return {"test": subject.validate(), "weights": weights(subject)}


def train_both_ways(ranks: Ranks, folder: Path, _shared: Path) -> dict[str, Any]:
    """The same training with replicas and with shards; with one rank the replica is the plain reference."""
    double, single = torch.float64, torch.float32

    def train(mode: str) -> dict[str, Any]:
        ways = WAYS if ranks.world < 3 else {way: WAYS[way] for way in ("plain", "three parts, clipped")}
        seen = {way: epoch(ranks, folder, "small", double, mode, **flags) for way, flags in ways.items()}
        if ranks.world == 2:
            seen["BatchNorm"] = epoch(ranks, folder, "mnist", double, mode, accumulate=2)
            seen["a list of layers"] = epoch(ranks, folder, "listed", double, mode)
            seen["single precision"] = epoch(ranks, folder, "small", single, mode, clip=0.3)
            seen["channels last"] = epoch(ranks, folder, "small", single, mode, channels_last=True)
            seen["half precision, nested"] = epoch(ranks, folder, "nested", single, mode, amp="bf16", lr=0.01)
            seen["half precision"] = epoch(ranks, folder, "mnist", single, mode, amp="bf16", lr=0.01)
        return seen

    return {mode: train(mode) for mode in ("ddp", "fsdp")}


def count_elements(ranks: Ranks, folder: Path, _shared: Path) -> dict[str, Any]:
    subject = trainer(
        ranks, "small", torch.float32, folder / "count", epochs=1, parallel="fsdp", optimizer="adamw"
    )
    subject.train_epoch()
    parameters = list(subject.parallel.module.parameters())
    moments = [state["exp_avg"] for state in subject.optimizer.state.values()]
    return {
        "whole": sum(p.numel() for p in parameters),
        "here": sum(p.to_local().numel() for p in parameters),
        "moments here": sum(moment.to_local().numel() for moment in moments),
    }


def compute_in_half_precision(ranks: Ranks, folder: Path, _shared: Path) -> dict[str, Any]:
    """In which type the weights are used, and whether gradients are averaged in a finer one."""
    subject = trainer(ranks, "mnist", torch.float32, folder / "half", parallel="fsdp", amp="bf16")
    used = []
    for name in ("conv1", "norm1"):
        layer = subject.parallel.module.get_submodule(name)
        layer.register_forward_pre_hook(lambda layer, _inputs: used.append(layer.weight.dtype))
    subject.train_step(*next(subject.train_loader(list(subject.batches.epoch(0)))))
    gradient = subject.parallel.module.get_parameter("fc1.weight").grad.to_local()
    return {"used": used, "finer": bool((gradient.bfloat16().float() != gradient).any())}


def compile_layers(ranks: Ranks, folder: Path, _shared: Path) -> int:
    """How many graphs torch.compile was given; they are run as they are, since compiling takes half a minute."""
    graphs = []

    def count(graph: torch.fx.GraphModule, _inputs: list[Tensor]) -> Any:
        graphs.append(graph)
        return graph.forward

    usual = torch.compile
    torch.compile = functools.partial(usual, backend=count)
    try:
        subject = trainer(ranks, "listed", torch.float32, folder / "compiled", parallel="fsdp", compile=True)
        subject.parallel.model(torch.zeros(2, 1, 8, 8))
    finally:
        torch.compile = usual
    return len(graphs)


def interrupt_and_resume(ranks: Ranks, folder: Path, _shared: Path) -> dict[str, Any]:
    """A network with BatchNorm and dropout: run through, and by two trainers, the second resuming in mid-epoch."""
    settings = {"parallel": "fsdp", "snapshot": "sharded", "epochs": 2, "optimizer": "adamw", "lr": 0.01}
    whole = trainer(ranks, "mnist", torch.float32, folder / "whole", **settings)
    whole.fit()
    first = trainer(ranks, "mnist", torch.float32, folder / "parts", save_every=4, **settings)
    first.train_epoch()
    first.train_epoch()  # the newest snapshot is of step 8, and the epoch ends at 10
    second = trainer(ranks, "mnist", torch.float32, folder / "parts", **settings)
    second.resume()
    resumed_at = second.step
    second.fit()
    states = [subject.parallel.state(subject.optimizer) for subject in (whole, second)]
    return {
        "resumed_at": resumed_at,
        "folders": sorted(path.name for path in (folder / "parts").glob("*.dcp")),
        "whole": [weights(whole), *states[0]],
        "parts": [weights(second), *states[1]],
    }


def go_on_elsewhere(ranks: Ranks, _folder: Path, shared: Path) -> dict[str, Any]:
    """Two ranks leave a snapshot of each mode in mid-epoch; any number of ranks goes on from it in each mode."""
    seen = {}
    for kind, dtype, writer, reader in CHANGES:
        settings = {**SGD, "snapshot": kind, "epochs": 2, "save_every": 4}
        uninterrupted = f"{kind} {dtype} {writer}"
        out = shared / uninterrupted
        if ranks.world == 2 and uninterrupted not in seen:
            subject = trainer(ranks, "small", dtype, out, parallel=writer, **settings)
            subject.train_epoch()
            subject.train_epoch()  # the newest snapshot is of step 8, and the epoch ends at 10
            seen[uninterrupted] = weights(subject)
        subject = trainer(ranks, "small", dtype, out, parallel=reader, **settings)
        subject.resume()
        assert subject.step == 8
        subject.train_epoch()
        seen[f"{uninterrupted} to {reader}"] = weights(subject)
    return seen


def fail_together(ranks: Ranks, folder: Path, _shared: Path) -> dict[str, Any]:
    """What every rank says when the disk of the last one is full, when a file of it is damaged, and when the ranks
    see different folders."""
    settings = {**SGD, "parallel": "fsdp", "snapshot": "sharded", "epochs": 1}
    subject = trainer(ranks, "small", torch.float32, folder / "full", **settings)
    subject.step = 1
    subject.save()
    subject.step = 2
    last = ranks.rank == ranks.world - 1
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    if last:
        resource.setrlimit(resource.RLIMIT_FSIZE, (5_000, limits[1]))
    full = message_of(subject.save)
    ranks.any(True)  # rank 0 has tidied up
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    left = sorted(path.name for path in subject.config.folder.glob("*.dcp"))
    ranks.any(True)  # all have looked
    blocker = subject.config.folder / sharded.UNFINISHED
    if ranks.is_main:
        blocker.touch()
    blocked = message_of(subject.save)
    if ranks.is_main:
        blocker.unlink()
    subject.save()
    victim = subject.config.folder / "snapshot-2.dcp" / f"__{ranks.world - 1}_0.distcp"
    if last:
        content = victim.read_bytes()
        victim.write_bytes(content[:-100] + bytes([content[-100] ^ 1]) + content[-99:])
    ranks.any(True)
    found = sharded.find_newest(subject.config.folder, ranks)
    alone = trainer(ranks, "small", torch.float32, folder / f"alone{ranks.rank}", **settings)
    other = trainer(ranks, "small", torch.float32, folder / "full", **{**settings, "snapshot": "full"})
    listed = trainer(ranks, "listed", torch.float32, folder / "full", **settings)
    told = {
        "full": full,
        "blocked": blocked,
        "left": left,
        "found": found and found["step"],
        "not shared": message_of(alone.resume),
        "other kind": message_of(other.resume),
        "other model": message_of(listed.resume),
        "probes": [path.name for path in folder.glob("*/.shared-*")],
    }
    afresh = trainer(ranks, "small", torch.float32, folder / "full", fresh=True, **settings)
    afresh.resume()
    return {**told, "afresh": (afresh.step, [path.name for path in afresh.config.folder.glob("*.dcp")])}


def message_of(work: Any) -> str:
    try:
        work()
    except TrainError as error:
        return f"{type(error).__name__}: {error}"
    return "nothing was raised"


CHECKS = {
    1: (train_both_ways, go_on_elsewhere),
    2: (
        train_both_ways,
        count_elements,
        compute_in_half_precision,
        compile_layers,
        interrupt_and_resume,
        go_on_elsewhere,
        fail_together,
    ),
    3: (train_both_ways, count_elements, interrupt_and_resume, go_on_elsewhere, fail_together),
}


def main(folder: Path, shared: Path) -> None:
    config = make(dataset="synthetic", parallel="fsdp", timeout=60.0)
    with dist.join(config, dist.find_place(config, os.environ)) as ranks:
        seen = {check.__name__: check(ranks, folder, shared) for check in CHECKS[ranks.world]}
        torch.save(seen, folder / f"rank{ranks.rank}.pt")


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
    leave(0)
