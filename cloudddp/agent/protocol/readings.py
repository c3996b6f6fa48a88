"""What one node measures of its GPUs and of its ranks at a moment: `readings` sends it to `cloudddp top`, and
the supervisor of a job keeps it with the job, for `cloudddp report`."""

from __future__ import annotations

from dataclasses import field
from typing import Annotated, Optional

from cloudddp.agent.protocol.codec import Number, ProjectName, Time, at_most, within
from cloudddp.agent.protocol.frozen import frozen
from cloudddp.agent.protocol.jobs import MAX_RANKS
from cloudddp.agent.protocol.phases import Rank
from cloudddp.agent.protocol.progress import MAX_STEP_SECONDS

MAX_GPUS = 64
MAX_METRICS = 32
MAX_SHOWN_LINE = 500  # characters
READINGS_FILE = "readings.jsonl"  # in a job's folder on each node: one Reading per line

Measured = Annotated[float, within(0, 1e7)]


@frozen
class GpuReading:
    """One GPU, as `nvidia-smi --query-gpu` shows it; None for what it does not support. `utilization` and
    `memory_utilization` (how long data moves) are percent of time, memory is in MiB, `temperature` in degrees
    Celsius, `power` in watts."""

    index: Annotated[int, within(0, MAX_GPUS - 1)]
    utilization: Optional[Measured] = None
    memory: Optional[Measured] = None
    memory_total: Optional[Measured] = None
    temperature: Optional[Measured] = None
    power: Optional[Measured] = None
    memory_utilization: Optional[Measured] = None


@frozen
class RankReading:
    """One rank: `cores` is the processor time of it and its children per second, `step` what it last
    reported, `seconds` the time of a step; None where it is not known."""

    rank: Rank
    cores: Optional[Annotated[float, within(0, 100000.0)]] = None
    step: Optional[Number] = None
    seconds: Optional[Annotated[float, within(0, MAX_STEP_SECONDS)]] = None


@frozen
class Reading:
    """All that a node measured at `at`, in seconds since the epoch by its clock. `metrics`: the numbers that
    rank 0 reports in its status file, by name, where it runs here; None for NaN and infinity. For `top`
    also those that it wrote last for TensorBoard, where it reports none but steps, and the last `line` of its
    log."""

    at: Time
    gpus: Annotated[tuple[GpuReading, ...], at_most(MAX_GPUS)] = ()
    ranks: Annotated[tuple[RankReading, ...], at_most(MAX_RANKS)] = ()
    metrics: Annotated[dict[str, Optional[float]], at_most(MAX_METRICS)] = field(default_factory=dict)
    line: Annotated[str, at_most(MAX_SHOWN_LINE)] = ""


@frozen
class ReadingsRequest:
    """Send a Reading of this node every `interval` seconds, for as long as somebody reads them, and before it
    the state of its newest job whenever that has changed (frames.py)."""

    interval: float
    project: ProjectName

    STEP = "readings"
