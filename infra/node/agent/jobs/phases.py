"""The phase of each job, and the running jobs, from the files in the jobs' folders.

A job's folder holds `job.json` (JobFile), `state.json` (StateFile, written by its supervisor), `ranks/N.json`
(RankRecord), `ranks/N.log` (with `N.times`: ranks/rank_log.py), `launcher.log`, `supervisor.log`,
`status.json` (by the script), `steps/N.json` (by the ranks: watch/stragglers.py), `stragglers.json` and
`stall.json` (job_record.py), `rebooted.json` (RebootFile), `verdict.json` (Verdict). While its setup runs,
and where it has ended there, there is no `job.json`, and the setup step has written `state.json`; `setup.log`
is the output of the setup commands. A file `cancel` (with its token) marks that the user cancelled it, an
empty file `stopped` that its supervisor ends the ranks.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from dataclasses import replace
from pathlib import Path
from typing import Optional

from agent.node import kernel, processes, store
from agent.node.processes import Task
from cloudddp.agent.protocol.codec import MAX_TIME, Time, has_job_id_format
from cloudddp.agent.protocol.frozen import frozen
from cloudddp.agent.protocol.jobs import MAX_RANKS, Cause, Failure, StateFile, Verdict
from cloudddp.agent.protocol.phases import (
    LOG_MB,
    MAX_RANK,
    MAX_RUNNING,
    MAX_TOKEN,
    JobPhase,
    LogMiB,
)

JOB_FILE = "job.json"
STATE_FILE = "state.json"
SETUP_LOG = "setup.log"
VERDICT_FILE = "verdict.json"
COPIED_FILE = "copied.json"
UNREACHABLE_FILE = "unreachable.json"
REBOOTED_FILE = "rebooted.json"
# An empty file: its ctime is when the job started, by the file system's clock; `began-N`: when attempt N did.
BEGAN = "began"
CANCEL_MARK = "cancel"  # its mtime is the time of the first cancel
STOPPED_MARK = "stopped"
SHUTDOWN_SIGNALS = (signal.SIGTERM, signal.SIGKILL)  # of systemd, to every process
# Seconds from such a signal to the next start of the machine, at most: others send these signals, too.
SHUTDOWN_SECONDS = 300.0
REBOOT_SECONDS = 3600.0  # between the end of a job with its machine and the next start of that, at most
START_SECONDS = 30.0  # for a supervisor to record that it runs; it takes milliseconds


@frozen
class JobFile:
    """What later steps must know of a job that was started. Its environment is never written to the disk."""

    node: int
    log_mb: LogMiB = LOG_MB  # MiB of a rank's log that its wrapper keeps
    stop_grace: float = 0.0  # seconds; for the wrappers, too
    poweroff: Optional[float] = None  # seconds without a use after the job, until the node ends


@frozen
class RebootFile:
    """When the machine started again on which a job had ended with it, as it was first noticed."""

    at: Time


def job_folders() -> list[Path]:
    """Return the folders that are named by a job id. A script may create others."""
    return sorted(folder for folder in (store.ROOT / "jobs").glob("*") if has_job_id_format(folder.name))


def known_folders() -> list[Path]:
    return [folder for folder in job_folders() if is_known(folder)]


def is_known(folder: Path) -> bool:
    """Whether a job was started, or is in its setup, or has ended there."""
    return was_started(folder) or store.read(folder / STATE_FILE, StateFile) is not None


def began_at(folder: Path) -> int:
    """Return when a job started, by the file system's clock (ns)."""
    return ctime(folder / BEGAN) or ctime(folder / JOB_FILE)


def first_began() -> int:
    """Return when the first job on this node started; 0 without one."""
    return min((began_at(folder) for folder in job_folders() if was_started(folder)), default=0)


