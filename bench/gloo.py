"""The job of `python -m bench training`: 200 DDP steps of a small model over gloo, on random data.

Runs on the ranks, under torchrun, and does not import cloudddp. All ranks check that they have the same final weights.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

STEPS = 200


def main() -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(dist.get_rank())
    network = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 10))
    model = DistributedDataParallel(network)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(STEPS):
        loss = torch.nn.functional.cross_entropy(model(torch.randn(32, 64)), torch.randint(10, (32,)))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    total = torch.tensor([sum(float(weights.detach().sum()) for weights in model.parameters())])
    every = [torch.zeros(1) for _ in range(dist.get_world_size())]
    dist.all_gather(every, total)
    assert all(torch.equal(total, one) for one in every)
    dist.barrier()  # without it a rank that exits first may break the last exchange of the others
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
