"""Throughput, data-wait share and MFU, and the line that shows them."""

from __future__ import annotations

import json
import math
import time
from pathlib import Path

import pytest

pytest.importorskip("torch")

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from train import data, dist, metrics, models, parallel, speed
from train.config import make
from train.metrics import Meters, Metrics, meters, step_line
from train.trainer import Trainer

pytestmark = pytest.mark.torch


@pytest.mark.parametrize(
    ("name", "peak"),
    [
        ("NVIDIA A100-SXM4-40GB", 312e12),
        ("NVIDIA H100 80GB HBM3", 989e12),
        ("NVIDIA H100 PCIe", 756e12),
        ("NVIDIA H200", 989e12),
        ("NVIDIA B200", 2.25e15),
        ("NVIDIA L40S", 362e12),
        ("NVIDIA L4", 121e12),
        ("Tesla T4", 65e12),
        ("Tesla V100-SXM2-16GB", 125e12),
        ("Tesla V100-PCIE-32GB", 112e12),
        ("NVIDIA A10G", None),
        ("NVIDIA L40", None),
        ("NVIDIA T400", None),
    ],
)
def test_the_peak_is_that_of_the_gpu_and_not_of_one_with_a_similar_name(
    name: str, peak: float | None
) -> None:
    assert speed.named_peak(name) == peak


def test_a_cpu_has_no_peak() -> None:
    assert speed.peak_flops(torch.device("cpu")) is None


def test_a_multiply_add_counts_as_two_and_the_input_needs_no_gradient() -> None:
    # Forward 2*3*4; backward the same for the weight, and nothing for an input that is data.
    assert speed.training_flops(nn.Linear(3, 4), torch.zeros(1, 3)) == 2 * 24
    two = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 5))
    assert speed.training_flops(two, torch.zeros(1, 3)) == 2 * 24 + 3 * 40


def test_resnet18_needs_what_is_published_and_stays_as_it_was() -> None:
    torchvision = pytest.importorskip("torchvision")
    network = torchvision.models.resnet18(weights=None)
    network.fc = nn.Sequential(nn.Dropout(0.5), network.fc)
    before = {name: value.clone() for name, value in network.state_dict().items()}
    random_state = torch.get_rng_state()
    flops = speed.training_flops(network, torch.zeros(1, 3, 224, 224))
    assert flops == pytest.approx(10.65e9, rel=0.001)
    after = network.state_dict()
    assert all(torch.equal(value, after[name]) for name, value in before.items())
    assert all(weights.grad is None and weights.device.type == "cpu" for weights in network.parameters())
    assert network.training
    assert torch.equal(torch.get_rng_state(), random_state)


def test_batchnorm_at_a_single_pixel_can_be_counted() -> None:
    network = nn.Sequential(nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(4, 1))
    assert speed.training_flops(network, torch.zeros(1, 2, 3, 3)) == 2 * 2 * 18 * 4 + 3 * 8


def test_a_model_that_looks_at_its_data_has_no_count_and_stays_usable() -> None:
    class Looks(nn.Linear):
        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            return super().forward(inputs) if inputs.sum().item() > 0 else inputs

    network = Looks(3, 4)
    assert speed.training_flops(network, torch.zeros(1, 3)) is None
    assert network(torch.ones(2, 3)).shape == (2, 4)


def test_a_window_separates_waiting_for_data_from_the_rest() -> None:
    def slow() -> object:
        for item in "abc":
            time.sleep(0.02)
            yield item

    window = speed.Window()
    seen = []
    for item in window.watch(slow()):
        seen.append(item)
        time.sleep(0.01)
    data_seconds, seconds = window.sums()
    assert seen == ["a", "b", "c"]
    assert window.steps == 3
    assert 0.06 <= data_seconds <= seconds - 0.03


def test_a_pause_is_not_counted_and_a_restart_forgets() -> None:
    begun = time.perf_counter()
    window = speed.Window()
    with window.paused():
        time.sleep(0.05)
    inside = window.sums()[1]
    assert inside <= time.perf_counter() - begun - 0.05
    assert list(window.watch("ab")) == ["a", "b"]
    window.restart()
    assert (window.steps, window.data_seconds) == (0, 0.0)


def test_figures_are_those_of_the_whole_job() -> None:
    # 4 ranks, 10 steps in 2 s each, of which 0.5 s waiting, 800 samples in all.
    cpu = torch.device("cpu")
    values = speed.figures([2.0, 8.0], steps=10, samples=800, world=4, flops=1e9, peak=1e12, device=cpu)
    assert values == {
        "samples_per_second": 400.0,
        "samples_per_second_per_device": 100.0,
        "step_seconds": 0.2,
        "data_wait": 0.25,
        "mfu": 0.1,  # 100 samples of 1e9 FLOPs each second, of 1e12
    }


