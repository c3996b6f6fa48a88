"""What one node measures of its GPUs and of its ranks at a moment: `readings` sends it to `cloudddp top`, and
the supervisor of a job keeps it with the job, for `cloudddp report`."""

from __future__ import annotations

from dataclasses import field
from typing import Optional

from cloudddp.agent.protocol.codec import MAX_COUNT, MAX_TIME, check_length, check_range
from cloudddp.agent.protocol.frozen import frozen
from cloudddp.agent.protocol.jobs import MAX_RANKS
from cloudddp.agent.protocol.phases import MAX_RANK
from cloudddp.agent.protocol.progress import MAX_STEP_SECONDS

MAX_GPUS = 64
MAX_METRICS = 32
READINGS_FILE = "readings.jsonl"  # in a job's folder on each node: one Reading per line


@frozen
class GpuReading:
    """One GPU, as `nvidia-smi --query-gpu` shows it; None for what it does not support. `utilization` and
    `memory_utilization` (how long data moves) are percent of time, memory is in MiB, `temperature` in degrees
    Celsius, `power` in watts."""

    index: int
    utilization: Optional[float] = None
    memory: Optional[float] = None
    memory_total: Optional[float] = None
    temperature: Optional[float] = None
    power: Optional[float] = None
    memory_utilization: Optional[float] = None

    def __post_init__(self) -> None:
        check_range("index", self.index, 0, MAX_GPUS - 1)
        for name, value in vars(self).items():
            check_range(name, value, 0, 1e7)


@frozen
class RankReading:
    """One rank: `cores` is the processor time of it and its children per second, `step` what it last
    reported, `seconds` the time of a step; None where it is not known."""

    rank: int
    cores: Optional[float] = None
    step: Optional[int] = None
    seconds: Optional[float] = None

    def __post_init__(self) -> None:
        check_range("rank", self.rank, 0, MAX_RANK)
        check_range("cores", self.cores, 0, 1e5)
        check_range("step", self.step, -MAX_COUNT, MAX_COUNT)
        check_range("seconds", self.seconds, 0, MAX_STEP_SECONDS)


@frozen
class Reading:
    """All that a node measured at `at`, in seconds since the epoch by its clock. `metrics`: the numbers that
    rank 0 reports in its status file, by name, where it runs here."""

    at: float
    gpus: tuple[GpuReading, ...] = ()
    ranks: tuple[RankReading, ...] = ()
    metrics: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_range("at", self.at, 0, MAX_TIME)
        check_length("gpus", self.gpus, MAX_GPUS)
        check_length("ranks", self.ranks, MAX_RANKS)
        check_length("metrics", self.metrics, MAX_METRICS)


@frozen
class ReadingsRequest:
    """Send a Reading of this node every `interval` seconds, for as long as somebody reads them, and before it
    the state of its newest job whenever that has changed (frames.py)."""

    interval: float

    STEP = "readings"
