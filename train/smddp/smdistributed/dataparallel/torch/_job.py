"""How a process joins its job and leaves it: backend, GPU, the end.

It must not know the interface that scripts see: that is distributed.py. SageMaker's interface has no call that
leaves, so the end is arranged here.
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
GRACE = 10.0  # seconds for which a rank that is done waits for the others, so that it tears down nothing they read
_JOINED = (
    "SMDDP_JOINED"  # environment variable: which rank this process, or the one that started it, has become
)


def started() -> bool:
    """Whether the environment says which rank of which job this is, as under torchrun."""
    return dist.is_available() and "RANK" in os.environ and "WORLD_SIZE" in os.environ


def joined() -> bool:
    """Whether this process has a process group."""
    return dist.is_available() and dist.is_initialized()


def join(backend: str | None, *args: Any, **kwargs: Any) -> None:
    """Join the job. `args` and `kwargs` are those of torch.distributed.init_process_group after `backend`.

    Raises RuntimeError where nothing says which rank this is. Does nothing in a process that a rank started and that
    inherits the rank's environment: a data-loading worker that imports the script anew must not become the rank.
    """
    if not (args or kwargs.keys() & {"init_method", "store", "rank"} or started()):
        raise RuntimeError(
            "this is not a distributed job: RANK and WORLD_SIZE are not set. Start the script with "
            "`torchrun --nproc-per-node=gpu SCRIPT`, or call init_process_group() only where is_available() is True"
        )
    identity = ":".join(os.environ.get(name, "") for name in ("RANK", "MASTER_ADDR", "MASTER_PORT"))
    if os.environ.get(_JOINED, "").startswith(f"{identity} ") and not _joined_here():
        return
    chosen = pick_backend() if backend in (None, "smddp") else backend
    device = pin()
    if chosen == "nccl" and device is not None:
        kwargs.setdefault("device_id", device)
    dist.init_process_group(chosen, *args, **kwargs)
    if "RANK" in os.environ:
        os.environ[_JOINED] = f"{identity} {os.getpid()}"
    atexit.register(leave)


def pick_backend() -> str:
    """The backend's name: `smddp` where a real installation's backend can be imported, else `nccl` where there is a
    GPU, else `gloo`. An installation that cannot be imported is warned of."""
    try:
        importlib.import_module(REAL_BACKEND)
    except ImportError as error:
        if error.name != REAL_BACKEND:
            warnings.warn(
                f"backend smddp is left alone, because it cannot be imported: {error}", stacklevel=4
            )
    else:
        return "smddp"
    return "nccl" if torch.cuda.is_available() and dist.is_nccl_available() else "gloo"


def pin() -> torch.device | None:
    """Make this rank's GPU the current one, and return it; None where there is none of that number.

    Scripts wrap their model before they call torch.cuda.set_device, as the guide's sample does; without this all
    ranks of a node would meet on GPU 0, which NCCL refuses.
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
    """At the end of the process: wait a moment for the other ranks, then drop the connections.

    After an exception it does neither: the others must learn of it at once, and they do when the connections break.
    """
    if not joined() or getattr(sys, "last_value", None) is not None:
        return
    if _all_done():
        dist.destroy_process_group()


def _all_done() -> bool:
    """Whether every rank has come this far within the grace. Asked through the store, not by a collective
    operation: a rank that ends early by sys.exit must not take part in one that the others never start."""
    store = dist.distributed_c10d._get_default_store()
    deadline = time.monotonic() + GRACE
    try:
        done = store.add("smddp/done", 1)
        while done < dist.get_world_size() and time.monotonic() < deadline:
            time.sleep(0.02)
            done = store.add("smddp/done", 0)
    except RuntimeError:  # the process that holds the store has gone
        return False
    return bool(done >= dist.get_world_size())


def _joined_here() -> bool:
    return os.environ[_JOINED].endswith(f" {os.getpid()}")
