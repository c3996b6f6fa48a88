"""MNIST in one process, or with DistributedDataParallel in many: `train` and the data are the same in both.

    python mnist.py --fake
    torchrun --standalone --nproc-per-node=2 mnist.py --fake

--fake trains on made-up images; without it, MNIST is read from --data (and fetched once with --download).
"""

from __future__ import annotations

import argparse
import gc
import hashlib
import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812  the usual name
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler, Subset, TensorDataset

DISTRIBUTED = "RANK" in os.environ  # torchrun sets these for each process
RANK = int(os.environ.get("RANK", 0))
LOCAL_RANK = int(os.environ.get("LOCAL_RANK", 0))
# Never computed from the number of nodes: one node may have 4 GPUs and another 2.
WORLD_SIZE = int(os.environ.get("WORLD_SIZE", 1))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.norm1 = nn.Conv2d(1, 32, 3), nn.BatchNorm2d(32)
        self.conv2, self.norm2 = nn.Conv2d(32, 64, 3), nn.BatchNorm2d(64)
        self.fc1, self.fc2 = nn.Linear(1600, 128), nn.Linear(128, 10)

    def forward(self, images: Tensor) -> Tensor:
        x = F.max_pool2d(F.relu(self.norm1(self.conv1(images))), 2)
        x = F.max_pool2d(F.relu(self.norm2(self.conv2(x))), 2)
        x = F.relu(self.fc1(x.flatten(1)))
        return F.log_softmax(self.fc2(x), dim=1)


def load(options: argparse.Namespace, train: bool) -> Dataset[Any]:
    if options.fake:
        patterns = torch.randn(10, 1, 28, 28, generator=torch.Generator().manual_seed(0))
        generator = torch.Generator().manual_seed(1 if train else 2)
        labels = torch.randint(10, (600 if train else 101,), generator=generator)
        images = patterns[labels] + torch.randn(len(labels), 1, 28, 28, generator=generator)
        return TensorDataset(images, labels)
    from torchvision import datasets, transforms

    # One process per node, or the processes of a node would write the same files at the same time. If it
    # fails, it exits, and torchrun ends those that wait for it.
    if options.download and LOCAL_RANK == 0:
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
    model: nn.Module, optimizer: torch.optim.Optimizer, loader: DataLoader[Any], device: torch.device
) -> Tensor:
    """Train for an epoch. Returns the sum of the losses and the number of images, on the device."""
    model.train()
    sums = torch.zeros(2, device=device)
    for images, labels in loader:
        images, labels = images.to(device, non_blocking=True), labels.to(device, non_blocking=True)
        optimizer.zero_grad()
        loss = F.nll_loss(model(images), labels)
        loss.backward()
        optimizer.step()
        sums += torch.stack([loss.detach() * len(labels), torch.tensor(len(labels), device=device)])
    return sums


@torch.no_grad()
def evaluate(net: nn.Module, loader: DataLoader[Any], device: torch.device) -> Tensor:
    """Return the sum of the losses, the number of correct answers and the number of images, on the device."""
    net.eval()
    if DISTRIBUTED:
        # DDP copies rank 0's BatchNorm statistics at the start of a step, so they differ after the last one.
        for buffer in net.buffers():
            dist.broadcast(buffer, src=0)
    sums = torch.zeros(3, device=device)
    for images, labels in loader:
        scores, labels = net(images.to(device)), labels.to(device)
        correct = (scores.argmax(1) == labels).sum()
        sums += torch.stack(
            [F.nll_loss(scores, labels, reduction="sum"), correct, torch.tensor(len(labels), device=device)]
        )
    return sums


def over_ranks(sums: Tensor) -> list[float]:
    """Return the means over all ranks; the last of `sums` is the count."""
    if DISTRIBUTED:
        dist.all_reduce(sums)
    return [*(sums[:-1] / sums[-1]).tolist(), int(sums[-1])]


