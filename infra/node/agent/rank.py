"""The wrapper of one rank: its output goes to a file named by its global rank; its end is recorded with the time."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from dataclasses import replace
from pathlib import Path

from agent import causes, phases, processes, rank_log, store
from agent.rank_end import HANDLED, RankEnd
from cloudddp.agent.protocol import STATUS_VARIABLE, STEP_VARIABLE
from cloudddp.agent.protocol.jobs import RankRecord
from cloudddp.agent.protocol.verdict import Cause, Failure

NOT_STARTED = 127
PAUSE = 0.02  # seconds
ERROR_FILE = (
    "TORCHELASTIC_ERROR_FILE"  # in which torch.distributed.elastic records an exception; torchrun sets it
)


def main(job: str, *argv: str) -> int:
    """Run the rank and return its exit code.

    torchrun signals this process or its group, depending on the version. The rank is in a group of its own and gets
    each signal once, from here, so that its data-loader workers do not get it before the rank has saved.
    """
    # Of the launcher, without which the rank would train on. It may have ended before this, and the agent, too.
    processes.die_with_parent(signal.SIGTERM, os.getppid())
    folder = store.job_folder(job)
    if not phases.agent_runs(folder):
        return NOT_STARTED
    job_file = phases.job_file(folder)
    number = int(os.environ.get("RANK", "0"))
    record = RankRecord(number, None, None)
    path = folder / "ranks" / f"{number}.json"
    errors = str(folder / "ranks" / f"{number}.error.json")
    reports = {STEP_VARIABLE: str(store.step_file(folder, number))}
    if number == 0:
        reports[STATUS_VARIABLE] = str(folder / store.STATUS_FILE)

    log_path = folder / "ranks" / f"{number}.log"
    log = open(log_path, "ab")  # noqa: SIM115  as long as this process
    keeper = rank_log.Keeper(log, log_path, rank_log.limit_of(folder))
    try:
        child = subprocess.Popen(
            argv, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
            preexec_fn=processes.death_signal(signal.SIGKILL),
            env={ERROR_FILE: errors, **os.environ, **reports},
        )  # fmt: skip
    except OSError as error:
        log.write(f"cannot start {argv[0]}: {error.strerror}\n".encode())
        log.close()
        store.write(path, replace(record, ended=time.time(), at=time.monotonic(), exit_code=NOT_STARTED))
        return NOT_STARTED
    record = replace(record, pid=child.pid)
    ending = RankEnd(child, folder, job_file.stop_grace if job_file else 0.0)
    store.write(path, record)
    keeper.start(HANDLED)
    code = child.wait()
    at = time.monotonic()
    killed_by = -code if code < 0 else None
    ended = replace(
        record, ended=time.time(), at=at, asked=bool(ending.forwarded), signal=killed_by,
        exit_code=128 - code if code < 0 else code,
        error=causes.elastic_error(os.environ.get(ERROR_FILE, errors)) if code else "",
    )  # fmt: skip
    store.write(path, ended)
    keeper.finish()
    ending.finish()
    _let_the_lost_rank_end(log_path, ended, ending.forwarded)
    if killed_by is not None:
        _exit_by_signal(killed_by)
    return code


def _let_the_lost_rank_end(log: Path, ended: RankRecord, forwarded: set[int]) -> None:
    """After a failure for want of another rank, wait for that one to end: torchrun would end it, and nobody would know
    how it would have ended."""
    failure = Failure(0, Cause.RANK, ended.rank, ended.exit_code, ended.signal, ended.error)
    if not ended.exit_code or not causes.is_consequence(failure, causes.last_lines(log)):
        return
    deadline = time.monotonic() + causes.SETTLE
    while time.monotonic() < deadline and not forwarded:
        time.sleep(PAUSE)


def _exit_by_signal(number: int) -> None:
    """End by the same signal, so that torchrun reports it."""
    if number not in (signal.SIGKILL, signal.SIGSTOP):
        signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)
