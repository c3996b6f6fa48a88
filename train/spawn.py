"""Ranks without torchrun: one process per rank on this machine, started by torch.multiprocessing.

It must not know training: each process runs what `train.main` runs, with its place given.
"""

from __future__ import annotations

import dataclasses
import os
import signal
import socket
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.process import BaseProcess

import torch.multiprocessing as mp

from train import preempt
from train.config import Config

POLL = 0.2  # seconds until SIGTERM is handed on
GRACE = 30.0  # seconds that the other ranks have to end by themselves when one has; torch kills them after twice that
PATIENCE = 5.0  # seconds that the ranks have to end after Ctrl-C, before they are told again


def spawn(config: Config, begun: float) -> int:
    """Run `config.spawn` ranks to their end. Returns 0, or the exit code of the first rank that failed."""
    config = dataclasses.replace(config, spawn=0, world_size=config.spawn)
    try:
        with preempt.listen() as stop, kept_port() as port:
            if config.init_method == "env://":
                config = dataclasses.replace(config, init_method=f"tcp://127.0.0.1:{port}")
            # A rank that Ctrl-C meets while it imports torch would print a traceback of it.
            with preempt.held_back(signal.SIGINT):
                ranks = mp.spawn(_rank, args=(config, begun), nprocs=config.world_size, join=False)
            return _watch(ranks, stop)
    except mp.ProcessExitedException as error:
        # The rank has said why; a signal number is what a shell would make of it.
        return error.exit_code if error.exit_code > 0 else 128 - error.exit_code
    except KeyboardInterrupt:
        _interrupt(mp.active_children())
        return 130


def _watch(ranks: mp.ProcessContext, stop: preempt.StopSignal) -> int:
    """Wait for the ranks, and hand on the wish to stop. Returns 0."""
    told = False
    while not ranks.join(timeout=POLL, grace_period=GRACE):
        if stop.asked and not told:
            told = True
            for process in ranks.processes:
                process.terminate()
    return 0


def _interrupt(ranks: Sequence[BaseProcess]) -> None:
    """Wait for the ranks, which the terminal has told as well, and of which one says so; tell those who know nothing,
    because this process alone was told."""
    deadline = time.monotonic() + PATIENCE
    for process in ranks:
        process.join(max(0.0, deadline - time.monotonic()))
        if process.is_alive():
            os.kill(process.pid, signal.SIGINT)


def _rank(rank: int, config: Config, begun: float) -> None:
    from train.main import leave, run

    preempt.end_quietly()
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])
    leave(run(dataclasses.replace(config, place=(rank, rank)), begun))


@contextmanager
def kept_port() -> Iterator[int]:
    """A TCP port of loopback for the store of rank 0, which on Linux no other program is given in the meantime: until
    rank 0 listens there, it has to import torch."""
    with socket.socket() as keeper:
        # The store sets it as well: then it may listen there beside a socket that does not.
        keeper.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        keeper.bind(("127.0.0.1", 0))
        port = int(keeper.getsockname()[1])
        if sys.platform != "linux":
            keeper.close()  # elsewhere it would be sent what is meant for the store
        yield port
