"""A job that does nothing: noticed when every node is idle, its stacks gathered, the cause put into a
sentence.

Each agent sends in its heartbeats for how long its ranks have been idle. The first node declares the stall;
all nodes read the stacks of their ranks, and send what they found.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Collection, Iterable
from collections.abc import Set as AbstractSet
from dataclasses import replace
from pathlib import Path
from typing import Callable, NamedTuple, Optional

from agent.jobs import job_record, phases, rank_records
from agent.node import kernel, store
from agent.ranks.causes import end_of_log
from agent.watch import stacks
from agent.watch.gpus import Gpus
from agent.watch.usage import ResourceUsage
from cloudddp.agent.protocol.codec import MAX_TEXT
from cloudddp.agent.protocol.gang import Kind, Observed, PeerMessage
from cloudddp.agent.protocol.jobs import MAX_AGO, Cause, Failure
from cloudddp.agent.protocol.progress import ToleratedStall
from cloudddp.agent.protocol.readings import GpuReading
from cloudddp.agent.protocol.stacks import StacksReply, elsewhere, summary

Send = Callable[[PeerMessage], None]
GATHER_SECONDS = 120.0  # for all nodes to report their stacks
LONGEST_INTERVAL = 10.0  # seconds between two looks
LOOKS = 20  # in the time after which a job is stalled
# Until a rank runs, its launcher imports torch and waits for the other nodes, for up to ten minutes: that is
# no stall of ranks.
START_SECONDS = 900.0
# Of one core, for a rank and its children: the threads of NCCL, gloo and data loaders that only wait take
# less than 1 %.
CPU_SHARE = 0.05
IO_RATE = 100_000  # bytes per second that a rank reads and writes: a download, or a snapshot that is saved
SPINNING = 1.5  # cores that a rank may use while it waits for a GPU: cudaStreamSynchronize spins on one
BUSY_GPU = 5  # percent
# The kernel of a collective polls a flag until the other ranks arrive. While it hangs, nvidia-smi shows 100 %
# utilization (a kernel runs) and almost none of the memory (it moves no data).
HUNG_GPU, HUNG_MEMORY = 99, 1


class GpuLoad(NamedTuple):
    active: bool
    hung: bool


def gpu_load(gpus: Iterable[GpuReading]) -> GpuLoad:
    """Return what utilizations say; of no GPU, that there is no load. Pure."""
    loads = [(one.utilization or 0, one.memory_utilization) for one in gpus]
    busy = [(gpu, memory) for gpu, memory in loads if gpu > BUSY_GPU]
    hung = [gpu for gpu, memory in busy if gpu >= HUNG_GPU and memory is not None and memory <= HUNG_MEMORY]
    return GpuLoad(active=len(hung) < len(busy), hung=0 < len(hung) == len(busy))


class Activity:
    """The last activity of this node's ranks, by the monotonic clock."""

    def __init__(self, folder: Path, limit: float, gpus: Gpus) -> None:
        """`limit`: seconds without activity after which the job is stalled; 0 where nobody wants to know."""
        self._folder, self._gpus = folder, gpus
        self._interval = min(limit / LOOKS, LONGEST_INTERVAL)
        self._began = self._active_at = self._looked_at = time.monotonic()
        self._has_ranks = False
        # Of an attempt before this one.
        self._earlier = set(rank_records.read(folder)) if limit > 0 else set()
        self._files: list[tuple[str, int, int]] = []
        self._use = ResourceUsage()

    def idle(self) -> float:
        """Return for how many seconds the ranks have done nothing."""
        now = time.monotonic()
        if not self._interval:
            return 0.0
        if now - self._looked_at >= self._interval:
            self._look(now)
        return now - self._active_at

    def forget_output(self) -> None:
        """Do not take for activity what was written into the logs until now: a note of the agent's own."""
        self._files = self._list_files()

    def _look(self, now: float) -> None:
        seconds, self._looked_at = now - self._looked_at, now
        files = self._list_files()
        busy, spins = self._use_of_cpu()
        changed, self._files = files != self._files, files
        if seconds > LOOKS // 2 * self._interval + 1.0:
            changed = True  # this process was frozen, and the ranks probably with it: that is no stall
        is_starting = not self._has_ranks and now - self._began < START_SECONDS
        if changed or busy or is_starting:
            self._active_at = now
            return
        load = gpu_load(self._gpus.read())
        if load.active or (spins and not load.hung):
            self._active_at = now

    def _list_files(self) -> list[tuple[str, int, int]]:
        """Return size and time of the logs, of the training status and of the ranks' step reports."""
        logs = phases.rank_files(self._folder, ".log")
        reports = [
            self._folder / store.STATUS_FILE,
            *(store.step_file(self._folder, rank) for rank, _ in logs),
        ]
        found = []
        for path in [self._folder / "launcher.log", *reports, *(path for _, path in logs)]:
            with contextlib.suppress(OSError):
                status = os.lstat(path)
                # The middle of a long log is removed, which changes its time: only its size tells of output.
                at = status.st_mtime_ns if path in reports else 0
                found.append((path.name, status.st_size, at))
        return found

    def _use_of_cpu(self) -> tuple[bool, bool]:
        """Return (whether a rank works, whether one uses CPU time as one does that waits for a GPU)."""
        busy = spins = False
        records = rank_records.read(self._folder)
        self._has_ranks = self._has_ranks or any(record not in self._earlier for record in records)
        roots = {one.rank: one.pid for one in records if one.exit_code is None and one.pid}
        for ticks, moved, seconds in self._use.look(roots).values():
            # One tick less: it may have begun before the last look.
            cores = max(ticks - 1, 0) / kernel.TICKS / seconds
            busy = busy or cores > SPINNING or moved / seconds > IO_RATE
            spins = spins or cores > CPU_SHARE
        return busy, spins


