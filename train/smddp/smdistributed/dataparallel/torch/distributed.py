"""`smdistributed.dataparallel.torch.distributed`: SageMaker's version 1 calls, over torch.distributed.

Names, orders and defaults of parameters are those of SageMaker's guide, so that scripts written for it run as they
are. It must not know how a process joins its job (_job.py), and imports nothing but torch. docs/smddp.md says where
it departs from the guide.
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
    """The process groups there are: all ranks of the job, and no other."""

    WORLD = "WORLD"


class ReduceOp(enum.Enum):
    """How all_reduce combines the tensors of the ranks."""

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


class _Average:
    """The handle of an asynchronous average: a sum that is divided once it has been waited for."""

    def __init__(self, work: Any, divide: Callable[[], object]) -> None:
        self._work = work
        self._divide: Callable[[], object] | None = divide

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait until the tensor holds the average. Returns True; raises as the handle of torch.distributed does."""
        done = bool(self._work.wait() if timeout is None else self._work.wait(timeout))
        self._finish()
        return done

    def is_completed(self) -> bool:
        """Whether the tensor holds the average."""
        if not self._work.is_completed():
            return False
        self._finish()
        return True

    def _finish(self) -> None:
        divide, self._divide = self._divide, None
        if divide is not None:
            divide()


def is_available() -> bool:
    """Whether the script was started as a distributed job, as by torchrun: RANK and WORLD_SIZE are set."""
    return _job.started() or _job.joined()


def init_process_group(*args: Any, **kwargs: Any) -> None:
    """Join the job; to be called before anything else but is_available() and is_initialized().

    Nothing needs to be given. What is given goes to torch.distributed.init_process_group, with two exceptions:
    `backend` None or "smddp" means the best one here (smddp, nccl, gloo, in this order), and `group` may be WORLD.
    Raises RuntimeError where the script was not started as a distributed job, ValueError for another group.
    """
    check_group(kwargs.pop("group", None))
    backend = args[0] if args else kwargs.pop("backend", None)
    _job.join(backend, *args[1:], **kwargs)


def is_initialized() -> bool:
    """Whether this process has joined its job."""
    return _job.joined()


def get_world_size(group: object = group.WORLD) -> int:
    """The number of ranks in the job, over all nodes."""
    check(group)
    return _torch.get_world_size()


def get_rank(group: object = group.WORLD) -> int:
    """The number of this process among all of the job, from 0; not that of its node."""
    check(group)
    return _torch.get_rank()


def get_local_rank() -> int:
    """The number of this process among those of its node, from 0. Raises RuntimeError where LOCAL_RANK is not set."""
    check()
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
    """Combine `tensor` over all ranks, in place; afterwards it is the same to the bit on every rank.

    None means SUM. AVERAGE is the sum divided by the number of ranks; of integers, rounded toward zero. Returns a
    work handle if `async_op`, else None; with AVERAGE the tensor is right once its wait() has returned, or its
    is_completed() has returned True. Raises ValueError for another op, or for AVERAGE of booleans.
    """
    check(group)
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

    # Not torch's AVG: gloo refuses it for integers, older gloo for all, and the guide promises NCCL's sum.
    work = _torch.all_reduce(tensor, op=_OPS[op], async_op=async_op)
    if async_op:
        return _Average(work, divide)
    divide()
    return None


def broadcast(tensor: Tensor, src: int = 0, group: object = group.WORLD, async_op: bool = False) -> Any:
    """Give every rank the values of `tensor` on rank `src`, in place; it has the same number of elements on all.
    Returns a work handle if `async_op`, else None."""
    check(group)
    return _torch.broadcast(tensor, src=src, async_op=async_op)


def all_gather(
    tensor_list: list[Tensor], tensor: Tensor, group: object = group.WORLD, async_op: bool = False
) -> Any:
    """Put `tensor` of every rank into `tensor_list`, in rank order; it holds one tensor of that size for each.
    Returns a work handle if `async_op`, else None."""
    check(group)
    return _torch.all_gather(tensor_list, tensor, async_op=async_op)


def all_to_all_single(
    output_t: Tensor,
    input_t: Tensor,
    output_split_sizes: list[int] | None = None,
    input_split_sizes: list[int] | None = None,
    group: object = group.WORLD,
    async_op: bool = False,
) -> Any:
    """Send the k-th part of `input_t`, cut along dimension 0, to rank k, and put what comes into `output_t`, in rank
    order. Without sizes the parts are equal. Returns a work handle if `async_op`, else None."""
    check(group)
    return _torch.all_to_all_single(
        output_t, input_t, output_split_sizes, input_split_sizes, async_op=async_op
    )


def barrier(group: object = group.WORLD, async_op: bool = False) -> Any:
    """Wait until every rank has come here. Returns a work handle if `async_op`, else None."""
    check(group)
    return _torch.barrier(async_op=async_op)


def check(given: object = None) -> None:
    """Raise RuntimeError before init_process_group(), ValueError for a group other than WORLD."""
    if not is_initialized():
        raise RuntimeError(
            "the process group is missing: call smdistributed.dataparallel.torch.distributed."
            "init_process_group() first"
        )
    check_group(given)


def check_group(given: object) -> None:
    """Raise ValueError unless `given` is WORLD, or None or torch.distributed's own world, which mean the same."""
    if given is None or given is group.WORLD or (_job.joined() and given is _torch.group.WORLD):
        return
    raise ValueError(
        f"group {given!r}: only smdistributed.dataparallel.torch.distributed.group.WORLD is supported"
    )
