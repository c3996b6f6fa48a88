"""Datasets are read from local files, and what is missing is said in one sentence."""

from __future__ import annotations

from pathlib import Path

import pytest
from train_files import write_mnist, write_stl10

pytest.importorskip("torch")

import torch

from train import data, models
from train.config import make
from train.errors import UsageError
from train.sampler import GlobalBatches

pytestmark = pytest.mark.torch


def test_digits_are_all_there_and_the_two_parts_share_no_image() -> None:
    pytest.importorskip("sklearn")
    digits = data.load(make(dataset="digits"), download=False)
    assert (len(digits.train), len(digits.test)) == (1438, 359)
    assert sorted(set(digits.test.labels.tolist())) == list(range(10))
    images = torch.cat([digits.train.inputs, digits.test.inputs]).flatten(1)
    assert len(torch.unique(images, dim=0)) == 1797


def test_digits_are_split_alike_whatever_the_seed() -> None:
    pytest.importorskip("sklearn")
    one, other = (data.load(make(dataset="digits", seed=seed), download=False) for seed in (0, 1))
    assert torch.equal(one.test.inputs, other.test.inputs)


def test_mnist_is_read_and_normalised_as_in_the_walk_throughs(tmp_path: Path) -> None:
    pytest.importorskip("torchvision")
    write_mnist(tmp_path, samples=12)
    mnist = data.load(make(dataset="mnist", data=str(tmp_path)), download=False)
    images, labels = mnist.train.__getitems__([0, 11])
    prepared = mnist.prepare(images)
    assert prepared.shape == (2, *mnist.shape) == (2, 1, 28, 28)
    assert labels.tolist() == [0, 1]
    assert prepared[0, 0, 0, 5].item() == pytest.approx((5 / 255 - 0.1307) / 0.3081)


def test_stl10_is_read_resized_and_scaled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torchvision = pytest.importorskip("torchvision")
    # torchvision compares the checksums of the published 2.6 GB, which no small file can have.
    monkeypatch.setattr(torchvision.datasets.STL10, "_check_integrity", lambda _self: True)
    write_stl10(tmp_path, samples=3)
    stl10 = data.load(make(dataset="stl10", data=str(tmp_path)), download=False)
    images, labels = stl10.test.__getitems__([0, 2])
    prepared = stl10.prepare(images)
    assert prepared.shape == (2, *stl10.shape) == (2, 3, 224, 224)
    assert labels.tolist() == [0, 2]
    assert -1.0 <= prepared.min().item() < prepared.max().item() <= 1.0
    small = data.load(make(dataset="stl10", data=str(tmp_path), image_size=96), download=False)
    assert small.prepare(images)[0, 0, 1, 0].item() == pytest.approx((1 / 255 - 0.5) / 0.5)


@pytest.mark.parametrize(("dataset", "place"), [("mnist", "MNIST/raw"), ("stl10", "stl10_binary")])
def test_missing_files_are_answered_with_where_to_put_them(tmp_path: Path, dataset: str, place: str) -> None:
    pytest.importorskip("torchvision")
    with pytest.raises(UsageError) as refused:
        data.load(make(dataset=dataset, data=str(tmp_path)), download=False)
    assert place in str(refused.value)
    assert "--download" in str(refused.value)


def test_a_torn_mnist_file_is_answered_in_the_same_way(tmp_path: Path) -> None:
    pytest.importorskip("torchvision")
    write_mnist(tmp_path, samples=4)
    path = tmp_path / "MNIST" / "raw" / "train-images-idx3-ubyte"
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(UsageError, match="cannot be read"):
        data.load(make(dataset="mnist", data=str(tmp_path)), download=False)


def test_any_map_style_dataset_is_read_in_the_order_of_the_shards() -> None:
    class Squares(torch.utils.data.Dataset):
        def __len__(self) -> int:
            return 9

        def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
            return torch.tensor([float(index**2)]), index

    shards = list(GlobalBatches(samples=9, batch_size=4, seed=0).epoch(0))
    for inputs, labels, shard in data.batches(Squares(), shards, workers=0, pin=False):
        assert labels.tolist() == shard.indices
        assert inputs.flatten().tolist() == [index**2 for index in shard.indices]


@pytest.mark.parametrize(
    ("model", "shape", "parameters"),
    [("small", (1, 8, 8), 38_282), ("mnist", (1, 28, 28), 225_226), ("linear", (3, 4, 4), 490)],
)
def test_models_have_the_documented_size_and_one_score_per_class(
    model: str, shape: tuple[int, int, int], parameters: int
) -> None:
    network = models.build(model, shape=shape, classes=10, seed=0)
    assert sum(weights.numel() for weights in network.parameters()) == parameters
    assert network(torch.zeros(2, *shape)).shape == (2, 10)


def test_resnet18_scores_the_ten_classes_of_stl10() -> None:
    pytest.importorskip("torchvision")
    network = models.build("resnet18", shape=(3, 96, 96), classes=10, seed=0)
    assert network(torch.zeros(2, 3, 96, 96)).shape == (2, 10)


def test_the_seed_decides_the_first_weights() -> None:
    nets = [models.build("small", shape=(1, 8, 8), classes=10, seed=seed) for seed in (1, 1, 2)]
    weights = [net.fc2.weight for net in nets]
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[2])


@pytest.mark.parametrize(
    ("model", "shape", "reason"),
    [("resnet18", (1, 64, 64), "3 channels"), ("mnist", (1, 8, 8), "at least 10x10")],
)
def test_a_model_that_does_not_fit_the_images_is_refused(
    model: str, shape: tuple[int, int, int], reason: str
) -> None:
    with pytest.raises(UsageError, match=reason):
        models.build(model, shape=shape, classes=10, seed=0)
