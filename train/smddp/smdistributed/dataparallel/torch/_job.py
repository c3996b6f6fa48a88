"""Joins and leaves the process group: backend, GPU, and the end of the process.

SageMaker's interface has no call that leaves the job, so leaving happens at exit.
"""

from __future__ import annotations

import atexit
import importlib
import os
import sys
import time
import warnings
from typing import Any

import torch
import torch.distributed as dist

REAL_BACKEND = "smdistributed.dataparallel.torch.torch_smddp"
GRACE = 10.0  # seconds that a finished rank waits for the others before it closes its connections
_JOINED = "SMDDP_JOINED"  # environment variable: the rank that this process, or its parent, has joined as


def is_started() -> bool:
    """Return whether the environment sets the rank of this process, as torchrun does."""
    return dist.is_available() and "RANK" in os.environ and "WORLD_SIZE" in os.environ


def is_joined() -> bool:
    """Return whether this process has a process group."""
    return dist.is_available() and dist.is_initialized()


def join(backend: str | None, *args: Any, **kwargs: Any) -> None:
    """Join the job. `args` and `kwargs` are those of torch.distributed.init_process_group after `backend`.

    Raises RuntimeError if the rank of this process is unknown. Does nothing in a child process of a rank,
    which inherits the rank's environment: a data-loading worker that imports the script again must not join
    as the rank.
    """
    if not (args or kwargs.keys() & {"init_method", "store", "rank"} or is_started()):
        raise RuntimeError(
            "this is not a distributed job: RANK and WORLD_SIZE are not set. Start the script with "
            "`torchrun --nproc-per-node=gpu SCRIPT`, or call init_process_group() only if is_available() is "
            "True"
        )
    identity = ":".join(os.environ.get(name, "") for name in ("RANK", "MASTER_ADDR", "MASTER_PORT"))
    if os.environ.get(_JOINED, "").startswith(f"{identity} ") and not _joined_by_this_process():
        return
    chosen = select_backend() if backend in (None, "smddp") else backend
    device = select_gpu()
    if chosen == "nccl" and device is not None:
        kwargs.setdefault("device_id", device)
    dist.init_process_group(chosen, *args, **kwargs)
    if "RANK" in os.environ:
        os.environ[_JOINED] = f"{identity} {os.getpid()}"
    atexit.register(leave)


def select_backend() -> str:
    """Return `smddp` if the backend of a real installation can be imported, else `nccl` if there is a GPU,
    else `gloo`. Warns about an installation that cannot be imported."""
    try:
        importlib.import_module(REAL_BACKEND)
    except ImportError as error:
        if error.name != REAL_BACKEND:
            warnings.warn(f"backend smddp is not used because it cannot be imported: {error}", stacklevel=4)
    else:
        return "smddp"
    return "nccl" if torch.cuda.is_available() and dist.is_nccl_available() else "gloo"


def select_gpu() -> torch.device | None:
    """Make this rank's GPU the current device and return it; None if it has none.

    Scripts may wrap their model before they call torch.cuda.set_device; without this all ranks of a node
    would use GPU 0, which NCCL refuses.
    """
    if not torch.cuda.is_available():
        return None
    # A launcher may show each rank its own GPU only; then it is number 0 whatever the local rank.
    index = 0 if torch.cuda.device_count() == 1 else int(os.environ.get("LOCAL_RANK", "-1"))
    if not 0 <= index < torch.cuda.device_count():
        return None
    torch.cuda.set_device(index)
    return torch.device("cuda", index)


def leave() -> None:
    """Wait briefly for the other ranks at the end of the process, then close the connections.

    After an exception it does neither: the others must notice at once, and they do when the connections
    break.
    """
    if not is_joined() or getattr(sys, "last_value", None) is not None:
        return
    if _all_ranks_done():
        dist.destroy_process_group()


def _all_ranks_done() -> bool:
    """Return whether every rank reaches this point within the grace period.

    Through the store, not by a collective: a rank that exits early with sys.exit must not take part in a
    collective that the others never start.
    """
    store = dist.distributed_c10d._get_default_store()
    deadline = time.monotonic() + GRACE
    try:
        done = store.add("smddp/done", 1)
        while done < dist.get_world_size() and time.monotonic() < deadline:
            time.sleep(0.02)
            done = store.add("smddp/done", 0)
    except RuntimeError:  # the process that hosts the store has exited
        return False
    return bool(done >= dist.get_world_size())


def _joined_by_this_process() -> bool:
    return os.environ[_JOINED].endswith(f" {os.getpid()}")
