"""What the wrapper of a rank records: that the rank runs, and how it ended."""

from __future__ import annotations

import subprocess
import time
from dataclasses import replace
from typing import BinaryIO

from agent import causes, rank_log, store
from agent.rank import FORWARDED
from cloudddp.agent.protocol.jobs import RankRecord

NOT_STARTED = 127


def not_started(job: str, rank: int, log: BinaryIO, reason: str) -> int:
    """Record that the rank's command cannot be started; return the exit code for that."""
    log.write(reason.encode())
    log.close()
    ended = RankRecord(rank, NOT_STARTED, time.time(), at=time.monotonic())
    store.write(store.job_folder(job) / "ranks" / f"{rank}.json", ended)
    return NOT_STARTED


def wait(
    job: str,
    rank: int,
    log: BinaryIO,
    child: subprocess.Popen[bytes],
    forwarded: set[int],
    errors: str,
) -> int:
    """Wait for the end of the rank, record it, and return its exit code, -N after signal N.

    `forwarded` are the signals that were passed on to it so far; `errors` is the file of torch.distributed.elastic.
    """
    folder = store.job_folder(job)
    path = folder / "ranks" / f"{rank}.json"
    record = RankRecord(rank, None, None, pid=child.pid)
    store.write(path, record)
    keeper = rank_log.Keeper(log, folder / "ranks" / f"{rank}.log", rank_log.limit_of(folder))
    keeper.start(FORWARDED)
    code = child.wait()
    at = time.monotonic()
    ended = replace(
        record, ended=time.time(), at=at, asked=bool(forwarded), signal=-code if code < 0 else None,
        exit_code=128 - code if code < 0 else code,
        error=causes.elastic_error(errors) if code else "",
    )  # fmt: skip
    store.write(path, ended)
    keeper.finish()
    return code
