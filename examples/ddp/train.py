"""Data-parallel training in one file. Copy it, and replace the model, the data and the loss.

    python train.py                                        # one process
    torchrun --standalone --nproc-per-node=gpu train.py    # all GPUs of this machine
    cloudddp launch train.py                               # all GPUs of all nodes

Any number of ranks computes the same weights, up to rounding (except with BatchNorm and dropout). After a
crash or a preemption, repeat the command: it resumes from runs/latest.pt, also on another number of ranks.
"""

import argparse
import atexit
import json
import os
import signal
import sys
import time
import zipfile
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Subset, TensorDataset

RANK, WORLD_SIZE = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
LOCAL_RANK = int(os.environ.get("LOCAL_RANK", 0))
STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)  # `cloudddp cancel` or a spot interruption; Ctrl-C


def build_model() -> nn.Module:
    return nn.Sequential(nn.Conv2d(1, 64, 3), nn.ReLU(), nn.Flatten(), nn.Linear(64 * 6 * 6, 10))


def build_data() -> list[TensorDataset]:
    """Return a training set and a test set: 1,438 and 359 handwritten digits of 8 x 8 pixels."""
    images, labels = (torch.from_numpy(array) for array in load_digits(return_X_y=True))
    images = images.view(-1, 1, 8, 8).to(torch.get_default_dtype()) / 16
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    return [TensorDataset(images[part], labels[part]) for part in (order[:1438], order[1438:])]


def global_batches(samples: int, batch_size: int, seed: int, epoch: int) -> list[list[int]]:
    """Return the samples of each step of an epoch. Rank r trains on every WORLD_SIZE-th of them, from the
    r-th on. With DistributedSampler, which repeats or drops some, the result would depend on the number of
    ranks."""
    order = torch.randperm(samples, generator=torch.Generator().manual_seed(hash((seed, epoch)))).tolist()
    return [order[start : start + batch_size] for start in range(0, samples, batch_size)]


@torch.no_grad()
def evaluate(model: nn.Module, dataset: TensorDataset, device: torch.device) -> float:
    """Return the accuracy on the whole dataset, on every rank. Each sample counts once."""
    model.eval()
    correct = torch.zeros((), dtype=torch.int64, device=device)
    for inputs, labels in DataLoader(Subset(dataset, range(RANK, len(dataset), WORLD_SIZE)), 256):
        correct += (model(inputs.to(device)).argmax(1) == labels.to(device)).sum()
    model.train()
    dist.all_reduce(correct)
    return correct.item() / len(dataset)


def write(path: str, content: Any) -> None:
    """Replace a file. A crash at any moment leaves the old file or the new one, never a part of it."""
    with open(f"{path}.{RANK}.tmp", "wb") as file:
        torch.save(content, file) if path.endswith(".pt") else file.write(json.dumps(content).encode())
        file.flush()
        os.fsync(file.fileno())
    os.replace(file.name, path)


def newest(path: str) -> Any:
    """Return on every rank the newest valid snapshot that any rank reads from its `path`, or None. Nodes need
    not share a disk, and after a restart rank 0 may be on a node that has no snapshot."""
    own = None
    try:
        loaded = torch.load(path, map_location="cpu", weights_only=True)  # does not verify checksums
        if zipfile.ZipFile(path).testzip() or {"step", "best", "run", "model", "optimizer"} - loaded.keys():
            raise ValueError("wrong checksum, or not a snapshot")
        own = loaded
    except Exception as error:  # torch and zipfile raise many types
        if os.path.exists(path):
            print(f"rank {RANK}: skipping the damaged {path}: {error}", flush=True)
    steps, elected = [-1] * WORLD_SIZE, [own]
    dist.all_gather_object(steps, own["step"] if own else -1)
    dist.broadcast_object_list(elected, src=steps.index(max(steps)))
    return elected[0]


def ignore_signals(_worker: int) -> None:
    """Keep a loading process alive when a launcher signals every process: its rank decides when to stop."""
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)