def test_an_empty_window_divides_by_nothing() -> None:
    assert set(speed.figures([0.0, 0.0], steps=0, samples=0, world=1).values()) == {0.0}


def test_the_step_line_has_the_form_of_the_walk_through() -> None:
    now = meters([23.0, 2, 8, 10, 0.1, 2.0], steps=2, world=2)
    mean = Meters(seconds=0.25, data_seconds=0.01, loss=2.25, top1=0.125, top5=0.5)
    assert now == Meters(seconds=0.5, data_seconds=0.025, loss=2.3, top1=0.2, top5=0.8)
    assert step_line(epoch=0, step=10, steps=79, now=now, mean=mean) == (
        "Epoch: [0][10/79]\tTime 0.500 (0.250)\tData 0.025 (0.010)\tLoss 2.3000 (2.2500)\t"
        "Prec@1 20.000 (12.500)\tPrec@5 80.000 (50.000)"
    )


def test_the_step_line_of_a_regression_shows_no_precision() -> None:
    one = meters([5.0, 0, 0, 10, 0.0, 1.0], steps=1, world=1, guesses=False)
    assert step_line(epoch=3, step=1, steps=2, now=one, mean=one) == (
        "Epoch: [3][1/2]\tTime 1.000 (1.000)\tData 0.000 (0.000)\tLoss 0.5000 (0.5000)"
    )


def test_what_is_no_number_is_null_in_the_files(tmp_path: Path) -> None:
    def strict(text: str) -> object:
        return json.loads(text, parse_constant=lambda word: pytest.fail(f"{word} is not JSON"))

    record = Metrics(tmp_path, enabled=True, tensorboard=False)
    record.open(0)
    record.record("train", step=1, loss=math.nan, lr=0.5, mfu=math.inf, top=[1.0, -math.inf])
    record.status("preempted", step=1, best={"loss": math.nan})
    record.close()
    line = strict((tmp_path / metrics.METRICS).read_text())
    assert {name: line[name] for name in ("loss", "lr", "mfu", "top")} == {
        "loss": None,
        "lr": 0.5,
        "mfu": None,
        "top": [1.0, None],
    }
    status = strict((tmp_path / metrics.STATUS).read_text())
    assert status == {"state": "preempted", "step": 1, "best": {"loss": None}}


def test_a_launcher_is_told_too_where_it_says_and_a_run_outlives_its_absence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    launchers = tmp_path / "launcher.json"
    record = Metrics(tmp_path, enabled=True, tensorboard=False)
    monkeypatch.setenv("CLOUDDDP_STATUS_FILE", str(launchers))
    record.status("running", step=3, steps=9)
    assert launchers.read_text() == (tmp_path / metrics.STATUS).read_text()
    monkeypatch.setenv("CLOUDDDP_STATUS_FILE", str(tmp_path / "gone" / "launcher.json"))
    record.status("finished", step=9, steps=9)
    assert json.loads((tmp_path / metrics.STATUS).read_text())["state"] == "finished"


class Waits(TorchDispatchMode):
    """Counts how often a float is asked of a tensor, for which the host would have to wait for a GPU. (Integers are
    the sizes of shards, which never leave the host.)"""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        self.count += func is torch.ops.aten._local_scalar_dense.default and args[0].is_floating_point()
        return func(*args, **(kwargs or {}))


def test_a_step_waits_for_the_device_once(tmp_path: Path) -> None:
    config = make(
        dataset="synthetic", synthetic_size=8, image_size=8, batch_size=4, clip=1.0, out=str(tmp_path)
    )
    ranks = dist.Ranks(place=dist.Place(), device=torch.device("cpu"))
    loaded = data.load(config, download=False)
    module = models.build(config.model, shape=loaded.shape, classes=loaded.classes, seed=0)
    spread = parallel.build(config, ranks, module, shape=loaded.shape)
    quiet = Metrics(tmp_path, enabled=False, tensorboard=False)
    subject = Trainer(config=config, ranks=ranks, parallel=spread, data=loaded, metrics=quiet)
    for batch in subject.train_loader(list(subject.batches.epoch(0))):
        with Waits() as waits:
            subject.train_step(*batch)
        assert waits.count == 1  # for the norm of the gradients, which must be finite


def test_lines_that_a_crash_filled_with_anything_are_dropped(tmp_path: Path) -> None:
    good = b'{"kind": "train", "step": 1}\n'
    (tmp_path / metrics.METRICS).write_bytes(good + b'{"kind": "\xff\xfe\x00')
    record = Metrics(tmp_path, enabled=True, tensorboard=False)
    record.open(1)
    record.close()
    assert (tmp_path / metrics.METRICS).read_bytes() == good
