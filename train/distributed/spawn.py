"""--spawn: ranks without torchrun, one process each on this machine, started by torch.multiprocessing."""

from __future__ import annotations

import dataclasses
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.process import BaseProcess
from typing import Any

import torch.multiprocessing as mp

from train import signals
from train.config import Config
from train.process_exit import exit_process

POLL = 0.2  # seconds until SIGTERM is forwarded
GRACE = 30.0  # seconds that the other ranks have to exit after one has; torch kills them after twice that
SIGINT_GRACE = 5.0  # seconds that the ranks have to exit after Ctrl-C, before they get another SIGINT


def spawn(config: Config, work: Callable[[Config], int]) -> int:
    """Run `work`, which can be pickled, on as many ranks as --spawn says until they exit. Returns 0, or the
    exit code of the first rank that failed."""
    world_size = config.rendezvous.spawn
    config = _with(config, spawn=0, world_size=world_size)
    try:
        with signals.handle_stop_signals() as stop, reserved_port() as port:
            if config.rendezvous.init_method == "env://":
                config = _with(config, init_method=f"tcp://127.0.0.1:{port}")
            # A rank that gets SIGINT while it imports torch would print a traceback of the import.
            with signals.blocked(signal.SIGINT):
                ranks = mp.spawn(_run_rank, args=(config, work), nprocs=world_size, join=False)
            return _wait(ranks, stop)
    except mp.ProcessExitedException as error:
        # The rank has reported why. A signal number becomes the exit code that a shell would report.
        return error.exit_code if error.exit_code > 0 else 128 - error.exit_code
    except KeyboardInterrupt:
        _interrupt(mp.active_children())
        return 130


def _wait(ranks: mp.ProcessContext, stop: signals.StopRequest) -> int:
    """Wait for the ranks, and forward a stop request to them. Returns 0."""
    forwarded = False
    while not ranks.join(timeout=POLL, grace_period=GRACE):
        if stop.received and not forwarded:
            forwarded = True
            for process in ranks.processes:
                process.terminate()
    return 0


def _interrupt(ranks: Sequence[BaseProcess]) -> None:
    """Wait for the ranks, which usually got Ctrl-C from the terminal, too. Send SIGINT to those that did not,
    because only this process was signalled."""
    deadline = time.monotonic() + SIGINT_GRACE
    for process in ranks:
        process.join(max(0.0, deadline - time.monotonic()))
        if process.is_alive() and process.pid is not None:
            os.kill(process.pid, signal.SIGINT)


def _with(config: Config, **flags: Any) -> Config:
    return dataclasses.replace(config, rendezvous=dataclasses.replace(config.rendezvous, **flags))


def _run_rank(rank: int, config: Config, work: Callable[[Config], int]) -> None:
    signals.exit_silently_on_sigint()
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])
    exit_process(work(dataclasses.replace(config, position=(rank, rank))))


@contextmanager
def reserved_port() -> Iterator[int]:
    """Yield a loopback TCP port for the store of rank 0. On Linux no other program gets it in the meantime:
    rank 0 has to import torch before it listens there."""
    with socket.socket() as holder:
        # The store sets this option, too: then it may listen there beside a socket that does not listen.
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind(("127.0.0.1", 0))
        port = int(holder.getsockname()[1])
        if sys.platform != "linux":
            holder.close()  # elsewhere it would receive connections meant for the store
        yield port
