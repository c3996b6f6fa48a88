"""ResNet-18 on STL-10: one command per process, with meters, step decay and validation.

    python stl10.py 0 0 --download        # RANK LOCAL_RANK
    torchrun --standalone --nproc-per-node=gpu stl10.py --download

For two processes without torchrun, start `python stl10.py 0 0` and `python stl10.py 1 1`, both with
`--world-size 2` and the same --init-method: tcp://HOST:PORT of rank 0, file:///PATH on storage that all nodes
share, or env://. README.md has commands for a computer without GPU and dataset.
"""

from __future__ import annotations

import argparse
import gc
import math
import os
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler, Subset
from torchvision import datasets, models, transforms


class AverageMeter:
    """The latest value and the average of all."""

    def __init__(self) -> None:
        self.val = self.avg = self.sum = self.count = 0.0

    def update(self, val: float, n: int = 1) -> None:
        self.val, self.sum, self.count = val, self.sum + val * n, self.count + n
        self.avg = self.sum / self.count

    def __str__(self) -> str:
        return f"{self.val:.3f} ({self.avg:.3f})"


class Results:
    """Sums of loss, top-1 and top-5 hits and images, of the latest batch and of all. They stay on the device:
    to read one at each step would make each step wait for the GPU."""

    def __init__(self, device: torch.device) -> None:
        self.latest, self.all = torch.zeros(4, device=device), torch.zeros(4, device=device)

    def update(self, loss: Tensor, output: Tensor, target: Tensor) -> None:
        hits = output.topk(5, dim=1).indices == target[:, None]
        count = torch.tensor(len(target), device=loss.device)
        self.latest = torch.stack(
            [loss.detach() * len(target), 100 * hits[:, 0].sum(), 100 * hits.sum(), count]
        )
        self.all += self.latest

    def over_ranks(self) -> tuple[list[float], list[float]]:
        """Return (loss, top-1 %, top-5 %) of the latest batch and of all, over the ranks, which all have to
        call this."""
        sums = torch.stack([self.latest, self.all])
        dist.all_reduce(sums)
        latest, average = (sums[:, :3] / sums[:, 3:]).tolist()
        return latest, average

    def line(self) -> str:
        names, (latest, average) = ("Loss", "Prec@1", "Prec@5"), self.over_ranks()
        return "\t".join(f"{name} {val:.4f} ({avg:.4f})" for name, val, avg in zip(names, latest, average))


