"""Selects the strategy that --parallel names."""

from __future__ import annotations

from collections.abc import Callable

from torch import nn

from train.config import Config
from train.distributed.communicator import Communicator
from train.parallel.ddp import DDPStrategy
from train.parallel.fsdp import FSDPStrategy, HSDPStrategy
from train.parallel.strategy import Strategy
from train.parallel.two_devices import TwoDeviceStrategy
from train.task import Batch, Task

# Modes that are of no use with a single rank, and why.
NEED_RANKS = {
    "fsdp": "has nothing to shard over: it works, but is slower than ddp",
    "hsdp": "has nothing to shard over: it works, but is slower than ddp",
    "tensor": "has nothing to split over: it works, but is slower than ddp",
    "gpipe": "is a single stage: it works, but gains nothing",
    "1f1b": "is a single stage: it works, but gains nothing",
}


def build(
    config: Config,
    comm: Communicator,
    module: nn.Module,
    task: Task,
    example: Callable[[], Batch],
) -> Strategy:
    """Return `module`, for batches like those of `example`, spread over devices and ranks as --parallel says.

    Raises `UsageError` where the model cannot be split, or there are too few devices or ranks.
    """
    strategy = _strategy_class(config)(config, comm, module, task, example)
    mode = config.parallel.parallel
    if comm.world_size == 1 and mode in NEED_RANKS:
        print(f"--parallel {mode} with one rank {NEED_RANKS[mode]}", flush=True)
    return strategy


def _strategy_class(config: Config) -> type[Strategy]:
    mode = config.parallel.parallel
    if mode == "ddp":
        return DDPStrategy
    if mode == "fsdp":
        return FSDPStrategy
    if mode == "hsdp":
        return HSDPStrategy
    # Imported only where needed: torch.distributed.pipelining and tensor.parallel take half a second each.
    if mode == "tensor":
        from train.parallel.tensor import TensorStrategy

        return TensorStrategy
    if mode == "pipeline":
        return TwoDeviceStrategy
    from train.parallel.stages import StageStrategy

    return StageStrategy
