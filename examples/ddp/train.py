"""Data-parallel training in one file, to copy: replace `build_model`, `build_data` and the loss.

    python train.py                                         # one process
    torchrun --standalone --nproc-per-node=gpu train.py     # every GPU of this computer
    cloudddp launch train.py                                # every GPU of every node

N ranks train the weights that one process would, up to rounding (except for BatchNorm). The same command, started again after
a crash or a preemption, on any number of ranks, continues from runs/latest.pt; runs/best.pt has the best weights.
"""

import argparse
import atexit
import json
import math
import os
import signal
import sys

import torch
import torch.distributed as dist
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Subset, TensorDataset

RANK, LOCAL_RANK, WORLD_SIZE = (int(os.environ.get(*one)) for one in (("RANK", 0), ("LOCAL_RANK", 0), ("WORLD_SIZE", 1)))


def build_model():
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(512, 64), nn.ReLU(), nn.Linear(64, 10),
    )  # fmt: skip


def build_data():
    """Return a training and a test set: 1,438 and 359 handwritten digits of 8 x 8 pixels."""
    images, labels = map(torch.from_numpy, load_digits(return_X_y=True))
    images = images.view(-1, 1, 8, 8).to(torch.get_default_dtype()) / 16
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    return (TensorDataset(images[part], labels[part]) for part in (order[:1438], order[1438:]))


class GlobalBatches:
    """The samples of each step: one permutation per epoch, cut into global batches, of which rank r takes every W-th sample.
    Unlike DistributedSampler it repeats and omits none, so the result does not depend on the number of ranks."""

    def __init__(self, samples, batch_size):
        self.samples, self.batch_size, self.steps = samples, batch_size, math.ceil(samples / batch_size)
        self.start = 0  # the step, counted over all epochs, from which to read

    def size(self, step):
        """Return the number of samples of a step; the last one of an epoch may have fewer."""
        return min(self.batch_size, self.samples - step % self.steps * self.batch_size)

    def __iter__(self):
        epoch, skipped = divmod(self.start, self.steps)
        order = torch.randperm(self.samples, generator=torch.Generator().manual_seed(epoch)).tolist()
        for first in range(skipped * self.batch_size, self.samples, self.batch_size):
            batch = order[first : first + self.batch_size]
            yield batch[RANK::WORLD_SIZE] or batch[:1]  # a rank that has none takes one, and does not count it


def all_reduce(value):
    if dist.is_initialized():
        dist.all_reduce(value)
    return value


@torch.no_grad()
def accuracy_of(model, dataset, device):
    """Return the accuracy on the whole dataset, each sample counted once; the same on every rank."""
    model.eval()
    correct = torch.zeros((), device=device)
    for inputs, labels in DataLoader(Subset(dataset, range(RANK, len(dataset), WORLD_SIZE)), 256):
        correct += (model(inputs.to(device)).argmax(1) == labels.to(device)).sum()
    model.train()
    return all_reduce(correct).item() / len(dataset)


def write(path, content):
    """Write a file such that a crash at any moment leaves the old one or the new one, whole."""
    with open(f"{path}.{RANK}.tmp", "wb") as file:
        torch.save(content, file) if path.endswith(".pt") else file.write(json.dumps(content).encode())
        file.flush()
        os.fsync(file.fileno())
    os.replace(file.name, path)


def newest_snapshot(path):
    """Return the newest snapshot that any rank finds, on every rank; None if there is none. Nodes share no disk, and after a
    restart rank 0 may be on another one."""
    snapshot = torch.load(path, map_location="cpu", weights_only=True) if os.path.exists(path) else None
    if not dist.is_initialized():
        return snapshot
    steps, found = [None] * WORLD_SIZE, [snapshot]
    dist.all_gather_object(steps, snapshot["step"] if snapshot else -1)
    dist.broadcast_object_list(found, src=steps.index(max(steps)))
    return found[0]


