"""Whether the ranks of this node do anything: output, training status, CPU time, I/O, GPUs."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from agent.jobs import phases, rank_records
from agent.node import kernel, processes, store
from agent.watch.gpus import Gpus
from cloudddp.agent.protocol.readings import GpuReading

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


_Usage = dict[
    int, tuple[int, int]
]  # what the processes of a rank have used so far: pid -> (CPU ticks, bytes)


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
        self._usage: dict[int, _Usage] = {}  # by rank

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
        busy, spins = self._use_of_cpu(seconds)
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

    def _use_of_cpu(self, seconds: float) -> tuple[bool, bool]:
        """Return (whether a rank works, whether one uses CPU time in a way that waiting for a GPU
        explains)."""
        busy = spins = False
        records = rank_records.read(self._folder)
        self._has_ranks = self._has_ranks or any(record not in self._earlier for record in records)
        roots = {one.rank: one.pid for one in records if one.exit_code is None and one.pid}
        trees = processes.trees(roots.values())
        for rank, root in roots.items():
            usage = {pid: (kernel.cpu_ticks(pid), _bytes(pid)) for pid in trees[root]}
            before = self._usage.get(rank, usage)
            self._usage[rank] = usage
            ticks, moved = _grown(before, usage)
            # One tick less: it may have begun before the last look.
            cores = max(ticks - 1, 0) / kernel.TICKS / seconds
            busy = busy or cores > SPINNING or moved / seconds > IO_RATE
            spins = spins or cores > CPU_SHARE
        return busy, spins


def _grown(before: _Usage, after: _Usage) -> list[int]:
    """Return how much the processes have used since; a process that is new has used all of it."""
    return [
        sum(max(used[kind] - before.get(pid, (0, 0))[kind], 0) for pid, used in after.items())
        for kind in range(2)
    ]


def _bytes(pid: int) -> int:
    with contextlib.suppress(OSError, ValueError):
        lines = Path(f"/proc/{pid}/io").read_text().splitlines()
        return sum(int(line.split()[1]) for line in lines if line.startswith(("rchar", "wchar")))
    return 0