def attempts() -> list[tuple[int, str, int]]:
    """Return when each attempt on this node began (ns, by the file system), its job and its number."""
    found = []
    for folder in filter(was_started, job_folders()):
        marks = [(mark, _rank_of(mark.name[len(BEGAN) + 1 :])) for mark in folder.glob(f"{BEGAN}-*")]
        found += [(ctime(mark), folder.name, number) for mark, number in marks if number is not None]
        found.append((began_at(folder), folder.name, 0))
    return sorted(found)


def ctime(path: Path) -> int:
    """Return the ctime of a file (ns), which a script cannot set, unlike the mtime; 0 where there is none."""
    try:
        return os.lstat(path).st_ctime_ns
    except OSError:
        return 0


def was_started(folder: Path) -> bool:
    return os.path.exists(folder / JOB_FILE)  # unlike Path.exists, False where the folder is unreadable


def rank_files(folder: Path, ending: str) -> list[tuple[int, Path]]:
    """Return the files of the ranks with this ending, by rank. Names that no rank has are skipped."""
    found = ((_rank_of(path.name[: -len(ending)]), path) for path in (folder / "ranks").glob(f"*{ending}"))
    return sorted((rank, path) for rank, path in found if rank is not None)[:MAX_RANKS]


def _rank_of(name: str) -> Optional[int]:
    number = int(name) if name.isascii() and name.isdigit() and len(name) < 10 else -1
    return number if str(number) == name and 0 <= number <= MAX_RANK else None


def job_file(folder: Path) -> Optional[JobFile]:
    """Return the record of a job that was started. What is unreadable in it is taken from its state."""
    job = store.read(folder / JOB_FILE, JobFile)
    if job is not None or not was_started(folder):
        return job
    state = store.read(folder / STATE_FILE, StateFile)
    return None if state is None else JobFile(state.node)


def task(folder: Path, node: int, *, own: bool = False) -> Task:
    """Return the processes that a job's supervisor started. `own`: for the supervisor and its guard."""
    return Task(f"{folder.name}/{node}", folder / STATE_FILE, own)


def setup_task(folder: Path, node: int) -> Task:
    return Task(f"{folder.name}/{node}/setup", folder / STATE_FILE)


def recorded(folder: Path) -> Optional[StateFile]:
    """Return what the supervisor or the setup recorded, with the phase LOST if it has exited without
    recording the end; CANCELLED for a setup that was cancelled."""
    state = store.read(folder / STATE_FILE, StateFile)
    if state is not None and _is_gone(folder, state):
        again = store.read(folder / STATE_FILE, StateFile)  # it may have ended between the two reads
        if again is None or again.state is state.state:
            if state.state is not JobPhase.SETUP:
                return replace(state, state=JobPhase.LOST, exit_code=1)
            is_cancelled = (folder / CANCEL_MARK).exists()
            return replace(state, state=JobPhase.CANCELLED if is_cancelled else JobPhase.LOST)
        return again
    return state


def agent_runs(folder: Path) -> bool:
    """Whether the supervisor of a job runs, also as a frozen process, or its guard, which is not stopped.
    True if their record is unreadable: a rank may have damaged it."""
    state = store.read(folder / STATE_FILE, StateFile)
    if state is None or state.pid is None or processes.runs(state.pid, state.born):
        return True
    return processes.runs(state.guard, state.guard_born) and not processes.is_stopped(state.guard)


def has_ended(folder: Path) -> bool:
    """Whether the end of a job was recorded."""
    state = store.read(folder / STATE_FILE, StateFile)
    return state is not None and state.state.ended


def verdict(folder: Path) -> Optional[Verdict]:
    return store.read(folder / VERDICT_FILE, Verdict)


def first_failure(folder: Path) -> Optional[Failure]:
    """Return what failed first, as the verdict says; None without one."""
    found = verdict(folder)
    return found.first if found is not None else None