def main(args: argparse.Namespace) -> None:
    on_gpu = torch.cuda.is_available()
    device = torch.device(f"cuda:{LOCAL_RANK}" if on_gpu else "cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    store = None if "RANK" in os.environ else dist.HashStore()  # alone: a group of one
    dist.init_process_group("nccl" if on_gpu else "gloo", store=store, rank=RANK, world_size=WORLD_SIZE)
    stop = torch.zeros((), dtype=torch.int64)  # the number of the signal that asks for it
    for number in STOP_SIGNALS:
        signal.signal(number, lambda number, _frame: stop.fill_(number))

    torch.manual_seed(args.seed)
    train_set, test_set = build_data()
    model = build_model().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), args.lr)
    order = {"samples": len(train_set), "batch_size": args.batch_size, "seed": args.seed}
    run = {**order, "parameters": sum(parameter.numel() for parameter in model.parameters()), "lr": args.lr}
    epoch_steps = len(global_batches(**order, epoch=0))
    step, steps, best = 0, args.epochs * epoch_steps, 0.0

    latest, best_yet = newest(f"{args.out}/latest.pt"), newest(f"{args.out}/best.pt")
    if snapshot := max(filter(None, (latest, best_yet)), key=lambda one: one["step"], default=None):
        step, best = snapshot["step"], best_yet["best"] if best_yet else 0.0
        other = {name: old for name, old in snapshot["run"].items() if run[name] != old}
        if step < steps:
            other.pop("lr", None)  # it may change on the way
        if other or step > steps:
            sys.exit(
                f"{args.out}: step {step} of {steps}, trained with {other or 'more epochs'}; use that, or "
                "another --out"
            )
        model.load_state_dict(snapshot["model"])
        optimizer.load_state_dict(snapshot["optimizer"])
        for group in optimizer.param_groups:
            group["lr"] = args.lr
        if RANK == 0:
            print(f"{args.out}: continuing after step {step}, with --lr {args.lr}", flush=True)
    if best_yet and LOCAL_RANK == 0:
        write(f"{args.out}/best.pt", best_yet)  # this node may be new
    ddp = DistributedDataParallel(model)

    def save(name: str) -> None:
        if LOCAL_RANK == 0:  # on each node, since any node may be lost
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
            write(f"{args.out}/{name}", {**state, "step": step, "best": best, "run": run})

    def report(state: str) -> None:
        for path in (f"{args.out}/status.json", os.environ.get("CLOUDDDP_STATUS_FILE")):
            if RANK == 0 and path:
                write(path, {"state": state, "step": step, "steps": steps, "best_accuracy": best or None})

    if step and step % epoch_steps == 0 and not best_yet:  # it is lost
        best = evaluate(model, test_set, device)
        save("best.pt")
    if step and snapshot is not latest:  # it is older than best.pt, lost or damaged
        save("latest.pt")
    stopping, reported = 0, 0.0
    while step < steps and not stopping:
        epoch, done = divmod(step, epoch_steps)
        batches = global_batches(**order, epoch=epoch)[done:]
        own = [batch[RANK::WORLD_SIZE] or batch[:1] for batch in batches]  # an idle rank loads one, unused
        options = {"num_workers": args.workers, "worker_init_fn": ignore_signals, "pin_memory": on_gpu}
        for batch, (inputs, labels) in zip(batches, DataLoader(train_set, batch_sampler=own, **options)):
            torch.manual_seed(hash((args.seed, step, RANK)))  # dropout is the same after a resume
            count = len(batch[RANK::WORLD_SIZE])  # 0 on an idle rank: its loss and gradients are 0
            outputs, targets = ddp(inputs.to(device))[:count], labels.to(device)[:count]
            loss = F.cross_entropy(outputs, targets, reduction="sum") / len(batch)
            optimizer.zero_grad()
            (loss * WORLD_SIZE).backward()  # DDP averages over ranks: the gradient is that of the global mean
            optimizer.step()
            step += 1
            flag = torch.where(loss.isfinite(), stop.to(device), 127)
            dist.all_reduce(flag, op=dist.ReduceOp.MAX)
            stopping = int(flag)  # on all ranks after the same step
            if stopping == 127:
                sys.exit(f"step {step}: the loss is not finite, try a lower --lr")
            if stopping:
                break
            if args.save_every and step % args.save_every == 0 and step % epoch_steps:
                save("latest.pt")
            if time.monotonic() - reported > 1:
                report("running")
                reported = time.monotonic()
        if step % epoch_steps == 0:
            accuracy = evaluate(model, test_set, device)
            if accuracy > best:
                best = accuracy
                save("best.pt")
            if RANK == 0:
                print(f"epoch {epoch + 1}: test accuracy {accuracy:.4f}", flush=True)
        save("latest.pt")
    state, code = ("finished", 0) if step >= steps else ("preempted", 128 + stopping)
    report(state)
    if RANK == 0:
        print(f"{state} after step {step} of {steps}, best test accuracy {best:.4f}", flush=True)
    dist.barrier()  # once a rank has exited, a launcher may kill those that still write
    atexit._run_exitfuncs()  # loggers send what they have left
    sys.stdout.flush()
    os._exit(code)  # gloo's threads can abort or block Python's own shutdown


if __name__ == "__main__":
    formatter = argparse.ArgumentDefaultsHelpFormatter
    parser = argparse.ArgumentParser(allow_abbrev=False, formatter_class=formatter)
    parser.add_argument("--epochs", type=int, default=8, help="passes over the training set")
    parser.add_argument("--batch-size", type=int, default=64, help="samples per step, over all ranks")
    parser.add_argument("--lr", type=float, default=0.006, help="learning rate")
    parser.add_argument("--seed", type=int, default=0, help="of the first weights and the order")
    parser.add_argument("--workers", type=int, default=0, help="processes per rank that load data")
    parser.add_argument("--save-every", type=int, default=0, help="steps between snapshots within an epoch")
    parser.add_argument("--out", default="runs", help="folder for snapshots and status.json")
    args = parser.parse_args()
    if min(args.epochs, args.batch_size) < 1 or min(args.workers, args.save_every) < 0:
        parser.error("--epochs and --batch-size must be above 0, --workers and --save-every not below")
    if not 0 < args.lr < float("inf") or not -(2**63) <= args.seed < 2**64:
        parser.error("--lr must be above 0 and finite, --seed an integer from -2**63 to 2**64 - 1")
    try:
        os.makedirs(args.out, exist_ok=True)
    except OSError as error:
        parser.error(f"--out: {error}")
    main(args)
