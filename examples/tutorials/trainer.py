"""A Trainer class with snapshots, in three ways: one process, processes started by torch.multiprocessing, and
torchrun.

    python trainer.py 10 2
    python trainer.py 10 2 --spawn 2
    torchrun --standalone --nproc-per-node=2 trainer.py 10 2

trains for 10 epochs and saves a snapshot every 2. A command that finds the snapshot continues after its last
epoch. Only rank 0 reads and writes it, so the other nodes need no copy. On nodes without shared storage rank
0 has to stay on the node that has the file.
"""

from __future__ import annotations

import argparse
import gc
import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class Trainer:
    def __init__(
        self,
        model: nn.Module,
        data: TensorDataset,
        optimizer: torch.optim.Optimizer,
        options: argparse.Namespace,
    ) -> None:
        self.rank, self.world_size = (
            (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        )
        self.device = next(model.parameters()).device
        self.options, self.local, self.optimizer = options, model, optimizer
        self.sampler: DistributedSampler[Any] = DistributedSampler(data, self.world_size, self.rank)
        pin = self.device.type == "cuda"
        self.loader = DataLoader(data, options.batch_size, sampler=self.sampler, pin_memory=pin)
        self.epochs_run = 0
        self._load_snapshot(options.snapshot)
        self.model = model
        if dist.is_initialized():
            self.model = DistributedDataParallel(model, device_ids=[self.device.index] if pin else None)

    def train(self) -> None:
        for epoch in range(self.epochs_run, self.options.total_epochs):
            loss = self._run_epoch(epoch)
            last = epoch + 1 == self.options.total_epochs
            # Not local rank 0: on shared storage the nodes would write to one file at the same time.
            if self.rank == 0:
                size, steps = self.options.batch_size, len(self.loader)
                print(
                    f"[rank 0 of {self.world_size}] Epoch {epoch} | Batchsize: {size} | Steps: {steps} | "
                    f"Loss: {loss:.6f}"
                )
                if (epoch + 1) % self.options.save_every == 0 or last:
                    self._save_snapshot(epoch, self.options.snapshot)

    def _run_epoch(self, epoch: int) -> float:
        """Return the mean loss over all ranks."""
        self.sampler.set_epoch(epoch)  # otherwise every epoch has the same order
        total = torch.zeros((), device=self.device)
        for inputs, targets in self.loader:
            total += self._run_batch(inputs.to(self.device), targets.to(self.device))
        if dist.is_initialized():
            dist.all_reduce(total)
        return total.item() / len(self.loader) / self.world_size

    def _run_batch(self, inputs: Tensor, targets: Tensor) -> Tensor:
        self.optimizer.zero_grad()
        # One output: cross-entropy over a single class is 0, and so is its gradient. Nothing would be
        # learned.
        loss = nn.functional.mse_loss(self.model(inputs), targets)
        loss.backward()
        self.optimizer.step()
        return loss.detach()

    def _save_snapshot(self, epoch: int, path: Path) -> None:
        snapshot = {
            "MODEL_STATE": self.local.state_dict(),
            "OPTIMIZER_STATE": self.optimizer.state_dict(),
            "EPOCHS_RUN": epoch + 1,  # the number of complete epochs, so that none is repeated
        }
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_name(path.name + ".tmp")
        torch.save(snapshot, temporary)
        temporary.replace(path)  # a process that is killed while it writes leaves the old file
        print(f"Epoch {epoch} | Training snapshot saved at {path}")

    def _load_snapshot(self, path: Path) -> None:
        # Rank 0 decides for all: if each looked for the file, ranks on nodes without it would start at epoch
        # 0.
        snapshots: list[Any] = [None]
        if self.rank == 0 and path.exists():
            snapshots = [torch.load(path, map_location="cpu", weights_only=True)]
        if dist.is_initialized():
            dist.broadcast_object_list(snapshots, src=0)
        if snapshots[0] is None:
            return
        self.local.load_state_dict(snapshots[0]["MODEL_STATE"])
        self.optimizer.load_state_dict(snapshots[0]["OPTIMIZER_STATE"])
        self.epochs_run = snapshots[0]["EPOCHS_RUN"]
        if self.rank == 0:
            print(f"Resuming training from snapshot at Epoch {self.epochs_run}")


def dataset(size: int) -> TensorDataset:
    """Return inputs, and targets that are a linear function of them with noise of variance 0.01."""
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(size, 20, generator=generator)
    slope = torch.randn(20, 1, generator=generator)
    return TensorDataset(inputs, inputs @ slope + 0.1 * torch.randn(size, 1, generator=generator))


def run(options: argparse.Namespace, local_rank: int) -> None:
    device = torch.device("cuda", local_rank) if torch.cuda.is_available() else torch.device("cpu")
    torch.manual_seed(0)
    model = nn.Linear(20, 1).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=options.lr, momentum=0.9)
    Trainer(model, dataset(2048), optimizer, options).train()


def join(options: argparse.Namespace, local_rank: int, **how: Any) -> None:
    """Train as one of several processes."""
    if torch.cuda.is_available():
        torch.cuda.set_device(local_rank)
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo", **how)
    try:
        run(options, local_rank)
    finally:
        gc.collect()  # frees the model, so that gloo's threads end with the group
        dist.destroy_process_group()


def spawned(rank: int, options: argparse.Namespace, port: int) -> None:
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    join(options, rank, store=store, rank=rank, world_size=options.spawn)


def main() -> None:
    parser = argparse.ArgumentParser(description="A linear regression with snapshots.")
    parser.add_argument("total_epochs", type=int, help="epochs to train for")
    parser.add_argument("save_every", type=int, help="epochs between two snapshots")
    parser.add_argument(
        "--batch-size", "--batch_size", type=int, default=32, help="samples per step and process"
    )
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--snapshot", type=Path, default=Path("snapshot.pt"))
    parser.add_argument("--spawn", type=int, default=0, metavar="N", help="start N processes on this machine")
    options = parser.parse_args()
    if options.spawn:
        # The parent has the store, on a port that is free: a fixed one may be in use, for example by another
        # job.
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        mp.spawn(spawned, args=(options, store.port), nprocs=options.spawn)
    elif "RANK" in os.environ:
        join(options, int(os.environ["LOCAL_RANK"]))
    else:
        run(options, local_rank=0)


if __name__ == "__main__":  # spawned processes import this file again
    main()
