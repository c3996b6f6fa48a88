"""Runs train/main.py on two ranks, and leaves half a tensor on the connection between them.

`break_transfer.py AT SENDER SIGNALS FLAGS...`: before its AT-th forward pass rank SENDER sends the other
rank, which is stopped by SIGSTOP, a tensor too large for the buffers of their sockets. The test kills rank 1
then.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from train.main import main
from train.process_exit import exit_process

READY, LOAD = 1, 2  # tags
SIZE = 1 << 26
at, sender, signals = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
passes = 0


def before_forward(module: torch.nn.Module, _inputs: object) -> None:
    global passes
    if isinstance(module, DistributedDataParallel):
        passes += 1
        if passes == at:
            transfer()


def transfer() -> None:
    load, ready = torch.zeros(SIZE, dtype=torch.uint8), torch.zeros(1)
    other = 1 - dist.get_rank()
    if dist.get_rank() == sender:
        dist.recv(ready, src=other, tag=READY)
        while not (signals / "stopped").exists():
            time.sleep(0.01)
        sending = dist.isend(load, dst=other, tag=LOAD)
        (signals / "sent").touch()
        sending.wait()
    else:
        receiving = dist.irecv(load, src=other, tag=LOAD)
        dist.send(ready, dst=other, tag=READY)
        os.kill(os.getpid(), signal.SIGSTOP)
        receiving.wait()


torch.nn.modules.module.register_module_forward_pre_hook(before_forward)
exit_process(main(sys.argv[4:]))
