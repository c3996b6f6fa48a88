"""Model and data parallelism together: each process has a model on two devices, DistributedDataParallel joins
them.

    python hybrid.py
    torchrun --standalone --nproc-per-node=2 hybrid.py

Start half as many processes per node as it has GPUs: 2 processes for 4 GPUs. With too few GPUs, all devices
are the CPU.
"""

from __future__ import annotations

import argparse
import hashlib
import os
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

DISTRIBUTED = "RANK" in os.environ
RANK = int(os.environ.get("RANK", 0))
LOCAL_RANK = int(os.environ.get("LOCAL_RANK", 0))
LOCAL_WORLD_SIZE = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
WORLD_SIZE = int(os.environ.get("WORLD_SIZE", 1))


class TwoDevices(nn.Module):
    def __init__(self, first: torch.device, second: torch.device) -> None:
        super().__init__()
        self.first, self.second = first, second
        self.net1 = nn.Linear(10, 10).to(first)
        self.net2 = nn.Linear(10, 5).to(second)

    def forward(self, inputs: Tensor) -> Tensor:
        # DDP moves inputs to a device only if the module has one, so this module moves them itself.
        hidden = torch.relu(self.net1(inputs.to(self.first)))
        output: Tensor = self.net2(hidden.to(self.second))
        return output


def run(options: argparse.Namespace, first: torch.device, second: torch.device) -> None:
    torch.manual_seed(0)
    local = TwoDevices(first, second)
    model: nn.Module = local
    if DISTRIBUTED:
        # device_ids and output_device say which one GPU holds the module. Here two do: neither may be given.
        model = DistributedDataParallel(local)
    optimizer = torch.optim.SGD(model.parameters(), lr=options.lr)

    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(256, 10, generator=generator)
    targets = torch.relu(inputs @ torch.randn(10, 5, generator=generator))
    seen = 0
    for epoch in range(options.epochs):
        total = torch.zeros((), device=second)
        # The same on every rank.
        batches = torch.randperm(len(inputs), generator=generator).split(options.batch_size)
        for batch in batches:
            # Equal shares: then the mean over the ranks is that over the batch.
            own = batch[RANK::WORLD_SIZE]
            seen += len(own)
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(model(inputs[own]), targets[own].to(second))
            loss.backward()
            optimizer.step()
            total += loss.detach() / len(batches)
        if DISTRIBUTED:
            dist.all_reduce(total)
        if RANK == 0:
            print(f"epoch {epoch}: loss {total.item() / WORLD_SIZE:.6f}")

    weights = torch.cat([parameter.detach().cpu().flatten() for parameter in local.parameters()])
    own_report = (
        f"{hashlib.sha256(weights.numpy().tobytes()).hexdigest()[:12]} ({first}, {second}) after "
        f"{seen} samples"
    )
    reports: list[Any] = [own_report]
    if DISTRIBUTED:
        reports = [None] * WORLD_SIZE
        dist.all_gather_object(reports, own_report)
    for rank, report in enumerate(reports if RANK == 0 else []):
        print(f"weights of rank {rank}: {report}")


def main() -> None:
    parser = argparse.ArgumentParser(description="Replicas of a model on two devices each.")
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument(
        "--batch-size", type=int, default=32, help="samples per step over all ranks; divisible by them"
    )
    parser.add_argument("--lr", type=float, default=0.1)
    options = parser.parse_args()
    if options.batch_size % WORLD_SIZE or 256 % options.batch_size:
        parser.error(
            f"--batch-size {options.batch_size}: must divide 256 and be a multiple of {WORLD_SIZE} ranks"
        )

    gpus = torch.cuda.device_count() >= 2 * LOCAL_WORLD_SIZE
    first = second = torch.device("cpu")
    if gpus:
        # By local rank: rank 2 is the first of the second node, and uses that node's GPUs 0 and 1.
        first, second = torch.device("cuda", 2 * LOCAL_RANK), torch.device("cuda", 2 * LOCAL_RANK + 1)
        torch.cuda.set_device(first)
    if DISTRIBUTED:
        dist.init_process_group("nccl" if gpus else "gloo")
    try:
        run(options, first, second)
    finally:
        if DISTRIBUTED:
            dist.destroy_process_group()


if __name__ == "__main__":
    main()
