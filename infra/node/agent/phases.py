"""The phase of each job, and the running jobs, from the files in the jobs' folders.

A job's folder holds `job.json` (JobFile), `state.json` (StateFile, written by its supervisor), `ranks/N.json`
(RankRecord) and `ranks/N.log`, `launcher.log`, `supervisor.log`, `status.json` (by the script). While its setup runs
it holds `setup.json` (SetupFile). An empty file `cancel` or `stopped` marks that it is being stopped, and why.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Optional

from agent import processes, store
from agent.processes import Task
from cloudddp.agent.protocol.phases import MAX_RUNNING, JobPhase

JOB_FILE = "job.json"
STATE_FILE = "state.json"
SETUP_FILE = "setup.json"
BEGAN = "began"  # an empty file: its ctime is when the job started, by the file system's clock
CANCEL_MARK = "cancel"  # its mtime is the time of the first cancel
STOPPED_MARK = "stopped"
START_SECONDS = 30.0  # for a supervisor to record that it runs; it takes milliseconds


@dataclass(frozen=True)
class JobFile:
    """What later steps must know of a job that was started. Its environment is never written to the disk."""

    node: int
    ranks: int


@dataclass(frozen=True)
class StateFile:
    """What a job's supervisor records. `state` is named as agent version 1 wrote it."""

    job: str
    node: int
    state: JobPhase
    started: Optional[float] = None
    ended: Optional[float] = None
    exit_code: Optional[int] = None
    error: str = ""
    pid: Optional[int] = None  # of the supervisor, and when that started
    born: str = ""
    script: str = ""
    expected: Optional[int] = None
    max_restarts: int = 0


@dataclass(frozen=True)
class SetupFile:
    """A setup that runs in the process `pid`."""

    job: str
    node: int
    script: str
    started: float
    pid: int
    born: str


def known_folders() -> list[Path]:
    folders = sorted((store.ROOT / "jobs").glob("*"))
    return [folder for folder in folders if (folder / JOB_FILE).exists() or running_setup(folder)]


def task(folder: Path, node: int) -> Task:
    """Return the processes that a job's supervisor started."""
    return Task(f"{folder.name}/{node}", folder / STATE_FILE)


def setup_task(folder: Path, node: int) -> Task:
    return Task(f"{folder.name}/{node}/setup", folder / SETUP_FILE)


def recorded(folder: Path) -> Optional[StateFile]:
    """Return what the supervisor recorded, with the phase LOST if it has exited without recording the end."""
    state = store.read(folder / STATE_FILE, StateFile)
    if state is not None and _is_gone(folder, state):
        again = store.read(folder / STATE_FILE, StateFile)  # it may have ended between the two reads
        if again is None or again.state is state.state:
            return replace(state, state=JobPhase.LOST, exit_code=1)
        return again
    return state


def _is_gone(folder: Path, state: StateFile) -> bool:
    if state.state is JobPhase.RUNNING:
        return processes.born(state.pid or 0) != state.born
    if state.state is JobPhase.STARTING:
        return time.time() - (folder / JOB_FILE).stat().st_mtime > START_SECONDS
    return False


def running_setup(folder: Path) -> Optional[SetupFile]:
    """Return the record of a job's setup while any process of it runs."""
    setup = store.read(folder / SETUP_FILE, SetupFile)
    if setup is None:
        return None
    alive = processes.born(setup.pid) == setup.born or processes.find(setup_task(folder, setup.node))
    return setup if alive else None


def phase_of(folder: Path) -> JobPhase:
    state = recorded(folder)
    if state is not None:
        return state.state
    return JobPhase.SETUP if running_setup(folder) else JobPhase.LOST


def running_jobs() -> list[str]:
    """Return the jobs that occupy this node, also those whose supervisor has exited while their ranks continue."""
    return [folder.name for folder in known_folders()[-MAX_RUNNING:] if _occupies(folder)]


def _occupies(folder: Path) -> bool:
    phase = phase_of(folder)
    if phase is not JobPhase.LOST:
        return not phase.ended
    job = store.read(folder / JOB_FILE, JobFile)
    if job is None:  # written by another version
        return processes.any_of_job(folder.name)
    return bool(processes.find(task(folder, job.node)))


def is_stopping(folder: Path) -> bool:
    return (folder / CANCEL_MARK).exists() or (folder / STOPPED_MARK).exists()


def cancelled_at(folder: Path) -> Optional[float]:
    try:
        return (folder / CANCEL_MARK).stat().st_mtime
    except OSError:
        return None
