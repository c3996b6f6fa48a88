"""The wrapper of one rank: its output goes to a file named by its global rank; its end is recorded with the
time.

Between the launcher and the user's script, every rank waits for the start of this process. So it imports the
rest of the agent only once the rank runs.
"""

from __future__ import annotations

import os
import signal
import subprocess
from typing import BinaryIO, Union

from agent.node import kernel
from cloudddp.agent.protocol import NOT_STARTED, STATUS_VARIABLE, STEP_VARIABLE, SUPERVISOR_VARIABLE

# In which torch.distributed.elastic records an exception; torchrun sets it.
ERROR_FILE = "TORCHELASTIC_ERROR_FILE"


def main(job: str, *argv: str) -> int:
    """Run the rank and return its exit code.

    torchrun signals this process or its group, depending on the version. The rank is in a group of its own
    and gets each signal once, from here, so that its data-loader workers do not get it before the rank has
    saved.
    """
    # Of the launcher, without which the rank would train on.
    kernel.die_with_parent(signal.SIGTERM, os.getppid())
    kernel.set_name(kernel.WRAPS_A_RANK)
    supervisor = os.environ.pop(SUPERVISOR_VARIABLE, "")
    if kernel.name(int(supervisor.partition(":")[0] or 0)) != supervisor:
        return NOT_STARTED  # the launcher may live on, or has been ended, too
    number = int(os.environ.get("RANK", "0"))
    folder = os.path.join(os.path.expanduser("~"), ".cloudddp", "jobs", job)  # store.job_folder
    ranks = os.path.join(folder, "ranks")
    log = open(os.path.join(ranks, f"{number}.log"), "ab")  # noqa: SIM115  as long as this process
    errors = os.path.join(ranks, f"{number}.error.json")
    reports = {STEP_VARIABLE: os.path.join(folder, "steps", f"{number}.json")}  # store.step_file
    if number == 0:
        reports[STATUS_VARIABLE] = os.path.join(folder, "status.json")  # store.STATUS_FILE
    given = {ERROR_FILE: errors, "PYTHONFAULTHANDLER": "1", **_node_variables(), **os.environ}
    child = _start(argv, log, {**given, **reports})
    from agent.ranks import rank_end  # 100 ms or more, in which the rank itself can start

    if isinstance(child, OSError):
        return rank_end.not_started(job, number, log, f"cannot start {argv[0]}: {child.strerror}\n")
    code = rank_end.wait(job, number, log, child, os.environ.get(ERROR_FILE, errors))
    if code < 0:
        if -code not in (signal.SIGKILL, signal.SIGSTOP):
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)  # the same signal, so that torchrun reports it
    return code


def _node_variables() -> dict[str, str]:
    """Return NODE_RANK and NNODES, which torchrun does not set and many programs read. NODE_RANK is
    torchrun's group rank: its rendezvous may order the nodes in another way than the cluster does."""
    names = {"NODE_RANK": "GROUP_RANK", "NNODES": "CLOUDDDP_NUM_NODES"}
    return {name: os.environ[known] for name, known in names.items() if known in os.environ}


def _start(
    argv: tuple[str, ...], log: BinaryIO, env: dict[str, str]
) -> Union[subprocess.Popen[bytes], OSError]:
    """Start the rank. Signals to this process wait from then on until rank_end, which is imported meanwhile,
    forwards them: their default action would end the rank, which gets no time to save."""
    end_with_wrapper = kernel.death_signal(signal.SIGKILL)
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, kernel.ASK_TO_END)

    def prepare() -> None:
        end_with_wrapper()
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)

    try:
        return subprocess.Popen(
            argv,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
            env=env,
            preexec_fn=prepare,
        )
    except OSError as error:
        return error
