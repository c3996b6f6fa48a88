"""A training script as SageMaker's guide to its distributed data parallel library, version 1, writes them.

It stands for the scripts of users: it must not know cloudddp, `train` or torch.distributed, and the tests run it
unchanged. Where the guide's sample leaves something undefined, `dist` is asked; MNIST is replaced by a few random
images, whose class is the row of their brightest pixels.
"""

# Import distributed data parallel library PyTorch API
import argparse

import smdistributed.dataparallel.torch.distributed as dist
import torch
import torch.nn.functional as F  # noqa: N812
import torch.optim as optim

# Import distributed data parallel library PyTorch DDP
from smdistributed.dataparallel.torch.parallel.distributed import DistributedDataParallel as DDP  # noqa: N817
from torch import nn
from torch.optim.lr_scheduler import StepLR

# Initialize distributed data parallel library
if dist.is_available():
    dist.init_process_group()


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(1, 8, 3)
        self.norm = nn.BatchNorm2d(8)
        self.fc = nn.Linear(8 * 6 * 6, 8)

    def forward(self, x):
        x = F.relu(self.norm(self.conv1(x)))
        return F.log_softmax(self.fc(x.flatten(1)), dim=1)


class Images(torch.utils.data.Dataset):
    def __init__(self, count, seed):
        generator = torch.Generator().manual_seed(seed)
        self.targets = torch.randint(0, 8, (count,), generator=generator)
        self.images = torch.randn(count, 1, 8, 8, generator=generator)
        self.images[torch.arange(count), 0, self.targets] += 2.0

    def __len__(self):
        return len(self.targets)

    def __getitem__(self, index):
        return self.images[index], self.targets[index]


def train(model, device, train_loader, optimizer):
    model.train()
    for data, target in train_loader:
        data, target = data.to(device), target.to(device)
        optimizer.zero_grad()
        loss = F.nll_loss(model(data), target)
        loss.backward()
        optimizer.step()


def test(model, device, test_loader, epoch):
    model.eval()
    correct = 0
    with torch.no_grad():
        for data, target in test_loader:
            data, target = data.to(device), target.to(device)
            correct += (model(data).argmax(dim=1) == target).sum().item()
    print(f"epoch {epoch}: {correct} of {len(test_loader.dataset)} right", flush=True)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--start-method", default=None)
    parser.add_argument("--save", required=True)
    args = parser.parse_args()

    use_cuda = torch.cuda.is_available()
    device = torch.device("cuda" if use_cuda else "cpu")
    distributed = dist.is_available()
    world_size = dist.get_world_size() if distributed else 1
    rank = dist.get_rank() if distributed else 0
    torch.manual_seed(1 + rank)

    # Scale batch size by world size: the guide's `world_size // 8` is 0 for fewer than 8
    batch_size = 64
    batch_size //= max(world_size // 8, 1)
    batch_size = max(batch_size, 1)

    # Prepare dataset
    train_dataset = Images(512, seed=1)
    train_sampler = None
    if distributed:
        # Set num_replicas and rank in DistributedSampler
        train_sampler = torch.utils.data.distributed.DistributedSampler(
            train_dataset, num_replicas=dist.get_world_size(), rank=dist.get_rank()
        )
    train_loader = torch.utils.data.DataLoader(
        train_dataset,
        batch_size=batch_size,
        sampler=train_sampler,
        num_workers=args.workers,
        multiprocessing_context=args.start_method if args.workers else None,
    )
    test_loader = torch.utils.data.DataLoader(Images(128, seed=2), batch_size=64)

    model = Net().to(device)
    if distributed:
        # Wrap the PyTorch model with distributed data parallel library's DDP
        model = DDP(model)
        # Pin each GPU to a single distributed data parallel library process.
        if use_cuda:
            torch.cuda.set_device(dist.get_local_rank())
            model.cuda(dist.get_local_rank())

    # Train
    optimizer = optim.Adadelta(model.parameters(), lr=1.0)
    scheduler = StepLR(optimizer, step_size=1, gamma=0.7)
    for epoch in range(1, args.epochs + 1):
        train(model, device, train_loader, optimizer)
        if rank == 0:
            test(model, device, test_loader, epoch)
        scheduler.step()

    # Save model on master node.
    if rank == 0:
        torch.save(model.state_dict(), args.save)


if __name__ == "__main__":
    main()
