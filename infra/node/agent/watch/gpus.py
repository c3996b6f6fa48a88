"""The GPUs of this node, as one nvidia-smi that goes on shows them: its start takes long with eight GPUs."""

from __future__ import annotations

import shutil
import signal
import subprocess
import threading
import time
from math import isfinite
from typing import Optional

from agent.node import kernel
from cloudddp.agent.protocol.codec import ProtocolError
from cloudddp.agent.protocol.readings import MAX_GPUS, GpuReading

FIELDS = "index,utilization.gpu,memory.used,memory.total,temperature.gpu,power.draw"
COMMAND = ["nvidia-smi", f"--query-gpu={FIELDS}", "--format=csv,noheader,nounits"]
AGAIN = 30.0  # seconds from one start to the next, where it has ended
LATE = 10.0  # seconds by which its output may be late: it hangs where a GPU is broken
LONGEST_LINE = 4096  # bytes


def gpu_of(line: str) -> Optional[GpuReading]:
    """Return the GPU of a line such as `0, 97, 71012, 81559, 61, 651.32`; None for anything else. A cell that
    holds no number (`[N/A]`, `[Not Supported]`), or is missing, is None. Pure."""
    numbers = [*map(_number, line.split(",")), *[None] * 5][:6]
    index, load, used, total, heat = (one if one is None else round(one) for one in numbers[:5])
    try:
        return None if index is None else GpuReading(index, load, used, total, heat, numbers[5])
    except ProtocolError:  # out of range
        return None


def _number(cell: str) -> Optional[float]:
    try:
        return found if isfinite(found := float(cell)) else None
    except ValueError:
        return None


class Gpus:
    """What nvidia-smi prints every `interval` seconds. It ends with this process."""

    def __init__(self, interval: float) -> None:
        self._interval = interval
        self._process: Optional[subprocess.Popen[bytes]] = None
        self._started_at = self._answered_at = float("-inf")
        self._found: dict[int, GpuReading] = {}  # by index
        self.answered = threading.Event()

    def read(self) -> tuple[GpuReading, ...]:
        """Return the GPUs as they were printed last; never wait for nvidia-smi. Call it in the main thread:
        nvidia-smi ends with the thread that has started it."""
        now = time.monotonic()
        if not self.runs and now - self._started_at >= AGAIN and shutil.which(COMMAND[0]):
            self._started_at = now
            self._start([*COMMAND, "-lms", str(round(self._interval * 1000))])
        if now - self._answered_at > self._interval + LATE:
            return ()
        return tuple(gpu for _, gpu in sorted(self._found.copy().items()))

    @property
    def runs(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def _start(self, command: list[str]) -> None:
        none, end = subprocess.DEVNULL, kernel.death_signal(signal.SIGKILL)
        try:
            self._process = subprocess.Popen(
                command, stdin=none, stdout=subprocess.PIPE, stderr=none, preexec_fn=end
            )
        except OSError:
            return
        threading.Thread(target=self._follow, args=(self._process,), daemon=True).start()

    def _follow(self, process: subprocess.Popen[bytes]) -> None:
        with process:
            while process.stdout and (line := process.stdout.readline(LONGEST_LINE)):
                gpu = gpu_of(line.decode(errors="replace"))
                if gpu is not None and gpu.index < MAX_GPUS:
                    self._found[gpu.index], self._answered_at = gpu, time.monotonic()
                    self.answered.set()
