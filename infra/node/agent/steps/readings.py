"""`readings`: write what this node measures to stdout as frames, until the laptop disconnects."""

from __future__ import annotations

import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Optional

from agent.jobs import phases
from agent.steps import jobs
from agent.watch.gpus import Gpus
from agent.watch.measure import Measuring
from cloudddp.agent.protocol.frames import encode_frame
from cloudddp.agent.protocol.phases import MAX_RUNNING
from cloudddp.agent.protocol.readings import ReadingsRequest

REQUEST = ReadingsRequest
FIRST_PAUSE = 0.5  # seconds until the first reading, whose CPU time is of this interval
GPU_SECONDS = 3.0  # in which nvidia-smi starts


def step(request: ReadingsRequest) -> int:
    out, gpus = sys.stdout.buffer, Gpus(request.interval)
    folder = _newest_job()
    measuring = Measuring(folder, gpus, request.interval)
    measuring.take()
    time.sleep(FIRST_PAUSE)
    if gpus.runs:
        gpus.answered.wait(GPU_SECONDS)
    last_state = b""
    while True:
        if (newest := _newest_job()) != folder:
            folder, measuring = newest, Measuring(newest, gpus, request.interval)
        state = b"" if folder is None else encode_frame(replace(jobs.state_of(folder), training=None))
        out.write(b"" if state == last_state else state)
        last_state = state
        out.write(encode_frame(measuring.take()))
        out.flush()
        time.sleep(request.interval)


def _newest_job() -> Optional[Path]:
    """Return the folder of the newest job that runs, or of the newest one."""
    known = phases.known_folders()[-MAX_RUNNING:]
    running = (one for one in reversed(known) if not phases.phase_of(one).ended)
    return next(running, known[-1] if known else None)
