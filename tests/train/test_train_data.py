"""Datasets are read from local files, and what is missing is reported in one sentence; training order."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from support.training.dataset_files import write_mnist, write_stl10

pytest.importorskip("torch")

import itertools

import pytest
import torch

from train import models
from train.config import make
from train.data import datasets, files
from train.data.datasets import Datasets, load, move_to_device
from train.data.loader import Loader
from train.data.readers import open_reader
from train.data.sampler import GlobalBatchSampler, RankBatch
from train.errors import UsageError
from train.task import classification, regression

pytestmark = pytest.mark.torch
# It takes seconds to import: one worker does, which runs all tests that use it.
uses_torchvision = pytest.mark.xdist_group("train_pipeline")


class Squares(torch.utils.data.Dataset):
    def __len__(self) -> int:
        return 9

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return torch.tensor([float(index**2)]), index


def test_digits_are_complete_normalized_and_split_without_a_seed() -> None:
    pytest.importorskip("sklearn")
    digits, other = (load(make(dataset="digits", seed=seed), download=False) for seed in (0, 1))
    assert (len(digits.train), len(digits.test)) == (1438, 359)
    assert sorted(set(digits.test.labels.tolist())) == list(range(10))
    images = torch.cat([digits.train.inputs, digits.test.inputs]).flatten(1)
    assert len(torch.unique(images, dim=0)) == 1797
    images, _ = digits.preprocess((digits.train.inputs, digits.train.labels))
    assert images.mean().item() == pytest.approx(0, abs=0.01)
    assert images.std().item() == pytest.approx(1, abs=0.01)
    assert torch.equal(digits.test.inputs, other.test.inputs)


def test_mnist_is_normalized_as_usual(tmp_path: Path) -> None:
    write_mnist(tmp_path, samples=12)
    mnist = load(make(dataset="mnist", data=str(tmp_path)), download=False)
    images, labels = mnist.train.__getitems__([0, 11])
    inputs, labels = mnist.preprocess((images, labels))
    assert inputs.shape == (2, *mnist.shape) == (2, 1, 28, 28)
    assert labels.tolist() == [0, 1]
    assert inputs[0, 0, 0, 5].item() == pytest.approx((5 / 255 - 0.1307) / 0.3081)


def test_stl10_is_read_resized_and_scaled(tmp_path: Path) -> None:
    write_stl10(tmp_path, samples=3)
    stl10 = load(make(dataset="stl10", data=str(tmp_path)), download=False)
    images, labels = stl10.test.__getitems__([0, 2])
    inputs, labels = stl10.preprocess((images, labels))
    assert inputs.shape == (2, *stl10.shape) == (2, 3, 224, 224)
    assert labels.tolist() == [0, 2]
    assert -1.0 <= inputs.min().item() < inputs.max().item() <= 1.0
    small = load(make(dataset="stl10", data=str(tmp_path), image_size=96), download=False)
    assert small.preprocess((images, labels))[0][0, 0, 1, 0].item() == pytest.approx((1 / 255 - 0.5) / 0.5)


def test_files_are_read_as_they_were_written(tmp_path: Path) -> None:
    write_mnist(tmp_path, samples=7)
    write_stl10(tmp_path, samples=3)
    for images, labels in files.mnist(tmp_path, download=False):
        assert (images.shape, images.dtype, labels.tolist()) == ((7, 1, 28, 28), torch.uint8, list(range(7)))
        assert images.flatten().tolist() == [index % 251 for index in range(7 * 28 * 28)]
    for images, labels in files.stl10(tmp_path, download=False):
        assert (images.shape, labels.tolist()) == ((3, 3, 96, 96), [0, 1, 2])
        assert images[0].transpose(1, 2).flatten().tolist() == [index % 256 for index in range(3 * 96 * 96)]


def write_images(folder: Path, classes: dict[str, int]) -> None:
    image = pytest.importorskip("PIL.Image")
    for name, count in classes.items():
        (folder / name).mkdir(parents=True)
        for number in range(count):
            image.new("RGB", (50 + number, 40), (10 * number, 0, 255)).save(folder / name / f"{number}.png")


def test_folder_of_images_is_cut_to_one_size(tmp_path: Path) -> None:
    write_images(tmp_path / "train", {"cats": 3, "dogs": 2})
    write_images(tmp_path / "val", {"cats": 1, "dogs": 1})
    loaded = load(make(dataset="folder", data=str(tmp_path), image_size=32), download=False)
    assert (loaded.classes, loaded.shape, len(loaded.train), len(loaded.test)) == (2, (3, 32, 32), 5, 2)
    image, label = loaded.train[4]
    assert (image.shape, image.dtype, label) == ((3, 32, 32), torch.uint8, 1)
    inputs, _ = loaded.preprocess((image[None], torch.tensor([label])))
    assert inputs[0, 2, 5, 5].item() == pytest.approx((1 - 0.406) / 0.225)


def test_folder_without_validation_images_is_explained(tmp_path: Path) -> None:
    write_images(tmp_path / "train", {"cats": 1})
    with pytest.raises(UsageError, match="val"):
        load(make(dataset="folder", data=str(tmp_path)), download=False)


def test_mnist_files_may_be_gzipped_or_not(tmp_path: Path) -> None:
    write_mnist(tmp_path, samples=5)
    whole = files.mnist(tmp_path, download=False)
    (tmp_path / "MNIST" / "raw" / "train-images-idx3-ubyte").unlink()
    (tmp_path / "MNIST" / "raw" / "t10k-labels-idx1-ubyte.gz").unlink()
    again = files.mnist(tmp_path, download=False)
    assert all(torch.equal(one, other) for one, other in zip(sum(whole, ()), sum(again, ()), strict=True))


MISSING = [
    ("mnist", "MNIST/raw", ["train-images-idx3-ubyte", "t10k-labels-idx1-ubyte"]),
    ("stl10", "stl10_binary", ["stl10_binary.tar.gz", "train_X.bin"]),
]


@pytest.mark.parametrize(("dataset", "place", "names"), MISSING)
def test_missing_files_are_reported_with_names_and_folder(
    tmp_path: Path, dataset: str, place: str, names: list[str]
) -> None:
    with pytest.raises(UsageError) as refused:
        load(make(dataset=dataset, data=str(tmp_path)), download=False)
    for word in (str(tmp_path / place), "not found", "--download", *names):
        assert word in str(refused.value)


def test_archive_that_was_not_unpacked_is_reported_with_the_command(tmp_path: Path) -> None:
    archive = tmp_path / "stl10_binary.tar.gz"
    archive.touch()
    with pytest.raises(UsageError, match=rf"tar -xzf {archive} -C {tmp_path}"):
        files.stl10(tmp_path, download=False)


def truncate(path: Path, keep: int) -> None:
    path.write_bytes(path.read_bytes()[:keep])


@pytest.mark.parametrize(
    ("dataset", "name", "keep"),
    [
        ("mnist", "MNIST/raw/train-images-idx3-ubyte", 100),
        ("mnist", "MNIST/raw/t10k-labels-idx1-ubyte", 3),
        ("mnist", "MNIST/raw/train-images-idx3-ubyte.gz", 200),
        ("stl10", "stl10_binary/test_X.bin", 50_000),
        ("stl10", "stl10_binary/train_y.bin", 3),
    ],
)
def test_truncated_file_is_refused_with_advice(tmp_path: Path, dataset: str, name: str, keep: int) -> None:
    {"mnist": write_mnist, "stl10": write_stl10}[dataset](tmp_path, samples=4)
    truncate(tmp_path / name, keep)
    if name.endswith(".gz"):
        (tmp_path / name.removesuffix(".gz")).unlink()
    with pytest.raises(UsageError, match=r"cannot read (MNIST|STL10)") as refused:
        load(make(dataset=dataset, data=str(tmp_path)), download=False)
    assert str(tmp_path) in str(refused.value)
    assert "To fix it, " in str(refused.value)


def test_images_without_labels_are_refused(tmp_path: Path) -> None:
    write_mnist(tmp_path / "four", samples=4)
    write_mnist(tmp_path, samples=5)
    labels = "MNIST/raw/train-labels-idx1-ubyte"
    (tmp_path / labels).write_bytes((tmp_path / "four" / labels).read_bytes())
    with pytest.raises(UsageError, match="5 images, but 4 labels"):
        files.mnist(tmp_path, download=False)


@uses_torchvision
def test_damaged_file_is_named_when_a_download_does_not_replace_it(tmp_path: Path) -> None:
    pytest.importorskip("torchvision")
    write_mnist(tmp_path, samples=4)
    path = tmp_path / "MNIST" / "raw" / "train-images-idx3-ubyte"
    truncate(path, 2000)  # torchvision sees that the file exists, and fetches nothing
    with pytest.raises(UsageError, match=r"even after --download .*Remove damaged files"):
        files.mnist(tmp_path, download=True)


def test_toy_is_a_noisy_linear_function() -> None:
    toy = datasets._toy(make(), False)
    inputs, targets = toy.train.__getitems__(list(range(2048)))
    assert (inputs.shape, targets.shape, toy.shape, toy.classes) == (
        (2048, 20, 1, 1),
        (2048, 1),
        (20, 1, 1),
        1,
    )
    assert (toy.task.names, len(toy.test)) == (("loss",), 512)
    network = models.build("linear", shape=toy.shape, classes=toy.classes, seed=0)
    solution = torch.linalg.lstsq(inputs.flatten(1), targets).solution
    with torch.no_grad():
        network[1].weight.copy_(solution.T)
        network[1].bias.zero_()
    tests, expected = toy.test.__getitems__(list(range(512)))
    error = regression().sums(network(tests), (tests, expected))[0].item() / 512
    assert 0.005 < error < 0.02  # the noise has a variance of 0.01
    assert targets.var().item() > 1.0


def test_cross_entropy_cannot_learn_toy() -> None:
    # With one class every answer is right, so the gradient is exactly 0.
    inputs = torch.randn(8, 20, 1, 1)
    network = models.build("linear", shape=(20, 1, 1), classes=1, seed=0)
    labels = torch.zeros(8, dtype=torch.long)
    classification().sums(network(inputs), (inputs, labels))[0].backward()
    assert torch.count_nonzero(network[1].weight.grad) == 0


@pytest.mark.parametrize("dataset", ["synthetic", "toy"])
def test_training_and_test_sets_are_disjoint(dataset: str) -> None:
    loaded = load(make(dataset=dataset), download=False)
    both = torch.cat([loaded.train.inputs, loaded.test.inputs]).flatten(1)
    assert len(torch.unique(both, dim=0)) == len(loaded.train) + len(loaded.test)


def test_in_memory_datasets_move_to_the_device_and_others_stay() -> None:
    meta = torch.device("meta")
    synthetic = load(make(dataset="synthetic", synthetic_size=8, image_size=4), download=False)
    moved = move_to_device(synthetic, meta)
    inputs, labels = moved.train.__getitems__([1, 2, 3])
    assert (inputs.device, labels.device, inputs.shape) == (meta, meta, (3, 3, 4, 4))
    assert moved.test.device == meta
    assert synthetic.train.device.type == "cpu"
    assert move_to_device(synthetic, torch.device("cpu")).train.inputs is synthetic.train.inputs
    other = dataclasses.replace(synthetic, train=Squares())
    assert move_to_device(other, meta).train is other.train


def test_map_style_dataset_is_read_in_the_order_of_the_shares() -> None:
    wanted = list(GlobalBatchSampler(samples=9, batch_size=4, seed=0, rank=2, world_size=3).batches(0))
    assert wanted[-1].count == 0  # idle, but it gets a sample
    for (inputs, labels), one in Loader(Squares())(wanted):
        assert labels.tolist() == one.indices
        assert inputs.flatten().tolist() == [index**2 for index in one.indices]


class BulkSquares(Squares):
    """Reads the tensors of a whole batch at once."""

    def __getitems__(self, indices: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        chosen = torch.tensor(indices)
        return chosen[:, None].float() ** 2, chosen

    def collate(self, batch: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        return batch


class BulkSquaresWithoutRandomNumbers(BulkSquares):
    draws_random_numbers = False


def squares(dataset: torch.utils.data.Dataset) -> Datasets:
    return Datasets(train=dataset, test=dataset, task=regression())


def first_batch(dataset: torch.utils.data.Dataset) -> tuple[torch.Tensor, torch.Tensor]:
    reader = open_reader(dataset, make().data, batch_size=9, seed=0, rank=0, world_size=1, shuffle=False)
    ((batch, _),) = reader.batches()
    return batch


def test_whole_batches_are_read_of_a_dataset_that_draws_no_random_numbers() -> None:
    dataset = BulkSquaresWithoutRandomNumbers()
    inputs, labels = first_batch(dataset)
    assert inputs.flatten().tolist() == [index**2 for index in range(9)]
    assert labels.tolist() == list(range(9))
    assert squares(dataset).example()[1].tolist() == [0, 0]


@pytest.mark.parametrize(
    ("dataset", "message"),
    [
        (BulkSquares(), "BulkSquares.__getitems__ returns a tuple, not a list with one sample per index"),
        (torch.utils.data.Subset(BulkSquares(), [3, 4]), "Subset.__getitems__ returns a tuple, not a list"),
    ],
    ids=["dataset", "subset"],
)
def test_bulk_reader_that_may_draw_random_numbers_must_return_samples(
    dataset: torch.utils.data.Dataset, message: str
) -> None:
    for read in (first_batch, lambda dataset: squares(dataset).example()):
        with pytest.raises(UsageError, match=f"{message}.*draws_random_numbers = False"):
            read(dataset)


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


@uses_torchvision
def test_resnet18_has_ten_outputs_for_stl10() -> None:
    pytest.importorskip("torchvision")
    network = models.build("resnet18", shape=(3, 96, 96), classes=10, seed=0)
    assert network(torch.zeros(2, 3, 96, 96)).shape == (2, 10)


def test_model_begins_with_the_weights_of_its_seed() -> None:
    one, same, other = (models.build("small", shape=(1, 8, 8), classes=10, seed=seed) for seed in (1, 1, 2))
    assert torch.equal(one.fc2.weight, same.fc2.weight)
    assert not torch.equal(one.fc2.weight, other.fc2.weight)


@pytest.mark.parametrize(
    ("model", "shape", "reason"),
    [("resnet18", (1, 64, 64), "3 channels"), ("mnist", (1, 8, 8), "at least 10x10")],
)
def test_model_that_does_not_fit_the_images_is_refused(
    model: str, shape: tuple[int, int, int], reason: str
) -> None:
    with pytest.raises(UsageError, match=reason):
        models.build(model, shape=shape, classes=10, seed=0)


# -- training order ------------------------------------------------------------------------------------------


GRID = list(itertools.product((1, 10, 64, 101), (1, 4, 128), (1, 3, 8)))


def batches_of_ranks(
    samples: int, batch: int, world: int, epoch: int = 0, first_step: int = 0
) -> list[list[RankBatch]]:
    """Return the shares of the epoch for each rank."""
    samplers = [
        GlobalBatchSampler(samples=samples, batch_size=batch, seed=5, rank=rank, world_size=world)
        for rank in range(world)
    ]
    return [list(sampler.batches(epoch, first_step)) for sampler in samplers]


def used(one: RankBatch) -> list[int]:
    return one.indices[: one.count]


@pytest.mark.parametrize(("samples", "batch", "world"), GRID)
def test_global_batches_do_not_depend_on_the_number_of_ranks(samples: int, batch: int, world: int) -> None:
    """Each sample is used once per epoch, and the counts of a step add up to its global count."""
    (single,) = batches_of_ranks(samples, batch, 1)
    assert sorted(index for one in single for index in used(one)) == list(range(samples))
    steps = zip(*batches_of_ranks(samples, batch, world), strict=True)
    for whole, step in zip(single, steps, strict=True):
        assert sorted(index for one in step for index in used(one)) == sorted(used(whole))
        assert {one.global_count for one in step} == {sum(one.count for one in step)}


def test_idle_rank_gets_one_sample_with_weight_0() -> None:
    last = [rank[-1] for rank in batches_of_ranks(22, 5, 3)]
    assert [one.count for one in last] == [1, 1, 0]
    assert len(last[2].indices) == 1


def test_order_depends_on_epoch_and_seed_only() -> None:
    def order(seed: int, epoch: int, **rank: int) -> tuple[int, ...]:
        return tuple(GlobalBatchSampler(samples=50, batch_size=8, seed=seed, **rank).order(epoch))

    assert order(1, 0) == order(1, 0, rank=1, world_size=4)
    orders = {order(seed, epoch) for seed in range(3) for epoch in range(3)}
    assert len(orders) == 9  # the second epoch of one seed is not the first of the next


def test_epoch_started_in_the_middle_continues_the_whole_one() -> None:
    whole = batches_of_ranks(23, 4, 2, epoch=3)
    assert batches_of_ranks(23, 4, 2, epoch=3, first_step=2)[1] == whole[1][2:]
