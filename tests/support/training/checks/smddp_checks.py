"""Checks for test_train_smddp.py: every call of the interface. `smddp_checks.py FOLDER` runs on each rank,
with `smddp` on the path, and saves its report as FOLDER/rank<r>.pt.
"""

from __future__ import annotations

import atexit
import inspect
import os
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import smdistributed.dataparallel.torch as top
import smdistributed.dataparallel.torch.distributed as dist
import smdistributed.dataparallel.torch.parallel.distributed as long_path
import torch
from smdistributed.dataparallel.torch.parallel import DistributedDataParallel
from torch import nn

NAMES = (
    "is_available",
    "is_initialized",
    "init_process_group",
    "get_world_size",
    "get_rank",
    "get_local_rank",
    "all_reduce",
    "broadcast",
    "all_gather",
    "all_to_all_single",
    "barrier",
)
CALLS: dict[str, Callable[[], object]] = {
    "get_world_size": dist.get_world_size,
    "get_rank": dist.get_rank,
    "get_local_rank": dist.get_local_rank,
    "all_reduce": lambda: dist.all_reduce(torch.ones(1)),
    "broadcast": lambda: dist.broadcast(torch.ones(1)),
    "all_gather": lambda: dist.all_gather([torch.ones(1)], torch.ones(1)),
    "all_to_all_single": lambda: dist.all_to_all_single(torch.ones(1), torch.ones(1)),
    "barrier": dist.barrier,
    "DistributedDataParallel": lambda: DistributedDataParallel(nn.Linear(1, 1)),
}


def signatures() -> dict[str, list[str]]:
    """Return the parameters of every call, as `name` or `name=default`."""
    calls = {name: getattr(dist, name) for name in NAMES} | {
        "DistributedDataParallel": DistributedDataParallel
    }
    return {
        name: [str(p.replace(annotation=p.empty)) for p in inspect.signature(call).parameters.values()]
        for name, call in calls.items()
    }


def without_rank_variable() -> str:
    """Return what is_available and init_process_group do if RANK is not set."""
    rank = os.environ.pop("RANK")
    try:
        return f"{dist.is_available()} {errors({'init': dist.init_process_group})['init']}"
    finally:
        os.environ["RANK"] = rank


def with_local_rank_7() -> tuple[int, int, int]:
    """Return the local rank, by both names, and the rank."""
    local_rank = os.environ["LOCAL_RANK"]
    os.environ["LOCAL_RANK"] = "7"
    try:
        return dist.get_local_rank(), top.get_local_rank(), dist.get_rank()
    finally:
        os.environ["LOCAL_RANK"] = local_rank


def report_whether_left() -> None:
    # In one write: print writes the newline separately, and under torchrun the ranks share the stream.
    sys.stdout.write("left\n" if not dist.is_initialized() else "still in\n")
    sys.stdout.flush()


def other_group(given: object) -> dict[str, Callable[[], object]]:
    one = torch.ones(1)
    return {
        "init_process_group": lambda: dist.init_process_group(group=given),
        "get_world_size": lambda: dist.get_world_size(given),
        "get_rank": lambda: dist.get_rank(given),
        "all_reduce": lambda: dist.all_reduce(one, dist.ReduceOp.SUM, given),
        "broadcast": lambda: dist.broadcast(one, 0, given),
        "all_gather": lambda: dist.all_gather([one], one, given),
        "all_to_all_single": lambda: dist.all_to_all_single(one, one, None, None, given),
        "barrier": lambda: dist.barrier(given),
        "DistributedDataParallel": lambda: DistributedDataParallel(nn.Linear(1, 1), process_group=given),
    }


def errors(calls: dict[str, Callable[[], object]]) -> dict[str, str]:
    """Return what each call raised, as `Type: message`."""
    raised = {}
    for name, call in calls.items():
        try:
            raised[name] = f"returned {call()!r}"
        except Exception as error:
            raised[name] = f"{type(error).__name__}: {error}"
    return raised


def reductions(rank: int) -> dict[str, Any]:
    """Every op on float and integer tensors, synchronous and through its handle."""
    values: dict[str, Any] = {}
    for dtype in (torch.float64, torch.float32, torch.int64):
        for op in (*dist.ReduceOp, None):
            for async_op in (False, True):
                tensor = torch.tensor([rank + 1, -5 * rank, 7], dtype=dtype)
                work = dist.all_reduce(tensor, op, async_op=async_op)
                kind = type(work).__name__
                if work is not None:
                    work.wait()
                    work.wait()  # a second wait must not divide again
                name = op.name if op else "None"
                values[f"{name} {dtype} {async_op}"] = (tensor, kind)
    return values


def inexact_average(rank: int) -> torch.Tensor:
    tensor = torch.tensor([4, -5]) if rank == 0 else torch.zeros(2, dtype=torch.int64)
    dist.all_reduce(tensor, dist.ReduceOp.AVERAGE)
    return tensor


def polled_average(rank: int) -> torch.Tensor:
    tensor = torch.full((1000,), float(rank))
    work = dist.all_reduce(tensor, dist.ReduceOp.AVERAGE, async_op=True)
    while not work.is_completed():
        pass
    return tensor