class Stall:
    """The watch over one attempt of a job, on one node. What the other nodes have to know, it will `send`."""

    def __init__(self, node: int, folder: Path, minutes: float, gpus: Gpus, send: Send) -> None:
        self._node, self._folder, self._send = node, folder, send
        self._limit = minutes * 60.0
        self.activity = Activity(folder, self._limit, gpus)
        self._idle: dict[int, float] = {}  # of the other nodes
        self._declared_at: Optional[float] = None
        self._found: dict[int, PeerMessage] = {}  # by node: where its ranks are, and what NCCL reports
        self._concluded = False
        self._left: Optional[ToleratedStall] = None  # the stall that goes on

    def idle(self) -> float:
        """Return for how many seconds this node's ranks have done nothing."""
        return min(self.activity.idle(), MAX_AGO)

    def heard_idle(self, node: int, seconds: float) -> None:
        self._idle[node] = seconds

    def add_stacks(self, node: int, found: PeerMessage) -> None:
        self._found[node] = found

    def look(self, others: Optional[Collection[int]]) -> None:
        """Notice that no rank of any node does anything. The first node declares a stall: `others` are the
        other nodes that are left; None: it is not this node, or all ranks have finished."""
        if others is not None and self._is_due(others):
            self.gather()
            self._send(PeerMessage(Kind.STALLED))

    def _is_due(self, others: Collection[int]) -> bool:
        """Whether this node has to declare a stall: all are idle, and there was activity since the last."""
        idle = min([self.idle(), *(self._idle.get(node, 0.0) for node in others)])
        if self._concluded and idle < self._limit:
            self._declared_at, self._concluded = None, False
            if self._left is not None:
                self._keep(replace(self._left, until=max(time.time(), self._left.since)))
                self._left = None
        return 0 < self._limit <= idle and self._declared_at is None

    def gather(self) -> None:
        """Read the stacks of this node's ranks, in a thread, and send where they are."""
        self._declared_at = time.monotonic()
        self._found = {}
        threading.Thread(target=self._gather, daemon=True).start()

    def _gather(self) -> None:
        found = StacksReply(())
        with contextlib.suppress(OSError, RuntimeError):  # RuntimeError: no thread can be started
            found = stacks.gather(self._folder)
        positions = tuple(rank.position for rank in found.ranks)
        self._found[self._node] = PeerMessage(Kind.STACKS, stacks=positions, nccl=found.nccl)
        self._send(self._found[self._node])

    def leave(self, detail: str) -> None:
        """Keep, here and on the other nodes, that a stall is left alone."""
        self._left = ToleratedStall(time.time(), detail)
        self._keep(self._left)

    def _keep(self, stall: ToleratedStall) -> None:
        job_record.keep(self._folder / job_record.STALL_FILE, stall)
        self._send(PeerMessage(Kind.LEFT, stall=stall))

    def conclusion(self, nodes: AbstractSet[int]) -> Optional[Observed]:
        """Return the stall as a failure, once, when all nodes have reported their stacks, or are late."""
        if self._declared_at is None or self._concluded:
            return None
        if not nodes <= self._found.keys() and time.monotonic() - self._declared_at < GATHER_SECONDS:
            return None
        self._concluded = True
        reports = dict(self._found)  # a thread may still add that of this node
        known = {stack.rank: node for node, found in reports.items() for stack in found.stacks}
        positions = [stack for found in reports.values() for stack in found.stacks]
        alone = elsewhere(positions)
        node = self._node if alone is None else known[alone.rank]
        waited = f"{self._limit / 60:g} min" if self._limit >= 60 else f"{self._limit:g} s"
        detail = f"no output, CPU or GPU activity of any rank for {waited}"
        nccl = next((found.nccl for found in reports.values() if found.nccl), "")
        detail = "; ".join(filter(None, (detail, summary(positions), nccl)))
        failure = Failure(
            node, Cause.STALL, rank=None if alone is None else alone.rank, detail=detail[:MAX_TEXT]
        )
        lines = () if alone is None else end_of_log(self._folder / "ranks" / f"{alone.rank}.log")[0]
        return Observed(failure, 0.0, lines)
