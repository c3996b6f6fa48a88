"""Ranks without torchrun: one process per rank on this machine, started by torch.multiprocessing.

It must not know training: each process runs what `train.main` runs, with its place given.
"""

from __future__ import annotations

import dataclasses
import socket

import torch.multiprocessing as mp

from train.config import Config


def spawn(config: Config, begun: float) -> int:
    """Run `config.spawn` ranks to their end. Returns 0, or the exit code of the first rank that failed."""
    config = dataclasses.replace(
        config,
        spawn=0,
        world_size=config.spawn,
        init_method=f"tcp://127.0.0.1:{_free_port()}"
        if config.init_method == "env://"
        else config.init_method,
    )
    try:
        mp.spawn(_rank, args=(config, begun), nprocs=config.world_size)
    except mp.ProcessExitedException as error:
        # The rank has said why; a signal number is what a shell would make of it.
        return error.exit_code if error.exit_code > 0 else 128 - error.exit_code
    return 0


def _rank(rank: int, config: Config, begun: float) -> None:
    from train.main import leave, run

    leave(run(dataclasses.replace(config, place=(rank, rank)), begun))


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