def random_sum(rank: int) -> dict[str, torch.Tensor]:
    """Return sums whose last bits depend on the order of additions."""
    tensor = torch.randn(10_001, generator=torch.Generator().manual_seed(rank))
    average = tensor.clone()
    dist.all_reduce(tensor)
    dist.all_reduce(average, dist.ReduceOp.AVERAGE)
    return {"sum": tensor, "average": average}


def exchanges(rank: int, world: int) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for async_op in (False, True):
        sent = torch.arange(4.0) + 10 * rank
        works = [dist.broadcast(sent, src=world - 1, async_op=async_op)]
        gathered = [torch.empty(2, dtype=torch.int64) for _ in range(world)]
        works += [dist.all_gather(gathered, torch.tensor([rank, rank * rank]), async_op=async_op)]
        even = torch.empty(2 * world)
        works += [dist.all_to_all_single(even, torch.arange(2.0 * world) + 100 * rank, async_op=async_op)]
        # Rank r sends k + 1 rows to rank k, so rank k takes k + 1 rows from each.
        uneven = torch.empty((rank + 1) * world, 2)
        given = torch.arange(world * (world + 1.0)).reshape(-1, 2) + 1000 * rank
        sizes = [rank + 1] * world, [k + 1 for k in range(world)]
        works += [dist.all_to_all_single(uneven, given, *sizes, async_op=async_op)]
        works += [dist.barrier(async_op=async_op)]
        for work in works:
            if work is not None:
                work.wait()
        values[str(async_op)] = {
            "broadcast": sent,
            "all_gather": gathered,
            "even": even,
            "uneven": uneven,
            "handles": [work is not None for work in works],
        }
    default = torch.tensor([rank + 5])
    dist.broadcast(default)
    return {**values, "default source": default}


def network() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(6, 9), nn.BatchNorm1d(9), nn.ReLU(), nn.Linear(9, 2))


def trained(
    wrap: Callable[[nn.Module], nn.Module], rank: int, *, test_alone: bool = False
) -> dict[str, torch.Tensor]:
    """Return the state after four steps. With `test_alone`, rank 0 evaluates the wrapped module after each of
    them while the others continue."""
    model = wrap(network())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    generator = torch.Generator().manual_seed(40 + rank)
    for _ in range(4):
        optimizer.zero_grad()
        model(torch.randn(5, 6, generator=generator)).square().mean().backward()
        optimizer.step()
        if test_alone and rank == 0:
            model.eval()
            with torch.no_grad():
                model(torch.ones(2, 6))
            model.train()
    return {name: value.clone() for name, value in model.state_dict().items()}


def ddp(rank: int) -> dict[str, Any]:
    options: dict[str, Any] = {"device_ids": [], "process_group": dist.group.WORLD, "bucket_cap_mb": 1}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        states = {
            "ours": trained(DistributedDataParallel, rank),
            "tested alone": trained(DistributedDataParallel, rank, test_alone=True),
            "buffers not sent": trained(
                lambda m: DistributedDataParallel(m, broadcast_buffers=False, **options), rank
            ),
        }
    model = DistributedDataParallel(network(), **options)
    states["theirs"] = trained(nn.parallel.DistributedDataParallel, rank)
    messages = [str(warning.message) for warning in caught if issubclass(warning.category, FutureWarning)]
    return {"states": states, "warnings": messages, "bucket": model.bucket_bytes_cap}


def main(folder: Path) -> None:
    before = {"available": dist.is_available(), "initialized": dist.is_initialized(), "calls": errors(CALLS)}
    no_rank = without_rank_variable()
    atexit.register(report_whether_left)  # runs after what is registered later
    returned = dist.init_process_group(backend="smddp")
    rank, world = dist.get_rank(), dist.get_world_size()
    report = {
        "before": before,
        "without rank": no_rank,
        "signatures": signatures(),
        "same class": DistributedDataParallel is long_path.DistributedDataParallel,
        "returned": returned,
        "initialized": dist.is_initialized(),
        "position": (rank, dist.get_local_rank(), world, dist.get_rank(dist.group.WORLD)),
        "with local rank 7": with_local_rank_7(),
        "top": (top.get_rank(), top.get_local_rank(), top.get_world_size()),
        "backend": torch.distributed.get_backend(),
        "torch's world": dist.get_world_size(torch.distributed.group.WORLD),
        "reductions": reductions(rank),
        "inexact": inexact_average(rank),
        "polled": polled_average(rank),
        "random": random_sum(rank),
        "exchanges": exchanges(rank, world),
        "other group": errors(other_group(torch.distributed.new_group([0]))),
        "bad op": errors({"op": lambda: dist.all_reduce(torch.ones(1), "SUM")}),
        "bad average": errors(
            {"bool": lambda: dist.all_reduce(torch.ones(1, dtype=torch.bool), dist.ReduceOp.AVERAGE)}
        ),
        "ddp": ddp(rank),
    }
    torch.save(report, folder / f"rank{rank}.pt")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
