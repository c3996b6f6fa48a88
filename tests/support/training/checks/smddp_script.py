"""A user's training script for smdistributed.dataparallel: it imports neither cloudddp, `train` nor
torch.distributed.

It learns which corner of a cube a point lies near. Rank 0 tests the model alone after each epoch, prints the
result and saves the weights at the end.
"""

import argparse
import itertools

import smdistributed.dataparallel.torch.distributed as smddp
import torch
from smdistributed.dataparallel.torch.parallel import DistributedDataParallel
from torch import nn
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler

DISTRIBUTED = smddp.is_available()
if DISTRIBUTED:  # at import, which a spawned data-loading worker repeats
    smddp.init_process_group(backend="smddp")

CORNERS = torch.tensor(list(itertools.product((-1.0, 1.0), repeat=3)))


class Points(Dataset):
    """Points around the corners of a cube; the label is the number of the corner."""

    def __init__(self, count: int, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.corner = torch.randint(len(CORNERS), (count,), generator=generator)
        self.position = CORNERS[self.corner] + 0.4 * torch.randn(count, 3, generator=generator)

    def __len__(self) -> int:
        return len(self.corner)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.position[index], self.corner[index]


class Job:
    def __init__(self, options: argparse.Namespace) -> None:
        self.rank = smddp.get_rank() if DISTRIBUTED else 0
        gpu = smddp.get_local_rank() if DISTRIBUTED else 0
        self.device = torch.device("cuda", gpu) if torch.cuda.is_available() else torch.device("cpu")
        torch.manual_seed(self.rank)
        layers = [nn.Linear(3, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, len(CORNERS))]
        self.model: nn.Module = nn.Sequential(*layers).to(self.device)
        points = Points(800, seed=1)
        sampler = None
        if DISTRIBUTED:
            self.model = DistributedDataParallel(self.model)
            sampler = DistributedSampler(points, smddp.get_world_size(), self.rank)
        self.loader = DataLoader(
            points,
            batch_size=20,
            sampler=sampler,
            num_workers=options.workers,
            multiprocessing_context="spawn" if options.workers else None,
        )
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)

    def train_epoch(self) -> float:
        """Return the mean loss over all ranks."""
        self.model.train()
        total = torch.zeros(1, device=self.device)
        for position, corner in self.loader:
            scores = self.model(position.to(self.device))
            loss = nn.functional.cross_entropy(scores, corner.to(self.device))
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
            total += loss.detach() / len(self.loader)
        if DISTRIBUTED:
            smddp.all_reduce(total, op=smddp.ReduceOp.AVERAGE)
        return total.item()

    def accuracy(self, points: Points) -> float:
        self.model.eval()
        with torch.no_grad():
            guessed = self.model(points.position.to(self.device)).argmax(dim=1).cpu()
        return (guessed == points.corner).float().mean().item()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("output", help="file for the weights")
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--workers", type=int, default=0)
    options = parser.parse_args()
    job = Job(options)
    for epoch in range(options.epochs):
        loss = job.train_epoch()
        if job.rank == 0:
            accuracy = job.accuracy(Points(200, seed=2))
            print(f"epoch={epoch} loss={loss:.3f} accuracy={accuracy:.3f}", flush=True)
    if job.rank == 0:
        torch.save(job.model.state_dict(), options.output)


if __name__ == "__main__":
    main()
