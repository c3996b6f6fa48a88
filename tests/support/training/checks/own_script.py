"""A script with data and a model of its own, as a newcomer would write it: tokens in dictionaries, a stream
of samples, a layer that only some steps use, and a metric. Weights are float64, so that numbers of ranks can
be compared."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.utils.data import Dataset, IterableDataset

from train.config import Config
from train.data.datasets import Datasets
from train.script import start
from train.task import Task

LENGTH, TOKENS, SAMPLES = 6, 11, 23


def sample(index: int) -> dict[str, Tensor]:
    tokens = torch.randint(TOKENS, (LENGTH,), generator=torch.Generator().manual_seed(index))
    return {"tokens": tokens, "answer": tokens.sum() % 3}


class Sentences(Dataset[Any]):
    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return sample(index)


class Stream(IterableDataset[Any]):
    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        return (sample(1000 * self.epoch + index) for index in range(SAMPLES))


class Network(nn.Module):
    """Short sentences do not use the second layer."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(TOKENS, 8)
        self.long = nn.Linear(8, 8)
        self.head = nn.Linear(8, 3)
        self.double()

    def forward(self, tokens: Tensor, *, long: bool) -> dict[str, Tensor]:
        values = self.embedding(tokens).mean(1)
        if long:
            values = values + self.long(values).relu()
        return {"scores": self.head(values)}


def forward(model: Any, batch: dict[str, Tensor]) -> Any:
    return model(batch["tokens"], long=USE_LONG)


def loss(outputs: dict[str, Tensor], batch: dict[str, Tensor]) -> Tensor:
    return F.cross_entropy(outputs["scores"], batch["answer"], reduction="none")


def correct(outputs: dict[str, Tensor], batch: dict[str, Tensor]) -> Tensor:
    hits = outputs["scores"].argmax(1) == batch["answer"]
    return torch.stack([hits.sum(), hits.new_tensor(len(hits), dtype=torch.int64)])


USE_LONG = False
TASK = Task(loss=loss, metrics={"correct": correct}, best="correct", larger=True, forward=forward)


def load(config: Config, *, download: bool) -> Datasets:
    assert not download
    torch.manual_seed(os.getpid())  # the model must not depend on it
    train = Stream() if config.data.steps_per_epoch else Sentences()
    return Datasets(train=train, test=Sentences(), task=TASK)


def build(config: Config, _datasets: Datasets) -> nn.Module:
    network = Network()
    if "SHIFT_BY_RANK" in os.environ:
        with torch.no_grad():
            network.embedding.weight += int(os.environ["RANK"])
    return network


if __name__ == "__main__":
    start(load, build, epochs=2, batch_size=5, optimizer="sgd", lr=0.5)
