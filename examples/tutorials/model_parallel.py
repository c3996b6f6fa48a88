"""A model on two devices: each of two linear layers has its own, and the data moves from one to the other.

    python model_parallel.py

With fewer than two GPUs both devices are the CPU. One device works at a time: resnet50_halves.py makes both
work, and hybrid.py trains several such models at once with DistributedDataParallel.
"""

from __future__ import annotations

import argparse

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset


class TwoDevices(nn.Module):
    def __init__(self, first: torch.device, second: torch.device) -> None:
        super().__init__()
        self.first, self.second = first, second
        # What is placed on a device is parameters. A function without any, such as relu, runs where its input
        # is.
        self.linear1 = nn.Linear(20, 20).to(first)
        self.linear2 = nn.Linear(20, 1).to(second)

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.linear1(inputs.to(self.first))
        output: Tensor = self.linear2(hidden.to(self.second))  # autograd copies the gradient back
        return output


def dataset(size: int) -> TensorDataset:
    """Return inputs, and targets that are a linear function of them with noise of variance 0.01."""
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(size, 20, generator=generator)
    slope = torch.randn(20, 1, generator=generator)
    return TensorDataset(inputs, inputs @ slope + 0.1 * torch.randn(size, 1, generator=generator))


def main() -> None:
    parser = argparse.ArgumentParser(description="Two linear layers on two devices.")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--lr", type=float, default=0.01)
    parser.add_argument("--save", metavar="FILE", help="write the weights to this file")
    options = parser.parse_args()

    first = second = torch.device("cpu")
    if torch.cuda.device_count() >= 2:
        first, second = torch.device("cuda", 0), torch.device("cuda", 1)
    torch.manual_seed(0)
    model = TwoDevices(first, second)
    print(f"linear1 on {model.linear1.weight.device}, linear2 on {model.linear2.weight.device}")

    loader = DataLoader(dataset(2048), options.batch_size, shuffle=True, pin_memory=first.type == "cuda")
    # One optimizer for both devices: it updates each parameter where it is.
    optimizer = torch.optim.SGD(model.parameters(), lr=options.lr)
    for epoch in range(options.epochs):
        total = torch.zeros((), device=second)
        for inputs, targets in loader:
            optimizer.zero_grad()
            # The outputs are on the second device. The targets go there, instead of the outputs coming back.
            loss = nn.functional.mse_loss(model(inputs), targets.to(second))
            loss.backward()
            optimizer.step()
            total += loss.detach() * len(inputs)
        print(f"epoch {epoch}: loss {total.item() / 2048:.5f}")
    print("Training completed.")
    if options.save:
        torch.save(model.state_dict(), options.save)


if __name__ == "__main__":
    main()