def main(args):
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda", LOCAL_RANK) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    if "RANK" in os.environ:
        dist.init_process_group("nccl" if on_gpu else "gloo")
    stop = torch.zeros((), device=device)
    signal.signal(signal.SIGTERM, lambda *_: stop.fill_(1))  # from `cloudddp cancel`, and before a node ends

    torch.manual_seed(0)
    train_set, test_set = build_data()
    batches = GlobalBatches(len(train_set), args.batch_size)
    loader = DataLoader(train_set, batch_sampler=batches, num_workers=args.workers, pin_memory=on_gpu)
    model = build_model().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    step, total, best = 0, args.epochs * batches.steps, 0.0
    os.makedirs(args.out, exist_ok=True)
    if snapshot := newest_snapshot(f"{args.out}/latest.pt"):
        if snapshot["batch_size"] != args.batch_size:
            sys.exit(f"{args.out}/latest.pt has --batch-size {snapshot['batch_size']}: give that, or another --out")
        model.load_state_dict(snapshot["model"])
        optimizer.load_state_dict(snapshot["optimizer"])
        step, best = snapshot["step"], snapshot["best"]
    ddp = DistributedDataParallel(model, [device] if on_gpu else None) if dist.is_initialized() else model

    def save(name):
        if LOCAL_RANK == 0:  # on each node, in case one is lost
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step, "best": best}
            write(f"{args.out}/{name}", {**state, "batch_size": args.batch_size})

    def report(state):
        status = {"state": state, "step": step, "steps": total, "epoch": step // batches.steps, "best_accuracy": best}
        for path in (f"{args.out}/status.json", os.environ.get("CLOUDDDP_STATUS_FILE")):
            if RANK == 0 and path:
                write(path, status)

    report("running")
    while step < total:
        batches.start = step
        for inputs, labels in loader:
            size = batches.size(step)
            own = len(range(RANK, size, WORLD_SIZE))  # may be 0: a loss of 0, so that the rank takes part in the reduction
            scores = ddp(inputs.to(device, non_blocking=True))[:own]
            loss = F.cross_entropy(scores, labels.to(device, non_blocking=True)[:own], reduction="sum")
            optimizer.zero_grad()
            (loss * WORLD_SIZE / size).backward()  # DDP divides by the number of ranks: the mean over the global batch
            for group in optimizer.param_groups:
                group["lr"] = args.lr * (1 + math.cos(math.pi * step / total)) / 2
            optimizer.step()
            step += 1
            stopping = all_reduce(stop.clone()).item() > 0  # all ranks stop at the same step
            if stopping:
                break
            if args.save_every and step % args.save_every == 0 and step % batches.steps:
                save("latest.pt")
                report("running")
        if step % batches.steps == 0:
            accuracy = accuracy_of(model, test_set, device)
            if accuracy > best:
                best = accuracy
                save("best.pt")
            if RANK == 0:
                print(f"epoch {step // batches.steps}: test accuracy {accuracy:.4f}, best {best:.4f}", flush=True)
        save("latest.pt")
        if stopping and step < total:
            report("preempted")
            return 143
        report("running")
    report("finished")
    if dist.is_initialized():
        dist.barrier()  # a rank that ends early closes connections from which others may still read
    return 0


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--batch-size", type=int, default=64, help="samples per step over all ranks (default: 64)")
    parser.add_argument("--lr", type=float, default=0.006, help="learning rate of the first step, which decays to 0")
    parser.add_argument("--workers", type=int, default=0, help="processes per rank that load data (default: 0)")
    parser.add_argument("--save-every", type=int, default=0, help="steps between snapshots; 0: one per epoch")
    parser.add_argument("--out", default="runs", help="folder for snapshots and the status (default: runs)")
    arguments, code = parser.parse_args(), 1
    # At last, after the handlers of loggers: gloo's threads may abort a process that Python shuts down, or hold it up.
    atexit.register(lambda: (sys.stdout.flush(), os._exit(code)))
    code = main(arguments)
