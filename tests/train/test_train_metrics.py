"""Throughput, data-wait share and MFU, and the files and lines that show them."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

pytest.importorskip("torch")

import torch
from torch import nn

from train.metrics import throughput
from train.record import output
from train.record.output import RunOutput
from train.record.report import averages, step_line
from train.task import classification, first_part, regression

pytestmark = pytest.mark.torch
# It takes seconds to import: one worker does, which runs all tests that use it.
uses_torchvision = pytest.mark.xdist_group("train_pipeline")


def flops(module: nn.Module, *shape: int) -> float | None:
    return throughput.training_flops(module, first_part, (torch.zeros(2, *shape),))


@pytest.mark.parametrize(
    ("name", "peak"),
    [
        ("NVIDIA H100 80GB HBM3", 989e12),
        ("NVIDIA H100 PCIe", 756e12),
        ("NVIDIA H200", 989e12),
        ("NVIDIA L40S", 362e12),
        ("NVIDIA L4", 121e12),
        ("Tesla V100-SXM2-16GB", 125e12),
        ("Tesla V100-PCIE-32GB", 112e12),
        ("NVIDIA L40", None),
        ("NVIDIA T400", None),
    ],
)
def test_peak_flops_distinguish_similar_names(name: str, peak: float | None) -> None:
    assert throughput.peak_flops_by_name(name) == peak


def test_flops_count_a_multiply_add_as_two_and_no_input_gradient() -> None:
    # Forward 2*3*4; backward the same for the weight, and nothing for an input that is data.
    assert flops(nn.Linear(3, 4), 3) == 2 * 24
    two = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 5))
    assert flops(two, 3) == 2 * 24 + 3 * 40


@uses_torchvision
def test_resnet18_flops_equal_the_published_count_and_model_is_unchanged() -> None:
    torchvision = pytest.importorskip("torchvision")
    network = torchvision.models.resnet18(weights=None)
    network.fc = nn.Sequential(nn.Dropout(0.5), network.fc)
    before = {name: value.clone() for name, value in network.state_dict().items()}
    random_state = torch.get_rng_state()
    counted = flops(network, 3, 224, 224)
    assert counted == pytest.approx(10.65e9, rel=0.001)
    after = network.state_dict()
    assert all(torch.equal(value, after[name]) for name, value in before.items())
    assert all(weights.grad is None and weights.device.type == "cpu" for weights in network.parameters())
    assert network.training
    assert torch.equal(torch.get_rng_state(), random_state)


def test_flops_of_data_dependent_model_are_unknown_and_it_stays_usable() -> None:
    class DataDependent(nn.Linear):
        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            return super().forward(inputs) if inputs.sum().item() > 0 else inputs

    network = DataDependent(3, 4)
    assert flops(network, 3) is None
    assert network(torch.ones(2, 3)).shape == (2, 4)


def test_rates_are_those_of_the_whole_job() -> None:
    # 4 ranks, 10 steps in 2 s each, 0.5 s of it waiting, 800 samples in total.
    cpu = torch.device("cpu")
    values = throughput.rates(
        [2.0, 8.0], steps=10, samples=800, world_size=4, flops=1e9, peak=1e12, device=cpu
    )
    assert values == {
        "samples_per_second": 400.0,
        "samples_per_second_per_device": 100.0,
        "step_seconds": 0.2,
        "data_wait": 0.25,
        "mfu": 0.1,  # 100 samples of 1e9 FLOPs each second, of 1e12
    }


def test_step_line_has_the_format_of_pytorch_examples() -> None:
    task = classification()
    line = averages(task, torch.tensor([23.0, 10, 2, 10, 8, 10, 0.1, 2.0]), 4)
    total = {"time": 0.25, "data": 0.01, "loss": 2.25, "accuracy": 0.125, "top5": 0.5}
    assert line == pytest.approx({"time": 0.5, "data": 0.025, "loss": 2.3, "accuracy": 0.2, "top5": 0.8})
    assert step_line(place="[0][10/79]", line=line, since_epoch_start=total) == (
        "Epoch: [0][10/79]\tTime 0.500 (0.250)\tData 0.025 (0.010)\tLoss 2.3000 (2.2500)\t"
        "Prec@1 20.000 (12.500)\tPrec@5 80.000 (50.000)"
    )


def test_step_line_of_a_regression_has_no_precision() -> None:
    one = averages(regression(), torch.tensor([5.0, 10, 0.0, 1.0]), 1)
    assert step_line(place="[3][1/2]", line=one, since_epoch_start=one) == (
        "Epoch: [3][1/2]\tTime 1.000 (1.000)\tData 0.000 (0.000)\tLoss 0.5000 (0.5000)"
    )


def test_non_finite_numbers_are_null_in_the_files(tmp_path: Path) -> None:
    def strict(text: str) -> object:
        return json.loads(text, parse_constant=lambda word: pytest.fail(f"{word} is not JSON"))

    record = RunOutput(tmp_path, enabled=True)
    record.open(0)
    record.record("train", step=1, loss=math.nan, lr=0.5, mfu=math.inf, top=[1.0, -math.inf])
    record.write_status("preempted", step=1, best={"loss": math.nan})
    record.close()
    line = strict((tmp_path / output.METRICS).read_text())
    assert {name: line[name] for name in ("loss", "lr", "mfu", "top")} == {
        "loss": None,
        "lr": 0.5,
        "mfu": None,
        "top": [1.0, None],
    }
    status = strict((tmp_path / output.STATUS).read_text())
    assert status == {"state": "preempted", "step": 1, "best": {"loss": None}}


def test_launcher_gets_a_copy_of_the_status_if_it_can_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy = tmp_path / "launcher.json"
    record = RunOutput(tmp_path, enabled=True)
    monkeypatch.setenv("CLOUDDDP_STATUS_FILE", str(copy))
    record.write_status("running", step=3, steps=9)
    assert copy.read_text() == (tmp_path / output.STATUS).read_text()
    monkeypatch.setenv("CLOUDDDP_STATUS_FILE", str(tmp_path / "gone" / "launcher.json"))
    record.write_status("finished", step=9, steps=9)
    assert json.loads((tmp_path / output.STATUS).read_text())["state"] == "finished"


GARBAGE = [
    b'{"kind": "\xff\xfe\x00',
    b"\x00" * 4096,
    b"[" * 200_000,
    b'{"kind": "train", "step": NaN}\n{"kind": "train", "step": "2"}\n{"kind": "train"}',
    b'17\n"step"\n[1, 2]\nnull\n',
]


@pytest.mark.parametrize("garbage", GARBAGE, ids=["half", "zeros", "nested", "fields", "values"])
def test_lines_damaged_by_a_crash_are_dropped(tmp_path: Path, garbage: bytes) -> None:
    good = b'{"kind": "train", "step": 1}\n'
    (tmp_path / output.METRICS).write_bytes(good + garbage)
    record = RunOutput(tmp_path, enabled=True)
    record.open(1)
    record.close()
    assert (tmp_path / output.METRICS).read_bytes() == good
