"""A small training script for the Slurm lab: DDP on gloo in float64, snapshots, resume, and exit code 143
after SIGTERM.

`--hold STEP`: the first attempt of a job stays at this step, so that a test can end it there.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time
from pathlib import Path
from typing import NoReturn

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

STEPS = 12


def main() -> None:
    arguments = argparse.ArgumentParser()
    arguments.add_argument("--out", type=Path, required=True)
    arguments.add_argument("--hold", type=int, default=-1)
    args = arguments.parse_args()
    asked: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _: asked.append(number))
    first_attempt = os.environ.get("SLURM_RESTART_COUNT", "0") == "0"

    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    layers = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
    model = DistributedDataParallel(layers.double())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    step = 0
    if args.out.exists():
        state = torch.load(args.out)
        layers.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        step = state["step"]
    if rank == 0:
        print(f"begin at step {step} of {STEPS}, {world} ranks", flush=True)

    def save() -> None:
        if rank == 0:
            partial = args.out.with_suffix(".partial")
            torch.save(
                {"model": layers.state_dict(), "optimizer": optimizer.state_dict(), "step": step}, partial
            )
            partial.replace(args.out)
        dist.barrier()

    def stop_if_asked() -> None:
        """All ranks stop at the same step, also where only one got the signal."""
        flag = torch.tensor(float(len(asked)))
        dist.all_reduce(flag)
        if flag:
            save()
            print(f"rank {rank}: {len(asked)} x SIGTERM, saved at step {step}", flush=True)
            end(143)

    while step < STEPS:
        if first_attempt and step == args.hold:
            save()
            print(f"rank {rank} holds", flush=True)
            while True:
                time.sleep(0.1)
                stop_if_asked()
        generator = torch.Generator().manual_seed(1000 * step + rank)
        inputs = torch.randn(16, 6, dtype=torch.float64, generator=generator)
        loss = (model(inputs) - inputs.sum(1, keepdim=True)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        step += 1
        stop_if_asked()
    save()
    end(0)


def end(code: int) -> NoReturn:
    """End without Python's shutdown: gloo's threads may outlive the group, and would abort it
    (train/process_exit.py)."""
    dist.destroy_process_group()
    sys.stdout.flush()
    os._exit(code)


main()
