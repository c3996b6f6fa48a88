"""`smdistributed.dataparallel.torch.distributed`: the calls of SageMaker's version 1, over torch.distributed.

Names, order and defaults of the parameters are SageMaker's, so that scripts written for it run unchanged.
Imports nothing but torch. docs/smddp.md lists the differences from SageMaker's guide.
"""

from __future__ import annotations

import enum
import os
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as _torch
from torch import Tensor

from smdistributed.dataparallel.torch import _job

__all__ = [
    "ReduceOp",
    "all_gather",
    "all_reduce",
    "all_to_all_single",
    "barrier",
    "broadcast",
    "get_local_rank",
    "get_rank",
    "get_world_size",
    "group",
    "init_process_group",
    "is_available",
    "is_initialized",
]


class group(enum.Enum):  # noqa: N801  the name that scripts use
    """The available process groups: only the one of all ranks."""

    WORLD = "WORLD"


class ReduceOp(enum.Enum):
    """The operations of all_reduce."""

    AVERAGE = "AVERAGE"
    SUM = "SUM"
    MIN = "MIN"
    MAX = "MAX"


_OPS = {
    ReduceOp.AVERAGE: _torch.ReduceOp.SUM,
    ReduceOp.SUM: _torch.ReduceOp.SUM,
    ReduceOp.MIN: _torch.ReduceOp.MIN,
    ReduceOp.MAX: _torch.ReduceOp.MAX,
}


class _AverageWork:
    """The work handle of an asynchronous average: a sum that is divided once the caller has waited for it."""

    def __init__(self, work: Any, divide: Callable[[], object]) -> None:
        self._work = work
        self._divide: Callable[[], object] | None = divide

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait until the tensor holds the average. Returns True; raises what torch.distributed's handle
        raises."""
        done = bool(self._work.wait() if timeout is None else self._work.wait(timeout))
        self._finish()
        return done

    def is_completed(self) -> bool:
        """Return whether the tensor holds the average."""
        if not self._work.is_completed():
            return False
        self._finish()
        return True

    def _finish(self) -> None:
        divide, self._divide = self._divide, None
        if divide is not None:
            divide()


def is_available() -> bool:
    """Return whether the script was started as a distributed job, for example by torchrun: RANK and
    WORLD_SIZE are set."""
    return _job.is_started() or _job.is_joined()


def init_process_group(*args: Any, **kwargs: Any) -> None:
    """Join the job. Call it before anything else except is_available() and is_initialized().

    All arguments are optional. They are passed to torch.distributed.init_process_group, with two exceptions:
    `backend` None or "smddp" selects the best available one (smddp, nccl, gloo, in this order), and `group`
    may be WORLD. Raises RuntimeError if the script was not started as a distributed job, ValueError for
    another group.
    """
    check_group(kwargs.pop("group", None))
    backend = args[0] if args else kwargs.pop("backend", None)
    _job.join(backend, *args[1:], **kwargs)


def is_initialized() -> bool:
    """Return whether this process has joined its job."""
    return _job.is_joined()


def get_world_size(group: object = group.WORLD) -> int:
    """Return the number of ranks in the job, over all nodes."""
    check_call(group)
    return int(_torch.get_world_size())


def get_rank(group: object = group.WORLD) -> int:
    """Return the rank of this process in the job, from 0; not that of its node."""
    check_call(group)
    return _torch.get_rank()


def get_local_rank() -> int:
    """Return the rank of this process on its node, from 0. Raises RuntimeError if LOCAL_RANK is not set."""
    check_call()
    text = os.environ.get("LOCAL_RANK", "")
    if not text.isdecimal():
        raise RuntimeError("LOCAL_RANK is not set to a number: start the script with torchrun, or set it")
    return int(text)


def all_reduce(
    tensor: Tensor,
    op: ReduceOp | None = ReduceOp.SUM,
    group: object = group.WORLD,
    async_op: bool = False,
) -> Any:
    """Reduce `tensor` over all ranks, in place; afterwards it is bitwise identical on every rank.

    None means SUM. AVERAGE is the sum divided by the number of ranks, rounded toward zero for integers.
    Returns a work handle if `async_op`, else None; with AVERAGE the tensor is valid once its wait() has
    returned, or its is_completed() has returned True. Raises ValueError for another op, or for AVERAGE of
    booleans.
    """
    check_call(group)
    op = ReduceOp.SUM if op is None else op
    if op not in _OPS:
        raise ValueError(f"op {op!r}: use one of ReduceOp.{', ReduceOp.'.join(ReduceOp.__members__)}")
    if op is not ReduceOp.AVERAGE:
        return _torch.all_reduce(tensor, op=_OPS[op], async_op=async_op)
    if tensor.dtype == torch.bool:
        raise ValueError("booleans have no average: convert the tensor to a number type first")
    rounding = None if tensor.is_floating_point() or tensor.is_complex() else "trunc"
    world = _torch.get_world_size()

    def divide() -> Tensor:
        with torch.no_grad():
            return tensor.div_(world, rounding_mode=rounding)

    # Not torch's AVG: gloo refuses it for integers, and older versions of gloo for every type.
    work = _torch.all_reduce(tensor, op=_OPS[op], async_op=async_op)
    if async_op:
        return _AverageWork(work, divide)
    divide()
    return None


def broadcast(tensor: Tensor, src: int = 0, group: object = group.WORLD, async_op: bool = False) -> Any:
    """Copy `tensor` of rank `src` to all ranks, in place; it has the same number of elements on every rank.

    Returns a work handle if `async_op`, else None.
    """
    check_call(group)
    return _torch.broadcast(tensor, src=src, async_op=async_op)


def all_gather(
    tensor_list: list[Tensor], tensor: Tensor, group: object = group.WORLD, async_op: bool = False
) -> Any:
    """Gather `tensor` of every rank into `tensor_list`, in rank order; it holds one tensor of that size per
    rank.

    Returns a work handle if `async_op`, else None.
    """
    check_call(group)
    return _torch.all_gather(tensor_list, tensor, async_op=async_op)


def all_to_all_single(
    output_t: Tensor,
    input_t: Tensor,
    output_split_sizes: list[int] | None = None,
    input_split_sizes: list[int] | None = None,
    group: object = group.WORLD,
    async_op: bool = False,
) -> Any:
    """Send the k-th part of `input_t`, split along dimension 0, to rank k, and receive into `output_t` in
    rank order.

    Without split sizes the parts are equal. Returns a work handle if `async_op`, else None.
    """
    check_call(group)
    return _torch.all_to_all_single(
        output_t, input_t, output_split_sizes, input_split_sizes, async_op=async_op
    )


def barrier(group: object = group.WORLD, async_op: bool = False) -> Any:
    """Wait until every rank has reached this call. Returns a work handle if `async_op`, else None."""
    check_call(group)
    return _torch.barrier(async_op=async_op)


def check_call(given: object = None) -> None:
    """Raise RuntimeError before init_process_group(), ValueError for a group other than WORLD."""
    if not is_initialized():
        raise RuntimeError(
            "there is no process group: call smdistributed.dataparallel.torch.distributed."
            "init_process_group() first"
        )
    check_group(given)


def check_group(given: object) -> None:
    """Raise ValueError unless `given` is WORLD, or None or torch.distributed's own world, which mean the
    same."""
    if given is None or given is group.WORLD or (_job.is_joined() and given is _torch.group.WORLD):
        return
    raise ValueError(
        f"group {given!r}: only smdistributed.dataparallel.torch.distributed.group.WORLD is supported"
    )