def save(path: Path, net: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    # `net` is the module inside DDP: its names have no prefix `module.`, so one process can load them, too.
    state = {"model_state_dict": net.state_dict(), "optimizer_state_dict": optimizer.state_dict()}
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(path.name + ".tmp")
    torch.save(state, temporary)
    temporary.replace(path)  # a process that is killed while it writes leaves the old file


def read(path: Path, net: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    # On the CPU first: the GPU that wrote it may not exist here. load_state_dict copies to the device of each
    # parameter.
    state = torch.load(path, map_location="cpu", weights_only=True)
    net.load_state_dict(state["model_state_dict"])
    optimizer.load_state_dict(state["optimizer_state_dict"])


def run(options: argparse.Namespace, device: torch.device) -> None:
    torch.manual_seed(0)
    net = Net().to(device)
    model: nn.Module = net
    if DISTRIBUTED and device.type == "cuda":
        model = DistributedDataParallel(net, device_ids=[LOCAL_RANK], output_device=LOCAL_RANK)
    elif DISTRIBUTED:
        model = DistributedDataParallel(net)  # sends rank 0's weights to all
    optimizer = torch.optim.Adadelta(model.parameters(), lr=options.lr)

    training, test = load(options, train=True), load(options, train=False)
    # Gives each rank its share, in an order that depends on the epoch. It repeats some images if they cannot
    # be divided, which a test must not: there each image goes to one rank.
    sampler: DistributedSampler[Any] = DistributedSampler(training, WORLD_SIZE, RANK, seed=0)
    share = Subset(test, range(RANK, len(test), WORLD_SIZE))  # type: ignore[arg-type]
    pin = device.type == "cuda"
    loader: DataLoader[Any] = DataLoader(training, options.batch_size, sampler=sampler, pin_memory=pin)
    test_loader: DataLoader[Any] = DataLoader(share, options.batch_size)

    for epoch in range(1, options.epochs + 1):
        sampler.set_epoch(epoch)
        loss, _ = over_ranks(train(model, optimizer, loader, device))
        test_loss, accuracy, count = over_ranks(evaluate(net, test_loader, device))
        if RANK == 0:
            result = f"test loss {test_loss:.4f}, accuracy {accuracy:.4f} of {count} images"
            print(f"epoch {epoch}: {len(loader)} steps, loss {loss:.6f}, {result}")

    if options.checkpoint:
        if (LOCAL_RANK if options.checkpoint_per_node else RANK) == 0:
            save(options.checkpoint, net, optimizer)
        if DISTRIBUTED:
            dist.barrier()  # the file is complete when the other ranks read it
        read(options.checkpoint, net, optimizer)
    weights = torch.nn.utils.parameters_to_vector(net.parameters()).detach().cpu()
    hashes: list[Any] = [hashlib.sha256(weights.numpy().tobytes()).hexdigest()[:12]]
    if DISTRIBUTED:
        own, hashes = hashes[0], [None] * WORLD_SIZE
        dist.all_gather_object(hashes, own)
    if RANK == 0:
        print("weights of each rank:", *hashes)


def main() -> None:
    parser = argparse.ArgumentParser(description="MNIST in one process or in many.")
    parser.add_argument("--data", default="data", help="folder of the dataset")
    parser.add_argument("--download", action="store_true", help="fetch it first, once per node")
    parser.add_argument("--fake", action="store_true", help="made-up images of the same shape")
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--batch-size", type=int, default=64, help="images per step and rank")
    parser.add_argument("--lr", type=float, default=0.01)
    parser.add_argument(
        "--checkpoint", type=Path, help="file that rank 0 writes and all ranks read (shared storage)"
    )
    parser.add_argument(
        "--checkpoint-per-node", action="store_true", help="local rank 0 of each node writes it"
    )
    options = parser.parse_args()
    device = torch.device("cuda", LOCAL_RANK) if torch.cuda.is_available() else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if DISTRIBUTED:
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    try:
        run(options, device)
    finally:
        if DISTRIBUTED:
            gc.collect()  # frees the model, so that gloo's threads end with the group
            dist.destroy_process_group()


if __name__ == "__main__":
    main()
