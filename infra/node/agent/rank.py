"""The wrapper of one rank: its output goes to a file named by its global rank; its end is recorded with the time."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from agent import causes, processes, rank_log, store
from cloudddp.agent.protocol import STATUS_VARIABLE
from cloudddp.agent.protocol.jobs import RankRecord
from cloudddp.agent.protocol.verdict import Cause, Failure

FORWARDED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
NOT_STARTED = 127
PAUSE = 0.02  # seconds
ERROR_FILE = (
    "TORCHELASTIC_ERROR_FILE"  # in which torch.distributed.elastic records an exception; torchrun sets it
)
LONGEST_GRACE = 910.0  # seconds: longer than any setting of stop_grace or save_minutes


def main(job: str, *argv: str) -> int:
    """Run the rank and return its exit code.

    torchrun signals this process or its group, depending on the version. The rank is in a group of its own and gets
    each signal once, from here, so that its data-loader workers do not get it before the rank has saved.
    """
    parent = os.getppid()
    folder = store.job_folder(job)
    number = int(os.environ.get("RANK", "0"))
    record = RankRecord(number, None, None)
    path = folder / "ranks" / f"{number}.json"
    own = os.getpid()
    errors = str(folder / "ranks" / f"{number}.error.json")
    reports = {STATUS_VARIABLE: str(folder / store.STATUS_FILE)} if number == 0 else {}

    log_path = folder / "ranks" / f"{number}.log"
    log = open(log_path, "ab")  # noqa: SIM115  as long as this process
    keeper = rank_log.Keeper(log, log_path, rank_log.limit_of(folder))
    try:
        child = subprocess.Popen(
            argv, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
            preexec_fn=lambda: processes.die_with_parent(signal.SIGKILL, own),
            env={ERROR_FILE: errors, **os.environ, **reports},
        )  # fmt: skip
    except OSError as error:
        log.write(f"cannot start {argv[0]}: {error.strerror}\n".encode())
        log.close()
        store.write(path, replace(record, ended=time.time(), at=time.monotonic(), exit_code=NOT_STARTED))
        return NOT_STARTED
    record = replace(record, pid=child.pid)
    forwarded = _forward_signals(child)
    store.write(path, record)
    keeper.start(FORWARDED)
    processes.die_with_parent(signal.SIGTERM, parent)  # of the launcher: its ranks would train on without it
    code = child.wait()
    at = time.monotonic()
    killed_by = -code if code < 0 else None
    ended = replace(
        record, ended=time.time(), at=at, asked=bool(forwarded), signal=killed_by,
        exit_code=128 - code if code < 0 else code,
        error=causes.elastic_error(os.environ.get(ERROR_FILE, errors)) if code else "",
    )  # fmt: skip
    store.write(path, ended)
    keeper.finish()
    _let_the_lost_rank_end(log_path, ended, forwarded)
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


def _forward_signals(child: subprocess.Popen[bytes]) -> set[int]:
    """Forward each signal to the child, once. Return the set of those that were.

    A child that has not ended a while after it was asked is killed: where the agent was killed, too, nobody else would.
    """
    forwarded: set[int] = set()

    def forward(received: int, _: Any) -> None:
        if received not in forwarded:
            forwarded.add(received)
            child.send_signal(received)
            signal.setitimer(signal.ITIMER_REAL, LONGEST_GRACE)

    for number in FORWARDED:
        signal.signal(number, forward)
    signal.signal(signal.SIGALRM, lambda *_: child.kill())
    return forwarded


def _exit_by_signal(number: int) -> None:
    """End by the same signal, so that torchrun reports it."""
    if number not in (signal.SIGKILL, signal.SIGSTOP):
        signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)
