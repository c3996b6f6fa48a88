"""`readings`: write what this node measures to stdout as frames, until the laptop disconnects."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Optional

from agent.jobs import phases
from agent.node import store
from agent.steps import jobs
from agent.watch.gpus import Gpus
from agent.watch.measure import Measuring
from cloudddp.agent.protocol.frames import encode_frame
from cloudddp.agent.protocol.phases import MAX_RUNNING
from cloudddp.agent.protocol.readings import Reading, ReadingsRequest

REQUEST = ReadingsRequest
FIRST_PAUSE = 0.5  # seconds until the first reading of a job, whose CPU time is of this interval
GPU_SECONDS = 3.0  # in which nvidia-smi starts


def step(request: ReadingsRequest) -> int:
    out, gpus, last_state = sys.stdout.buffer, Gpus(request.interval), b""
    measuring: Optional[Measuring] = None
    gpus.answered.wait(GPU_SECONDS)
    while True:
        folder = _newest_job()
        if folder is not None and (measuring is None or measuring.folder != folder):
            project = store.project_folder(request.project)
            measuring = Measuring(folder, gpus, request.interval, project)
            measuring.take()
            time.sleep(FIRST_PAUSE)
        if folder is not None and (state := encode_frame(jobs.state_of(folder))) != last_state:
            out.write(state)
            last_state = state
        reading = Reading(time.time(), gpus.read()) if measuring is None else measuring.take()
        out.write(encode_frame(reading))
        out.flush()
        time.sleep(request.interval)


def _newest_job() -> Optional[Path]:
    """Return the folder of the newest job that runs, or of the newest one."""
    known = phases.known_folders()[-MAX_RUNNING:]
    return max(known, key=lambda folder: (not phases.phase_of(folder).ended, folder.name), default=None)
