"""Joins and leaves the job's process group, and recognizes the errors that mean a lost connection."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from train.config import Config
from train.distributed.communicator import Communicator
from train.distributed.device import select_device
from train.distributed.rank_info import RankInfo
from train.errors import TrainError, UsageError, note_time

ONE_DEVICE = ("ddp", "fsdp", "hsdp", "tensor")  # modes in which a rank has one device and talks to all others


@contextmanager
def join(
    config: Config, info: RankInfo, *, on_lost: Callable[[RuntimeError], object] | None = None
) -> Iterator[Communicator]:
    """Be a member of the process group inside the block, with a barrier before a clean end.

    `on_lost` ends the process if another rank has died and gloo leaves this one waiting: see peer_monitor.py.
    Raises `UsageError` for an address or a backend that cannot work, `TrainError` where the rendezvous fails
    or the connection to the other ranks is lost.
    """
    device = select_device(config, info)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    comm = Communicator(info=info, device=device)
    if not info.distributed and config.parallel.parallel in ("ddp", "pipeline"):
        yield comm
        return
    backend = (
        config.precision.backend
        if config.precision.backend != "auto"
        else ("nccl" if device.type == "cuda" else "gloo")
    )
    if backend == "nccl" and device.type == "cpu":
        raise UsageError("--backend nccl needs GPUs: use --backend gloo or auto")
    _init_process_group(config, info, device, backend)
    clean = False
    try:
        if backend == "gloo" and on_lost is not None and info.world_size > 1:
            comm.monitor.on_lost = on_lost
            comm.monitor.start(rank=info.rank, world_size=info.world_size)
        yield comm
        # Without it a rank that finishes early closes connections from which slower ranks still read: they
        # failed because of that in 3 of 7 finished trainings over two nodes.
        dist.barrier()
        comm.monitor.announce_exit()
        clean = True
    except BaseException as error:
        note_time(error)
        if isinstance(error, RuntimeError):
            raise_connection_lost(error)
        raise
    finally:
        comm.monitor.stop()
        # After a failure NCCL would wait here for operations that the other ranks never join; the process is
        # about to exit and its connections close with it.
        if clean or backend == "gloo":
            dist.destroy_process_group()


def _init_process_group(config: Config, info: RankInfo, device: torch.device, backend: str) -> None:
    timeout = timedelta(seconds=config.rendezvous.timeout)
    try:
        dist.init_process_group(
            backend,
            rank=info.rank,
            world_size=info.world_size,
            timeout=timeout,
            # Bound to one device, NCCL refuses tensors on the other one of a two-device pipeline; with one
            # stage per rank, neighbours get a connection of their own only if none was made for all ranks
            # ahead of time.
            device_id=device if backend == "nccl" and config.parallel.parallel in ONE_DEVICE else None,
            **_rendezvous(config, info, timeout),
        )
    except ValueError as error:
        raise UsageError(
            f"invalid rendezvous address ({error}): check --init-method, MASTER_ADDR and MASTER_PORT"
        ) from error
    except RuntimeError as error:
        advice = "check that all of them were started with the same address and can reach it"
        if "EADDRINUSE" in str(error):
            advice = "the port is in use: stop the earlier run, or give all ranks another port"
        raise TrainError(
            f"rendezvous of {info.world_size} ranks failed ({_first_line(error)}); {advice}"
        ) from error


def _rendezvous(config: Config, info: RankInfo, timeout: timedelta) -> dict[str, Any]:
    """Return the arguments of init_process_group that say how the ranks find each other."""
    if not info.distributed:
        # A single process started by hand is a group of one, for the modes that need a process group.
        return {"store": dist.HashStore()}
    scheme, _, path = config.rendezvous.init_method.partition("://")
    if scheme == "file" and not Path(path).parent.is_dir():
        # Each rank would retry for minutes, whatever the timeout.
        raise UsageError(f"--init-method {config.rendezvous.init_method}: the folder does not exist")
    if (
        not info.restarts
        or os.environ.get("GROUP_WORLD_SIZE") != "1"
        or config.rendezvous.init_method != "env://"
    ):
        return {"init_method": config.rendezvous.init_method}
    # torchrun uses one store for all restarts (pytorch#135712): a rank that looks too early would find the
    # addresses of ranks that have exited, and hang or fail (2 of 3 restarts, torch 2.15). So each restart
    # gets a prefix of its own. Only within one node: agents of several nodes do not count restarts alike, and
    # TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 has to be set for them.
    store, _, _ = next(
        dist.rendezvous(config.rendezvous.init_method, info.rank, info.world_size, timeout=timeout)
    )
    return {"store": dist.PrefixStore(f"restart{info.restarts}", store)}


def connection_lost(error: RuntimeError) -> str | None:
    """Return a description of `error` if it means that another rank has died or hangs, else None.

    gloo's errors have no type of their own; they contain the path of gloo's source.
    """
    if not isinstance(error, dist.DistError) and "gloo" not in str(error):
        return None
    return f"lost connection to the other ranks ({_first_line(error)})"


def raise_connection_lost(error: RuntimeError) -> NoReturn:
    """Raise `TrainError` if `error` means that another rank has died, else `error`."""
    problem = connection_lost(error)
    if problem is None:
        raise error
    lost = TrainError(problem)
    lost.follows = True  # that rank, or its node, is the cause
    raise lost from error


def _first_line(error: RuntimeError) -> str:
    """Return the first line without the location in the library's source and its guesses at the cause."""
    first = (str(error).splitlines() or [type(error).__name__])[0]
    return re.sub(r"^\[[^\]]*\] ", "", first).partition(". This ")[0].rstrip(".")