def _is_gone(folder: Path, state: StateFile) -> bool:
    waits = state.state is JobPhase.STARTING and state.pid is not None  # for the other nodes
    if not state.state.ended and _is_other_boot(state.boot):
        return True
    if state.state is JobPhase.RUNNING or waits:
        guarded = processes.runs(state.guard, state.guard_born)
        return not guarded and not processes.runs(state.pid, state.born)
    if state.state is JobPhase.SETUP and not processes.runs(state.pid, state.born):
        return not processes.find(setup_task(folder, state.node))
    if state.state is JobPhase.STARTING:
        return time.time() - ctime(folder / JOB_FILE) / 1e9 > START_SECONDS
    return False


def phase_of(folder: Path) -> JobPhase:
    state = recorded(folder)
    return JobPhase.LOST if state is None else state.state


def _is_other_boot(recorded: str) -> bool:
    """Whether the machine was rebooted since `recorded`. '': written by another version."""
    return bool(recorded) and recorded != kernel.boot()


def rebooted(folder: Path) -> Optional[float]:
    """Return when the machine started again (epoch), if that ended a job or its setup."""
    noticed = store.read(folder / REBOOTED_FILE, RebootFile)
    if noticed is not None:
        return noticed.at
    record = recorded(folder)
    if record is None or not _is_other_boot(record.boot):
        return None
    at, first = kernel.booted_at(), first_failure(folder)
    if not ended_with_machine(record.state, record.node, record.ended, first, at) or not 0 <= at <= MAX_TIME:
        return None
    with contextlib.suppress(OSError):  # a full disk; after a further reboot, the later start is reported
        store.write(folder / REBOOTED_FILE, RebootFile(at))
    return at


def ended_with_machine(
    phase: JobPhase, node: int, ended: Optional[float], first: Optional[Failure], booted: float
) -> bool:
    """Whether a job ended with the machine, which was `booted` since. Pure. Its end was not recorded; or what
    failed first is this node: its agent was asked to end at the shutdown, or the others have lost it, or the
    shutdown has ended a rank first."""
    if phase is JobPhase.LOST:
        return True
    if first is None or first.node != node or ended is None:
        return False
    if first.cause in (Cause.AGENT, Cause.SILENT):
        return abs(booted - ended) < REBOOT_SECONDS
    return first.signal in SHUTDOWN_SIGNALS and 0 <= booted - ended < SHUTDOWN_SECONDS


def running_jobs() -> list[str]:
    """Return the jobs that occupy this node, also those whose ranks outlive their supervisor."""
    return [folder.name for folder in known_folders()[-MAX_RUNNING:] if _occupies(folder)]


def end_orphans() -> None:
    """End what is left of jobs without an agent. Where guard, supervisor and the wrapper of a rank are killed
    at once, what the rank has started in sessions of its own continues. A wrapper ends its rank itself."""
    for name, node in processes.marked_jobs():  # nodes of the simulator share a machine
        folder = store.job_folder(name)
        job = job_file(folder)
        if job is None or job.node != node or agent_runs(folder):
            continue
        its = task(folder, node)
        if not any(processes.name(pid) == kernel.WRAPS_A_RANK for pid in processes.find(its)):
            processes.end(its, 0.0)


def _occupies(folder: Path) -> bool:
    phase = phase_of(folder)
    if phase is not JobPhase.LOST:
        return not phase.ended
    job = store.read(folder / JOB_FILE, JobFile)
    if job is None:  # written by another version
        return any(one == folder.name for one, _ in processes.marked_jobs())
    return bool(processes.find(task(folder, job.node)))


def is_stopping(folder: Path) -> bool:
    return (folder / CANCEL_MARK).exists() or (folder / STOPPED_MARK).exists()


def cancelled_at(folder: Path) -> Optional[float]:
    try:
        return modified(folder / CANCEL_MARK)
    except OSError:
        return None


def cancel_token(folder: Path) -> str:
    """Return what tells the cancel of a job from a later one, or ''."""
    try:
        return store.read_bytes(folder / CANCEL_MARK, MAX_TOKEN).decode()
    except (OSError, ValueError):
        return ""


def modified(path: Path) -> float:
    """Return when a file was modified, in range: a script may set any time. Raises OSError."""
    return min(max(os.lstat(path).st_mtime, 0.0), MAX_TIME)