class FakeImages(Dataset[Any]):
    """Images of STL-10's size. The class determines the mean colour."""

    def __init__(self, size: int, seed: int, transform: Any) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.labels, self.transform = torch.randint(10, (size,), generator=generator), transform
        self.noise = 0.1 * torch.rand(size, 3, 96, 96, generator=generator)

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        label = int(self.labels[index])
        colour = torch.tensor([label % 3, label // 3 % 3, label // 9]).view(3, 1, 1) * 0.3
        return self.transform(transforms.functional.to_pil_image(colour + self.noise[index])), label


def load(options: argparse.Namespace) -> tuple[Dataset[Any], Dataset[Any]]:
    resize = transforms.Resize((options.image_size, options.image_size))
    transform = transforms.Compose(
        [resize, transforms.ToTensor(), transforms.Normalize((0.5,) * 3, (0.5,) * 3)]
    )
    if options.fake:
        return FakeImages(90, 0, transform), FakeImages(65, 1, transform)
    # One process per node downloads (2.6 GB) and unpacks, while the others wait.
    if options.download and options.local_rank == 0:
        datasets.STL10(options.data, "train", download=True)
    dist.barrier()
    try:
        return tuple(datasets.STL10(options.data, split, transform=transform) for split in ("train", "test"))
    except RuntimeError:
        raise SystemExit(
            f"no STL-10 in {options.data}: add --download, or --fake for made-up images"
        ) from None


def train(
    loader: DataLoader[Any],
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    epoch: int,
    options: argparse.Namespace,
) -> None:
    batch_time, data_time, results = AverageMeter(), AverageMeter(), Results(options.device)
    model.train()
    end = time.perf_counter()
    for i, (images, target) in enumerate(loader):
        data_time.update(time.perf_counter() - end)
        # Asynchronous, because the loader pins its memory.
        images = images.to(options.device, non_blocking=True)
        target = target.to(options.device, non_blocking=True)
        output = model(images)
        loss = nn.functional.cross_entropy(output, target)
        results.update(loss, output, target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        line = results.line() if i % 10 == 0 else ""
        batch_time.update(time.perf_counter() - end)
        end = time.perf_counter()
        if line and options.rank == 0:
            print(f"Epoch: [{epoch}][{i}/{len(loader)}]\tTime {batch_time}\tData {data_time}\t{line}")


@torch.no_grad()
def validate(loader: DataLoader[Any], steps: int, net: nn.Module, options: argparse.Namespace) -> float:
    """Return the top-1 accuracy in percent over the whole test set; each rank looks at its share of it."""
    batch_time, results = AverageMeter(), Results(options.device)
    net.eval()
    for buffer in net.buffers():  # BatchNorm's statistics differ between ranks after a training step
        dist.broadcast(buffer, src=0)
    end = time.perf_counter()
    batches = iter(loader)
    for i in range(steps):
        batch = next(batches, None)  # some ranks may have an image less, and no last batch
        results.latest.zero_()
        if batch is not None:
            images, target = (tensor.to(options.device, non_blocking=True) for tensor in batch)
            output = net(images)
            results.update(nn.functional.cross_entropy(output, target), output, target)
        line = results.line() if i % 100 == 0 else ""
        batch_time.update(time.perf_counter() - end)
        end = time.perf_counter()
        if line and options.rank == 0:
            print(f"Test: [{i}/{steps}]\tTime {batch_time}\t{line}")
    _, (_, top1, top5) = results.over_ranks()
    if options.rank == 0:
        print(f" * Prec@1 {top1:.3f} Prec@5 {top5:.3f}")
    return top1


def run(options: argparse.Namespace, log: Any) -> None:
    log("Initialize Model...")
    torch.manual_seed(0)
    net = models.resnet18(weights=None, num_classes=10).to(options.device)
    cuda = options.device.type == "cuda"
    model = DistributedDataParallel(net, device_ids=[options.local_rank] if cuda else None)
    optimizer = torch.optim.SGD(model.parameters(), options.lr, momentum=0.9, weight_decay=1e-4)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, options.decay_every, gamma=0.1)

    log("Initialize Dataloaders...")
    trainset, testset = load(options)
    sampler: DistributedSampler[Any] = DistributedSampler(trainset)
    # A DistributedSampler would repeat images to make the shares equal, and count them twice.
    share = Subset(testset, range(options.rank, len(testset), options.world_size))  # type: ignore[arg-type]
    steps = math.ceil(math.ceil(len(testset) / options.world_size) / options.batch_size)  # type: ignore[arg-type]
    # The start method is an argument here. set_start_method() fails if anything has set one already.
    method = "forkserver" if options.workers else None
    how: dict[str, Any] = {"num_workers": options.workers, "multiprocessing_context": method}
    how |= {"persistent_workers": options.workers > 0, "pin_memory": cuda}
    train_loader: DataLoader[Any] = DataLoader(trainset, options.batch_size, sampler=sampler, **how)
    test_loader: DataLoader[Any] = DataLoader(share, options.batch_size, **how)

    best = 0.0
    for epoch in range(options.epochs):
        sampler.set_epoch(epoch)
        log(f"\nBegin Training Epoch {epoch + 1} (lr {schedule.get_last_lr()[0]:.6g})")
        train(train_loader, model, optimizer, epoch, options)
        schedule.step()
        log(f"Begin Validation @ Epoch {epoch + 1}")
        top1 = validate(test_loader, steps, net, options)
        best = max(best, top1)
        log(f"Epoch Summary: \n\tEpoch Accuracy: {top1:.3f}\n\tBest Accuracy: {best:.3f}")


def main() -> None:
    parser = argparse.ArgumentParser(description="ResNet-18 on STL-10.")
    parser.add_argument(
        "rank", type=int, nargs="?", default=os.environ.get("RANK", 0), help="default: from torchrun"
    )
    parser.add_argument("local_rank", type=int, nargs="?", default=os.environ.get("LOCAL_RANK", 0))
    parser.add_argument("--world-size", type=int, default=os.environ.get("WORLD_SIZE", 1))
    parser.add_argument("--init-method", help="default: env:// if MASTER_ADDR is set")
    parser.add_argument("--data", default="data", help="folder of the dataset")
    parser.add_argument("--download", action="store_true", help="fetch it first, once per node")
    parser.add_argument("--fake", action="store_true", help="made-up images of the same shape")
    parser.add_argument("--image-size", type=int, default=224)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--batch-size", type=int, default=32, help="images per step and rank")
    parser.add_argument("--lr", type=float, default=0.1)
    parser.add_argument(
        "--decay-every", type=int, default=30, metavar="EPOCHS", help="divide the lr by 10 after these"
    )
    parser.add_argument("--workers", type=int, default=2, help="loading processes per rank")
    options = parser.parse_intermixed_args()  # RANK LOCAL_RANK may follow the options

    options.device = (
        torch.device("cuda", options.local_rank) if torch.cuda.is_available() else torch.device("cpu")
    )
    if options.device.type == "cuda":
        torch.cuda.set_device(options.device)
    # Port 0 is any free one, which only a single process can use: others would have to know its number.
    method = options.init_method or ("env://" if "MASTER_ADDR" in os.environ else "tcp://127.0.0.1:0")
    if method.endswith(":0") and options.world_size > 1:
        parser.error(f"--world-size {options.world_size}: give --init-method, for example tcp://HOST:23456")
    # Numbers in the output are those of all ranks, so one rank prints them.
    log = print if options.rank == 0 else lambda _text: None
    log("Initialize Process Group...")
    backend = "nccl" if options.device.type == "cuda" else "gloo"
    dist.init_process_group(backend, init_method=method, rank=options.rank, world_size=options.world_size)
    try:
        run(options, log)
    finally:
        gc.collect()  # frees the model, so that gloo's threads end with the group
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
