"""Selects the strategy that --parallel names."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from train.config import Config
from train.distributed.communicator import Communicator
from train.errors import UsageError
from train.parallel.ddp import DDPStrategy
from train.parallel.fsdp import FSDPStrategy
from train.parallel.two_devices import TwoDeviceStrategy

# Modes that are of no use with a single rank, and why.
NEED_RANKS = {
    "fsdp": "has nothing to shard over: it works, but is slower than ddp",
    "gpipe": "is a single stage: it works, but gains nothing",
    "1f1b": "is a single stage: it works, but gains nothing",
}


def build(config: Config, comm: Communicator, module: nn.Module, *, shape: Sequence[int]) -> DDPStrategy:
    """Return `module`, for inputs of `shape`, spread over devices and ranks as --parallel says.

    Raises `UsageError` where the model cannot be split, or there are too few devices or ranks.
    """
    strategy = _strategy_class(config)(config, comm, module, shape)
    if comm.world_size == 1 and config.parallel in NEED_RANKS:
        print(f"--parallel {config.parallel} with one rank {NEED_RANKS[config.parallel]}", flush=True)
    return strategy


def _strategy_class(config: Config) -> type[DDPStrategy]:
    if config.parallel == "ddp":
        return DDPStrategy
    if config.parallel == "fsdp":
        return FSDPStrategy
    if config.sync_bn:
        raise UsageError(f"--sync-bn works only with --parallel ddp, not {config.parallel}: remove it")
    if config.parallel == "pipeline":
        return TwoDeviceStrategy
    # torch.distributed.pipelining takes half a second to import, which the other modes need not pay.
    from train.parallel.stages import StageStrategy

    return StageStrategy
