"""MNIST with SageMaker's smdistributed.dataparallel where it is installed, otherwise with torch.distributed.

    python sagemaker_ddp.py --fake
    torchrun --standalone --nproc-per-node=2 sagemaker_ddp.py --fake
    PYTHONPATH=../../train/smddp torchrun --standalone --nproc-per-node=2 sagemaker_ddp.py --fake

The last one uses this repository's stand-in for the library (docs/smddp.md).
"""

from __future__ import annotations

import argparse
import gc
import os
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812  the usual name
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler, Subset, TensorDataset

try:
    import smdistributed.dataparallel.torch.distributed as dist
    from smdistributed.dataparallel.torch.parallel.distributed import DistributedDataParallel

    LIBRARY = "smdistributed.dataparallel"
    DISTRIBUTED = dist.is_available()  # whether the script was started as a job
except ImportError:
    import torch.distributed as dist  # type: ignore[no-redef]
    from torch.nn.parallel import DistributedDataParallel  # type: ignore[assignment]

    LIBRARY = "torch.distributed"
    DISTRIBUTED = "RANK" in os.environ  # torch's is_available() says only whether torch was built with it


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(1, 16, 3, stride=2), nn.Conv2d(16, 32, 3, stride=2)
        self.fc1, self.fc2 = nn.Linear(1152, 64), nn.Linear(64, 10)

    def forward(self, images: Tensor) -> Tensor:
        x = F.relu(self.conv2(F.relu(self.conv1(images))))
        return F.log_softmax(self.fc2(F.relu(self.fc1(x.flatten(1)))), dim=1)


def load(options: argparse.Namespace, train: bool) -> Dataset[Any]:
    if options.fake:
        patterns = torch.randn(10, 1, 28, 28, generator=torch.Generator().manual_seed(0))
        generator = torch.Generator().manual_seed(1 if train else 2)
        labels = torch.randint(10, (600 if train else 101,), generator=generator)
        images = patterns[labels] + torch.randn(len(labels), 1, 28, 28, generator=generator)
        return TensorDataset(images, labels)
    from torchvision import datasets, transforms

    # One process of each node, while the others wait.
    if options.download and int(os.environ.get("LOCAL_RANK", 0)) == 0:
        datasets.MNIST(options.data, download=True)
    if DISTRIBUTED:
        dist.barrier()
    steps = [transforms.ToTensor(), transforms.Normalize((0.1307,), (0.3081,))]
    try:
        mnist: Dataset[Any] = datasets.MNIST(options.data, train=train, transform=transforms.Compose(steps))
    except RuntimeError:
        raise SystemExit(
            f"no MNIST in {options.data}: add --download, or --fake for made-up images"
        ) from None
    return mnist


def train(
    model: nn.Module, loader: DataLoader[Any], optimizer: torch.optim.Optimizer, device: torch.device
) -> Tensor:
    """Return the sum of the losses and the number of images, on the device."""
    model.train()
    sums = torch.zeros(2, device=device)
    for images, labels in loader:
        optimizer.zero_grad()
        loss = F.nll_loss(model(images.to(device)), labels.to(device))
        loss.backward()
        optimizer.step()
        sums += torch.stack([loss.detach() * len(labels), torch.tensor(len(labels), device=device)])
    return sums


@torch.no_grad()
def test(net: nn.Module, loader: DataLoader[Any], device: torch.device) -> Tensor:
    """Return the number of correct answers and of images, on the device."""
    net.eval()
    sums = torch.zeros(2, device=device)
    for images, labels in loader:
        correct = (net(images.to(device)).argmax(1) == labels.to(device)).sum()
        sums += torch.stack([correct, torch.tensor(len(labels), device=device)])
    return sums


def mean(sums: Tensor) -> float:
    if DISTRIBUTED:
        dist.all_reduce(sums)
    return (sums[0] / sums[1]).item()


def run(options: argparse.Namespace, device: torch.device, rank: int, world_size: int) -> None:
    torch.manual_seed(0)
    net = Net().to(device)
    # The library does not send buffers such as BatchNorm's statistics from rank 0. This model has none.
    model = DistributedDataParallel(net) if DISTRIBUTED else net
    training, testing = load(options, train=True), load(options, train=False)
    # world_size // 8 is 0 for fewer than eight ranks: nothing can be divided by that.
    batch_size = max(options.batch_size // max(world_size // 8, 1), 1)
    sampler: DistributedSampler[Any] = DistributedSampler(training, num_replicas=world_size, rank=rank)
    loader: DataLoader[Any] = DataLoader(training, batch_size, sampler=sampler)
    # All ranks test, each its share: if rank 0 did it alone, the others would wait for it.
    share = Subset(testing, range(rank, len(testing), world_size))  # type: ignore[arg-type]
    test_loader: DataLoader[Any] = DataLoader(share, batch_size)
    optimizer = torch.optim.Adadelta(model.parameters(), lr=options.lr)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.7)
    for epoch in range(1, options.epochs + 1):
        sampler.set_epoch(epoch)
        loss, accuracy = mean(train(model, loader, optimizer, device)), mean(test(net, test_loader, device))
        schedule.step()
        if rank == 0:
            result = f"{len(loader)} steps, loss {loss:.6f}, accuracy {accuracy:.4f}"
            print(f"{LIBRARY}, rank 0 of {world_size}, epoch {epoch}: {result}")
    weights = torch.nn.utils.parameters_to_vector(net.parameters()).detach()
    least, most = weights.clone(), weights.clone()
    if DISTRIBUTED:
        dist.all_reduce(least, op=dist.ReduceOp.MIN)
        dist.all_reduce(most, op=dist.ReduceOp.MAX)
    if rank == 0:
        print(f"largest difference between weights of two ranks: {(most - least).max().item()}")
    if rank == 0 and options.save:
        torch.save(net.state_dict(), options.save)


def main() -> None:
    parser = argparse.ArgumentParser(description="MNIST with SageMaker's data parallel library.")
    parser.add_argument("--data", default="data", help="folder of the dataset")
    parser.add_argument("--download", action="store_true", help="fetch it first, once per node")
    parser.add_argument("--fake", action="store_true", help="made-up images of the same shape")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument(
        "--batch-size", type=int, default=64, help="images per step and rank, for up to 15 ranks"
    )
    parser.add_argument("--lr", type=float, default=1.0)
    parser.add_argument("--save", metavar="FILE", help="rank 0 writes the weights to this file")
    options = parser.parse_args()

    cuda = torch.cuda.is_available()
    rank, local_rank, world_size = 0, 0, 1
    if DISTRIBUTED:
        if LIBRARY == "torch.distributed":
            dist.init_process_group("nccl" if cuda else "gloo")
            local_rank = int(os.environ["LOCAL_RANK"])
        else:
            dist.init_process_group()
            local_rank = dist.get_local_rank()
        rank, world_size = dist.get_rank(), dist.get_world_size()
    # Before the model is wrapped, which communicates already.
    device = torch.device("cuda", local_rank) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)

    try:
        run(options, device, rank, world_size)
    finally:
        if DISTRIBUTED and LIBRARY == "torch.distributed":
            gc.collect()  # frees the model, so that gloo's threads end with the group
            dist.destroy_process_group()  # type: ignore[attr-defined]


if __name__ == "__main__":
    main()
