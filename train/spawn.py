"""Ranks without torchrun: one process per rank on this machine, started by torch.multiprocessing.

It must not know training: each process runs what `train.main` runs, with its place given.
"""

from __future__ import annotations

import dataclasses
import socket

import torch.multiprocessing as mp

from train import preempt
from train.config import Config

POLL = 0.2  # seconds until SIGTERM is handed on
GRACE = 30.0  # seconds that the other ranks have to end by themselves when one has; torch kills them after twice that


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
        with preempt.listen() as stop:
            ranks = mp.spawn(_rank, args=(config, begun), nprocs=config.world_size, join=False)
            return _watch(ranks, stop)
    except mp.ProcessExitedException as error:
        # The rank has said why; a signal number is what a shell would make of it.
        return error.exit_code if error.exit_code > 0 else 128 - error.exit_code
    except KeyboardInterrupt:
        return 130  # the ranks get it too, and one of them says so


def _watch(ranks: mp.ProcessContext, stop: preempt.StopSignal) -> int:
    """Wait for the ranks, and hand on the wish to stop. Returns 0."""
    told = False
    while not ranks.join(timeout=POLL, grace_period=GRACE):
        if stop.asked and not told:
            told = True
            for process in ranks.processes:
                process.terminate()
    return 0


def _rank(rank: int, config: Config, begun: float) -> None:
    from train.main import leave, run

    leave(run(dataclasses.replace(config, place=(rank, rank)), begun))


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
