"""Forks ranks on demand from a process that has imported torch, since that import is most of what a short job costs.

Reads a wish per line on stdin and answers it on stdout: {"run": MODULE, "argv", "env", "output"} starts a process
and answers its pid; {"poll": PID} answers its exit code, or null while it runs. It must not start a thread, nor
compute anything: a fork copies neither torch's threads nor the state that they leave behind.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import sys
import threading
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch._dynamo
import torch.distributed.checkpoint.state_dict
import torch.distributed.elastic.multiprocessing.errors  # noqa: F401  (what a run imports)

import train.trainer  # noqa: F401
from train import preempt
from train.main import leave


def answer(wish: dict[str, Any]) -> int | None:
    if "poll" in wish:
        pid, status = os.waitpid(wish["poll"], os.WNOHANG)
        return os.waitstatus_to_exitcode(status) if pid else None
    ours, its = os.pipe()
    pid = os.fork()
    if not pid:
        become(wish, ready=its)
    os.close(its)
    os.read(ours, 1)  # until it has closed its end, dead or alive
    os.close(ours)
    return pid


def become(wish: dict[str, Any], *, ready: int) -> None:
    """Be the process that was wished for. Closes `ready` once it can be killed by its session and its output can be
    read. Does not return."""
    os.setsid()
    # A shell has what it starts in the background ignore SIGINT, tests included, and all processes inherit that.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    preempt.end_quietly()  # as train/main.py does where it is started as a program
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    for number, suffix in ((1, "out"), (2, "err")):
        path = f"{wish['output']}.{suffix}"
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
    os.close(ready)
    os.environ.update(wish["env"])
    code = 99
    try:
        code = importlib.import_module(wish["run"]).main(wish["argv"])
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 1
    except BaseException:
        sys.excepthook(*sys.exc_info())
    leave(code)


def main() -> None:
    assert threading.active_count() == 1
    for line in sys.stdin:
        print(json.dumps(answer(json.loads(line))), flush=True)


if __name__ == "__main__":
    main()
