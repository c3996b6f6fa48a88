"""Runs in place of train/main.py: a training in which the connection between two ranks breaks with half a tensor on it.

Before its `--at`th forward pass one rank sends the other, which is stopped by SIGSTOP, a tensor too large for the
buffers of their sockets. The test ends rank 1 then. It must not know what is right.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from train.main import main as train

HELLO, LOAD = 1, 2  # tags
SIZE = 1 << 26


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--at", type=int, required=True)
    parser.add_argument("--sender", type=int, required=True)
    parser.add_argument("--signs", type=Path, required=True, help="where files say what has happened")
    ours, theirs = parser.parse_known_args(argv)
    passes = 0

    def before(module: torch.nn.Module, _inputs: object) -> None:
        nonlocal passes
        passes += isinstance(module, DistributedDataParallel)
        if passes == ours.at and isinstance(module, DistributedDataParallel):
            exchange(sender=ours.sender, signs=ours.signs)

    torch.nn.modules.module.register_module_forward_pre_hook(before)
    return train(theirs)


def exchange(*, sender: int, signs: Path) -> None:
    load, hello = torch.zeros(SIZE, dtype=torch.uint8), torch.zeros(1)
    other = 1 - dist.get_rank()
    if dist.get_rank() == sender:
        dist.recv(hello, src=other, tag=HELLO)  # the other is ready for the load by now
        while not (signs / "stopped").exists():
            time.sleep(0.01)
        sending = dist.isend(load, dst=other, tag=LOAD)
        (signs / "sent").touch()
        sending.wait()
    else:
        receiving = dist.irecv(load, src=other, tag=LOAD)
        dist.send(hello, dst=other, tag=HELLO)
        os.kill(os.getpid(), signal.SIGSTOP)
        receiving.wait()
