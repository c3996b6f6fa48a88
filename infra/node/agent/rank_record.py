"""What the wrapper of a rank records: that the rank runs, and how it ended."""

from __future__ import annotations

import os
import subprocess
import time
from dataclasses import replace
from pathlib import Path
from typing import BinaryIO

from agent import causes, kernel, phases, rank_log, store
from agent.rank import NOT_STARTED
from agent.rank_end import HANDLED, RankEnd
from cloudddp.agent.protocol.jobs import RankRecord
from cloudddp.agent.protocol.verdict import Cause, Failure

PAUSE = 0.02  # seconds


def not_started(job: str, rank: int, log: BinaryIO, reason: str) -> int:
    """Record that the rank's command cannot be started; return the exit code for that."""
    log.write(reason.encode())
    log.close()
    ended = RankRecord(rank, NOT_STARTED, time.time(), at=time.monotonic())
    store.write(store.job_folder(job) / "ranks" / f"{rank}.json", ended)
    return NOT_STARTED


def wait(job: str, rank: int, log: BinaryIO, child: subprocess.Popen[bytes], errors: str) -> int:
    """Wait for the end of the rank, record it, and return its exit code, -N after signal N.

    `errors` is the file of torch.distributed.elastic.
    """
    folder = store.job_folder(job)
    job_file = phases.job_file(folder)
    ending = RankEnd(child, folder, job_file.stop_grace if job_file else 0.0)
    path, log_path = folder / "ranks" / f"{rank}.json", folder / "ranks" / f"{rank}.log"
    record = RankRecord(rank, None, None, pid=child.pid, wrapper=kernel.name(os.getpid()))
    store.write(path, record)
    keeper = rank_log.Keeper(log, log_path, rank_log.limit_of(folder))
    keeper.start(HANDLED)
    code = child.wait()
    at = time.monotonic()
    ended = replace(
        record, ended=time.time(), at=at, asked=bool(ending.forwarded), signal=-code if code < 0 else None,
        exit_code=128 - code if code < 0 else code,
        error=causes.elastic_error(errors) if code else "",
    )  # fmt: skip
    store.write(path, ended)
    keeper.finish()
    ending.finish()
    _let_the_lost_rank_end(log_path, ended, ending.forwarded)
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
