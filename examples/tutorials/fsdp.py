"""Fully sharded data parallel: each rank holds a part of the parameters, of their gradients and of the
optimizer state.

    python fsdp.py
    torchrun --standalone --nproc-per-node=2 fsdp.py

Needs torch 2.6 or newer. Both commands train on the same global batches, and give the same weights up to
rounding.
"""

from __future__ import annotations

import argparse
import os

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

DISTRIBUTED = "RANK" in os.environ
RANK = int(os.environ.get("RANK", 0))
LOCAL_RANK = int(os.environ.get("LOCAL_RANK", 0))
WORLD_SIZE = int(os.environ.get("WORLD_SIZE", 1))
WIDTH = 64


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, inputs: Tensor) -> Tensor:
        output: Tensor = inputs + self.down(torch.relu(self.up(inputs)))
        return output


def elements(tensor: Tensor) -> int:
    """Return how many elements of it this rank holds."""
    return tensor.to_local().numel() if isinstance(tensor, DTensor) else tensor.numel()


def run(options: argparse.Namespace, device: torch.device) -> None:
    # The same seed on every rank. DDP would send rank 0's weights to all; fully_shard keeps each rank's own
    # part.
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(20, WIDTH), *[Block() for _ in range(4)], nn.Linear(WIDTH, 1)).to(device)
    total = sum(parameter.numel() for parameter in model.parameters())
    if DISTRIBUTED:
        # A block is gathered when it runs, in the forward and again in the backward pass, and freed after it.
        # The last call covers what is not in a block.
        for module in model:
            if isinstance(module, Block):
                fully_shard(module)
        fully_shard(model)
    # After sharding, so that it gets the sharded parameters: its state has their shards and is never
    # gathered.
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.lr)

    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(512, 20, generator=generator)
    targets = torch.sin(inputs @ torch.randn(20, 1, generator=generator))
    seen = 0
    for epoch in range(options.epochs):
        sums = torch.zeros((), device=device)
        # The same on every rank.
        batches = torch.randperm(len(inputs), generator=generator).split(options.batch_size)
        for batch in batches:
            own = batch[RANK::WORLD_SIZE]
            seen += len(own)
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(model(inputs[own].to(device)), targets[own].to(device))
            loss.backward()  # each gradient is summed over the ranks, and each rank gets its part of the mean
            optimizer.step()
            sums += loss.detach() / len(batches)
        if DISTRIBUTED:
            dist.all_reduce(sums)
        if RANK == 0:
            print(f"epoch {epoch}: loss {sums.item() / WORLD_SIZE:.6f}")

    parameters = sum(elements(parameter) for parameter in model.parameters())
    gradients = sum(
        elements(parameter.grad) for parameter in model.parameters() if parameter.grad is not None
    )
    moments = sum(
        elements(state["exp_avg"]) + elements(state["exp_avg_sq"]) for state in optimizer.state.values()
    )
    if RANK == 0:
        held = f"{parameters} of {total} parameters, {gradients} gradients, {moments} optimizer values"
        print(f"rank 0 has seen {seen} samples and holds {held}")
    if options.save:
        # Gathers the weights, so every rank has to call it. Only rank 0 gets them, one tensor at a time.
        whole = StateDictOptions(full_state_dict=True, cpu_offload=True)
        state = get_model_state_dict(model, options=whole)
        if RANK == 0:
            torch.save(state, options.save)


def main() -> None:
    parser = argparse.ArgumentParser(description="A small network, sharded over the ranks.")
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument(
        "--batch-size", type=int, default=64, help="samples per step over all ranks; divisible by them"
    )
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--save", metavar="FILE", help="write the whole weights to this file")
    options = parser.parse_args()
    if options.batch_size % WORLD_SIZE or 512 % options.batch_size:
        parser.error(
            f"--batch-size {options.batch_size}: must divide 512 and be a multiple of {WORLD_SIZE} ranks"
        )

    device = torch.device("cuda", LOCAL_RANK) if torch.cuda.is_available() else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if DISTRIBUTED:
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    try:
        run(options, device)
    finally:
        if DISTRIBUTED:
            dist.destroy_process_group()


if __name__ == "__main__":
    main()
