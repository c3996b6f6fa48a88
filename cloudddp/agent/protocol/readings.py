"""What one node measures of its GPUs and of its ranks at a moment: `readings` sends them to `cloudddp top`,
and the supervisor of a job keeps them with the job, for `cloudddp report`.

`metrics` holds the numbers that rank 0 reports in its status file, whatever their names (loss, learning rate,
samples per second).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Optional

from cloudddp.agent.protocol.codec import MAX_COUNT, MAX_TIME, check_length, check_range
from cloudddp.agent.protocol.phases import MAX_RANK
from cloudddp.agent.protocol.progress import MAX_STEP_SECONDS

MAX_GPUS = 64
MAX_READING_RANKS = 256
MAX_METRICS = 32
MAX_METRIC_NAME = 64  # characters
LEAST_INTERVAL, MAX_INTERVAL = 0.2, 3600.0  # seconds
READINGS_FILE = "readings.jsonl"  # in a job's folder on each node: one Reading per line


@dataclass(frozen=True)
class GpuReading:
    """One GPU, as `nvidia-smi --query-gpu` shows it; None for what it does not support. `utilization` is in
    percent, memory in MiB, `temperature` in degrees Celsius, `power` in watts."""

    index: int
    utilization: Optional[int] = None
    memory: Optional[int] = None
    memory_total: Optional[int] = None
    temperature: Optional[int] = None
    power: Optional[float] = None

    def __post_init__(self) -> None:
        for name in ("index", "utilization", "memory", "memory_total", "power"):
            check_range(name, getattr(self, name), 0, 1e7)
        check_range("temperature", self.temperature, -300, 1000)


@dataclass(frozen=True)
class RankReading:
    """One rank: `cores` is the processor time of it and its children per second, `step` what it last
    reported, `seconds` the time of a step (`own`: of its own work), None where it is not known."""

    rank: int
    cores: Optional[float] = None
    step: Optional[int] = None
    seconds: Optional[float] = None
    own: bool = False

    def __post_init__(self) -> None:
        check_range("rank", self.rank, 0, MAX_RANK)
        check_range("cores", self.cores, 0, 1e5)
        check_range("step", self.step, -MAX_COUNT, MAX_COUNT)
        check_range("seconds", self.seconds, 0, MAX_STEP_SECONDS)


@dataclass(frozen=True)
class Reading:
    """All that a node measured at `at`, in seconds since the epoch by its clock."""

    at: float
    gpus: tuple[GpuReading, ...] = ()
    ranks: tuple[RankReading, ...] = ()
    metrics: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_range("at", self.at, 0, MAX_TIME)
        check_length("gpus", self.gpus, MAX_GPUS)
        check_length("ranks", self.ranks, MAX_READING_RANKS)
        check_length("metrics", self.metrics, MAX_METRICS)
        for name in self.metrics:
            check_length("the name of a metric", name, MAX_METRIC_NAME)


@dataclass(frozen=True)
class ReadingsRequest:
    """Send a Reading of this node every `interval` seconds, for as long as somebody reads them, and before
    them the state of its newest job, without its training status, whenever that has changed (frames.py)."""

    interval: float

    STEP = "readings"

    def __post_init__(self) -> None:
        check_range("interval", self.interval, LEAST_INTERVAL, MAX_INTERVAL)
