"""The collective operations that training needs, over the job's process group.

All of them work alike with one process and no process group: then a sum is the value itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from train.distributed.peer_monitor import PeerMonitor
from train.distributed.rank_info import RankInfo
from train.errors import TrainError, UsageError, following, note_time

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Communicator:
    """A rank with its device, once the process group is up. Every rank must call the same methods in the same
    order."""

    info: RankInfo
    device: torch.device
    monitor: PeerMonitor = field(default_factory=PeerMonitor)
    group: dist.ProcessGroup | None = None  # None: the default group

    @property
    def rank(self) -> int:
        return self.info.rank

    @property
    def local_rank(self) -> int:
        return self.info.local_rank

    @property
    def world_size(self) -> int:
        return self.info.world_size

    @property
    def is_main(self) -> bool:
        """Whether this is rank 0, the only one that prints and writes metrics."""
        return self.info.rank == 0

    def writes(self, *, per_node: bool) -> bool:
        """Whether this rank writes snapshots: rank 0, or local rank 0 of every node."""
        return self.info.local_rank == 0 if per_node else self.info.rank == 0

    def seed(self, number: int) -> None:
        """Seed the random number generators of this rank's devices. Not collective."""
        # Not torch.manual_seed, which walks through every kind of device: half a millisecond where CUDA is
        # built in but not used.
        torch.default_generator.manual_seed(number)
        if self.device.type == "cuda":
            torch.cuda.manual_seed_all(number)  # --parallel pipeline also computes on a second GPU

    def sum(self, values: Tensor) -> Tensor:
        """Return the sum of `values` over all ranks as a new tensor, the same on every rank."""
        total = values.clone()
        if self.info.distributed:
            dist.all_reduce(total, group=self.group)
        return total

    def any(self, flag: bool) -> bool:
        """Return whether `flag` is set on at least one rank."""
        return bool(self.sum(torch.tensor(int(flag), device=self.device)).item())

    def count_async(self, flag: bool) -> Callable[[], Tensor]:
        """Start to count, while the rank computes, on how many ranks `flag` is set. The function returned
        gives the number as a float64 on the device, without waiting for a GPU."""
        # Not torch.tensor: to copy a number to a GPU, the host waits for all that is queued there.
        total = torch.full((), float(flag), dtype=torch.float64, device=self.device)
        if not self.info.distributed:
            return lambda: total
        work = dist.all_reduce(total, async_op=True, group=self.group)
        assert work is not None

        def result() -> Tensor:
            work.wait()
            return total

        return result

    def in_background(self) -> Communicator:
        """Return a communicator of the same ranks for another thread, whose operations may overlap with those
        of this one. Collective; its tensors are on the CPU."""
        group: Any = dist.new_group(backend="gloo") if self.info.distributed else None
        return Communicator(info=self.info, device=torch.device("cpu"), group=group)

    def gather(self, number: int) -> list[int]:
        """Return the number of every rank, in rank order."""
        numbers = torch.zeros(self.world_size, dtype=torch.int64, device=self.device)
        numbers[self.rank] = number
        return self.sum(numbers).tolist()

    def broadcast_bytes(self, blob: bytes | None, *, source: int) -> bytes:
        """Return on every rank the bytes that rank `source` holds. The other ranks pass None."""
        if not self.info.distributed:
            return blob or b""
        length = torch.tensor(len(blob or b""), device=self.device)
        dist.broadcast(length, src=source, group=self.group)
        payload = torch.empty(int(length.item()), dtype=torch.uint8, device=self.device)
        if self.rank == source:
            payload.copy_(torch.frombuffer(bytearray(blob or b""), dtype=torch.uint8))
        dist.broadcast(payload, src=source, group=self.group)
        return payload.cpu().numpy().tobytes()

    def broadcast(self, tensors: Iterable[Tensor]) -> None:
        """Replace the values of tensors, which are on this rank's device, by those of rank 0."""
        if self.info.distributed:
            for tensor in tensors:
                dist.broadcast(tensor.detach(), src=0, group=self.group)

    def local_rank_0_first(self, work: Callable[[], T], *, what: str) -> T:
        """Run `work` on local rank 0 of each node, then on the other ranks, and return its result.

        Raises on every rank if it raises on one, so that none waits for a rank that has exited.
        """
        results: list[T] = []
        for first in (True, False):
            error: Exception | None = None
            if (self.local_rank == 0) is first:
                try:
                    with self.monitor.paused():
                        results.append(work())
                except Exception as problem:
                    note_time(problem)
                    error = problem
            if self.any(error is not None):
                raise error or following(UsageError, what)
        return results[0]

    def run_together(self, work: Callable[[], object], *, what: str) -> None:
        """Run `work`, which may be a no-op on most ranks. Raises `TrainError` on every rank if it raises one
        on any, or `UsageError` alike, so that none waits for a rank that has exited or continues alone."""
        problem: TrainError | None = None
        try:
            with self.monitor.paused():
                work()
        except TrainError as error:
            note_time(error)
            problem = error
        code = max(self.gather(problem.exit_code if problem is not None else 0))
        if code:
            kind = UsageError if code == UsageError.exit_code else TrainError
            raise problem or following(kind, what)
