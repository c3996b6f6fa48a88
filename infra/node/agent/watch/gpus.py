"""The GPUs of this node, as one nvidia-smi that goes on shows them: its start takes long with eight GPUs."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import threading
import time
from typing import Optional

from agent.node import kernel
from cloudddp.agent.protocol.readings import GpuReading

FIELDS = "index,utilization.gpu,memory.used,memory.total,temperature.gpu,power.draw,utilization.memory"
COMMAND = ["nvidia-smi", f"--query-gpu={FIELDS}", "--format=csv,noheader,nounits", "-lms"]
AGAIN = 30.0  # seconds until the next start, where it has ended
LATE = 10.0  # seconds by which its output may be late: it hangs where a GPU is broken


def gpu_of(line: str) -> Optional[GpuReading]:
    """Return the GPU of a line such as `0, 97, 71012, 81559, 61, 651.32, 40`; None for anything else. A cell
    that holds no number (`[N/A]`, `[Not Supported]`) is None. Pure."""
    index, *cells = line.split(",")
    with contextlib.suppress(ValueError):  # also ProtocolError: out of range
        return GpuReading(int(index), *map(_number, cells[:6]))
    return None


def _number(cell: str) -> Optional[float]:
    with contextlib.suppress(ValueError):
        return float(cell)
    return None


class Gpus:
    """What nvidia-smi prints every `interval` seconds. It ends with this process."""

    def __init__(self, interval: float) -> None:
        self._interval = interval
        self._found: dict[int, tuple[float, GpuReading]] = {}  # by index, with the time of the line
        self.answered = threading.Event()  # nvidia-smi has, or it has ended
        threading.Thread(target=self._follow, daemon=True).start()

    def read(self) -> tuple[GpuReading, ...]:
        """Return the GPUs as they were printed last; never wait for nvidia-smi."""
        oldest = time.monotonic() - self._interval - LATE
        return tuple(gpu for _, (at, gpu) in sorted(self._found.copy().items()) if at > oldest)

    def _follow(self) -> None:
        command, end = [*COMMAND, str(round(self._interval * 1000))], kernel.death_signal(signal.SIGKILL)
        none, pipe = subprocess.DEVNULL, subprocess.PIPE
        while True:
            with (
                contextlib.suppress(OSError),
                subprocess.Popen(
                    command, stdin=none, stdout=pipe, stderr=none, text=True, errors="replace", preexec_fn=end
                ) as process,
            ):
                for line in process.stdout or ():
                    if (gpu := gpu_of(line)) is not None:
                        self._found[gpu.index] = time.monotonic(), gpu
                        self.answered.set()
            self.answered.set()
            time.sleep(AGAIN)
