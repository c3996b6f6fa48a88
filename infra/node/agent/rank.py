"""The wrapper of one rank: its output goes to a file named by its global rank; its end is recorded with the time.

Between the launcher and the user's script, every rank waits for the start of this process. So it imports the rest of the
agent only once the rank runs.
"""

from __future__ import annotations

import os
import signal
import subprocess
from typing import Any, BinaryIO, Union

from agent import prctl
from cloudddp.agent.protocol import STATUS_VARIABLE

FORWARDED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
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
    number = int(os.environ.get("RANK", "0"))
    ranks = os.path.join(os.path.expanduser("~"), ".cloudddp", "jobs", job, "ranks")  # store.job_folder
    log = open(os.path.join(ranks, f"{number}.log"), "ab")  # noqa: SIM115  as long as this process
    errors = os.path.join(ranks, f"{number}.error.json")
    status = os.path.join(os.path.dirname(ranks), "status.json")  # store.STATUS_FILE
    reports = {STATUS_VARIABLE: status} if number == 0 else {}
    child = _start(argv, log, {ERROR_FILE: errors, **os.environ, **reports})
    forwarded: set[int] = set()
    if not isinstance(child, OSError):
        _forward_signals(child, forwarded)
        prctl.die_with_parent(signal.SIGTERM, parent)  # of the launcher: its ranks would train on without it
    from agent import rank_end

    if isinstance(child, OSError):
        return rank_end.not_started(job, number, log, f"cannot start {argv[0]}: {child.strerror}\n")
    code = rank_end.wait(job, number, log, child, forwarded, os.environ.get(ERROR_FILE, errors))
    if code < 0:
        _exit_by_signal(-code)
    return code


def _start(
    argv: tuple[str, ...], log: BinaryIO, env: dict[str, str]
) -> Union[subprocess.Popen[bytes], OSError]:
    own = os.getpid()
    try:
        return subprocess.Popen(
            argv, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True, env=env,
            preexec_fn=lambda: prctl.die_with_parent(signal.SIGKILL, own),
        )  # fmt: skip
    except OSError as error:
        return error


def _forward_signals(child: subprocess.Popen[bytes], forwarded: set[int]) -> None:
    """Forward each signal to the child, once, and add it to `forwarded`.

    A child that has not ended a while after it was asked is killed: where the agent was killed, too, nobody else would.
    """

    def forward(received: int, _: Any) -> None:
        if received not in forwarded:
            forwarded.add(received)
            child.send_signal(received)
            signal.setitimer(signal.ITIMER_REAL, LONGEST_GRACE)

    for number in FORWARDED:
        signal.signal(number, forward)
    signal.signal(signal.SIGALRM, lambda *_: child.kill())


def _exit_by_signal(number: int) -> None:
    """End by the same signal, so that torchrun reports it."""
    if number not in (signal.SIGKILL, signal.SIGSTOP):
        signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)
