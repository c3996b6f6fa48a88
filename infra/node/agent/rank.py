"""The wrapper of one rank: its output goes to a file named by its global rank; its end is recorded with the time."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import time
from dataclasses import replace
from typing import Any

from agent import rank_log, store
from cloudddp.agent.protocol import STATUS_VARIABLE
from cloudddp.agent.protocol.jobs import RankRecord

PR_SET_PDEATHSIG = 1
FORWARDED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
NOT_STARTED = 127


def main(job: str, *argv: str) -> int:
    """Run the rank and return its exit code.

    torchrun signals this process or its group, depending on the version. The rank is in a group of its own and gets
    each signal once, from here, so that its data-loader workers do not get it before the rank has saved.
    """
    folder = store.job_folder(job)
    number = int(os.environ.get("RANK", "0"))
    record = RankRecord(number, None, None)
    path = folder / "ranks" / f"{number}.json"
    libc = ctypes.CDLL(None)
    reports = {STATUS_VARIABLE: str(folder / store.STATUS_FILE)} if number == 0 else {}

    def die_with_parent() -> None:
        libc.prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL))  # the rank is killed with its wrapper

    log_path = folder / "ranks" / f"{number}.log"
    log = open(log_path, "ab")  # noqa: SIM115  as long as this process
    keeper = rank_log.Keeper(log, log_path, rank_log.limit_of(folder))
    try:
        child = subprocess.Popen(
            argv, stdin=subprocess.DEVNULL, stdout=log, stderr=log, preexec_fn=die_with_parent,
            start_new_session=True, env={**os.environ, **reports},
        )  # fmt: skip
    except OSError as error:
        log.write(f"cannot start {argv[0]}: {error.strerror}\n".encode())
        log.close()
        store.write(path, replace(record, ended=time.time(), exit_code=NOT_STARTED))
        return NOT_STARTED
    record = replace(record, pid=child.pid)
    _forward_signals(child)
    store.write(path, record)
    keeper.start(FORWARDED)
    code = child.wait()
    killed_by = -code if code < 0 else None
    store.write(
        path,
        replace(record, ended=time.time(), exit_code=128 - code if code < 0 else code, signal=killed_by),
    )
    keeper.finish()
    if killed_by is not None:
        _exit_by_signal(killed_by)
    return code


def _forward_signals(child: subprocess.Popen[bytes]) -> None:
    """Forward each signal to the child, once."""
    forwarded: set[int] = set()

    def forward(received: int, _: Any) -> None:
        if received not in forwarded:
            forwarded.add(received)
            child.send_signal(received)

    for number in FORWARDED:
        signal.signal(number, forward)


def _exit_by_signal(number: int) -> None:
    """End by the same signal, so that torchrun reports it."""
    if number not in (signal.SIGKILL, signal.SIGSTOP):
        signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)
