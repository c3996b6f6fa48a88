"""Train a small network on handwritten digits with DistributedDataParallel.

torchrun --nproc-per-node=2 train.py    # two processes on this computer
cloudddp run -n 2 train.py              # all GPUs of two nodes
"""

import argparse
import gc
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

CHECKPOINT = "checkpoints/last.pt"


def load_data():
    images, labels = load_digits(return_X_y=True)
    return TensorDataset(torch.tensor(images, dtype=torch.float32) / 16, torch.tensor(labels))


def save_checkpoint(model, optimizer, epoch):
    os.makedirs(os.path.dirname(CHECKPOINT), exist_ok=True)
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": epoch}
    torch.save(state, CHECKPOINT + ".tmp")
    os.replace(CHECKPOINT + ".tmp", CHECKPOINT)  # a crash leaves the old file or the new one


def train(args):
    rank, local_rank = int(os.environ["RANK"]), int(os.environ["LOCAL_RANK"])
    device = torch.device("cuda", local_rank) if torch.cuda.is_available() else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dataset = load_data()
    sampler = DistributedSampler(dataset)  # each rank gets another part of the data
    loader = DataLoader(dataset, batch_size=args.batch_size, sampler=sampler)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10)).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)

    first_epoch = 0
    if os.path.exists(CHECKPOINT):  # repeat the command to continue after a crash
        checkpoint = torch.load(CHECKPOINT, map_location=device)
        model.load_state_dict(checkpoint["model"])
        optimizer.load_state_dict(checkpoint["optimizer"])
        first_epoch = checkpoint["epoch"] + 1
        if rank == 0:
            print(f"{CHECKPOINT} has {first_epoch} of {args.epochs} epochs", flush=True)

    model = DistributedDataParallel(model)
    for epoch in range(first_epoch, args.epochs):
        sampler.set_epoch(epoch)  # another order in each epoch
        total = torch.zeros(2, device=device)  # sum of the losses, number of samples
        for images, labels in loader:
            images, labels = images.to(device), labels.to(device)
            loss = F.cross_entropy(model(images), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total += torch.stack([loss.detach() * len(labels), torch.tensor(len(labels), device=device)])
        dist.all_reduce(total)
        if rank == 0:
            print(f"epoch {epoch + 1} of {args.epochs}: loss {total[0] / total[1]:.4f}", flush=True)
        if local_rank == 0:  # on every node, since any of them may be lost
            save_checkpoint(model.module, optimizer, epoch)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--batch-size", type=int, default=32, help="per rank")
    parser.add_argument("--lr", type=float, default=1e-3)
    args = parser.parse_args()
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    train(args)
    gc.collect()  # frees the model, so that gloo's threads end with the group
    dist.destroy_process_group()
