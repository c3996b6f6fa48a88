"""Pipelines compute what plain training computes: split into stages, in chunks, over devices and over ranks.

The jobs of 2 and 3 ranks run once with all checks of pipeline_checks.py; what needs no other rank is tested
here.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("torch")

import torch
from support.training.check_job import Reports, run_check_job
from support.training.output import max_difference
from support.training.small_trainer import single_process
from torch import nn

from bench.train import sweep, sweep_timing
from train import models
from train.config import make
from train.distributed.communicator import Communicator
from train.distributed.device import select_device
from train.distributed.rank_info import RankInfo
from train.errors import TrainError, UsageError
from train.parallel import select
from train.parallel.partition import partition
from train.parallel.two_devices import TwoDevices
from train.task import classification

pytestmark = [pytest.mark.torch, pytest.mark.xdist_group("train_pipeline")]
CPU, META = torch.device("cpu"), torch.device("meta")


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> Reports:
    return {
        world: run_check_job(world, "pipeline_checks.py", tmp_path_factory.mktemp(f"world{world}"))
        for world in (2, 3)
    }


RUNS = [
    (2, "train_on_two_ranks", "plain", 34),
    (2, "train_on_two_ranks", "more", 37),
    (3, "train_in_three_stages", "plain", 34),
]


@pytest.mark.parametrize(("world", "check", "kind", "samples"), RUNS)
def test_pipeline_weights_equal_plain_training(
    reports: Reports, world: int, check: str, kind: str, samples: int
) -> None:
    """So do the figures of training and validation."""
    for rank in reports[world]:
        plain = rank[check][kind].pop("sequential")
        for mode, found in rank[check][kind].items():
            assert max_difference(found["weights"], plain["weights"]) < 1e-12, mode
            assert (found["train"]["samples"], found["test"]["test_samples"]) == (samples, 7)
            for name in ("loss", "accuracy", "top5"):
                assert found["train"][name] == pytest.approx(plain["train"][name], abs=1e-12)
            assert found["test"] == pytest.approx(plain["test"], abs=1e-12)


@pytest.mark.parametrize("kind", ["training", "eval"])
def test_batchnorm_sees_one_chunk_at_a_time_only_in_training(reports: Reports, kind: str) -> None:
    ranks = [rank["train_one_batch"][kind] for rank in reports[2]]
    for rank in ranks:
        assert max_difference(rank["pipeline"], rank["reference"]) < 1e-12
    for mode in ("gpipe", "1f1b"):
        first, second = (rank[mode] for rank in ranks)
        assert not first.keys() & second.keys()
        assert max_difference({**first, **second}, ranks[0]["reference"]) < 1e-12


def test_every_mode_resumes_the_snapshot_of_every_other(reports: Reports) -> None:
    for rank in reports[2]:
        report = rank["change_modes"]
        assert report["resumed_at"] == [0, 3, 6, 9, 12]
        assert max_difference(report["parts"], report["whole"]) < 1e-12


def test_snapshot_of_another_model_is_refused_by_every_stage(reports: Reports) -> None:
    messages = [rank["load_another_model"] for rank in reports[2]]
    assert messages == ["'it differs in fc2.bias'"] * 2


@pytest.mark.parametrize(
    ("attempt", "message"),
    [
        ("few microbatches", "give --microbatches 2 or more, not 1, or start fewer ranks"),
        ("too many cuts", "4 layers make 5 stages, but there are 2; name 1"),
    ],
)
def test_impossible_pipeline_is_refused_on_every_rank(reports: Reports, attempt: str, message: str) -> None:
    for rank in reports[2]:
        assert message in rank["refuse"][attempt]


def small() -> nn.Sequential:
    return models.small(1, 8, 8, 4)


@pytest.mark.parametrize(
    ("count", "cuts", "starts"),
    [
        (1, "", ["conv1"]),
        (3, "", ["conv1", "fc1", "fc2"]),
        (4, "", ["conv1", "conv2", "fc1", "fc2"]),
        (3, "conv2, fc2", ["conv1", "conv2", "fc2"]),
    ],
)
def test_stages_are_balanced_or_start_at_cuts(count: int, cuts: str, starts: list[str]) -> None:
    whole = small()
    stages = partition(whole, count=count, cuts=cuts)
    assert [next(iter(dict(stage.named_children()))) for stage in stages] == starts
    assert [name for stage in stages for name in stage.state_dict()] == list(whole.state_dict())
    assert [layer for stage in stages for layer in stage] == list(whole)


@pytest.mark.parametrize(
    ("count", "cuts", "message"),
    [
        (5, "", "5 stages, but this model has only 4 layers with parameters (conv1, conv2, fc1, fc2)"),
        (2, "layer3", "no layer is named 'layer3'; choose from relu1, conv2"),
        (2, "conv2,fc1", "2 layers make 3 stages, but there are 2; name 1"),
        (3, "fc1,conv2", "name layers in their order"),
        (3, "fc1,fc1", "without repeating one"),
        (2, "conv1", "without the first one"),
        (3, "relu2,fc1", "stage 1 (relu2, pool, flatten) would have no parameters"),
        (1, "fc1", "1 layers make 2 stages, but there are 1; name 0"),
    ],
)
def test_invalid_cuts_are_refused_with_advice(count: int, cuts: str, message: str) -> None:
    with pytest.raises(UsageError) as refused:
        partition(small(), count=count, cuts=cuts)
    assert message in str(refused.value)


def test_model_must_be_a_sequence_without_shared_parameters_between_stages() -> None:
    with pytest.raises(UsageError, match=r"only an nn\.Sequential can be split .* a Linear"):
        partition(nn.Linear(2, 2), count=2)
    tied = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2))
    tied[2].weight = tied[0].weight
    with pytest.raises(UsageError, match=r"stages 0 and 1 .* share parameters"):
        partition(tied, count=2)


def test_resnet50_in_two_stages_equals_torchvision() -> None:
    torchvision = pytest.importorskip("torchvision")
    torch.manual_seed(0)
    ours = models.resnet("resnet50", 3, 10).double().eval()
    with torch.device("meta"):
        theirs = torchvision.models.resnet50(num_classes=10).double().eval()
    theirs.load_state_dict(ours.state_dict(), assign=True)
    halves = TwoDevices(ours, (CPU, CPU))
    assert [list(dict(stage.named_children())) for stage in halves.stages] == [
        ["conv1", "bn1", "relu", "maxpool", "layer1", "layer2"],
        ["layer3", "layer4", "avgpool", "flatten", "fc"],
    ]
    assert list(halves.state_dict()) == list(theirs.state_dict())
    images = torch.randn(3, 3, 32, 32, dtype=torch.float64)
    with torch.no_grad():
        expected = theirs(images)
        for split_size in (0, 2):
            halves.split_size = split_size
            assert (halves(images) - expected).abs().max().item() < 1e-12


def test_second_stage_and_outputs_are_on_the_second_device() -> None:
    # The meta device is the second one: it computes nothing, but refuses tensors of another device.
    halves = TwoDevices(small(), (CPU, META), cuts="fc1", split_size=2)
    assert [{weight.device for weight in stage.parameters()} for stage in halves.stages] == [{CPU}, {META}]
    outputs = halves(torch.randn(5, 1, 8, 8))
    assert (outputs.device, outputs.shape) == (META, (5, 4))


@pytest.mark.parametrize(
    ("parallel", "gpus", "visible", "local_rank", "selected"),
    [
        ("pipeline", 8, False, 3, 6),
        ("pipeline", 2, True, 1, 0),  # the launcher shows each process its own two
        ("pipeline", 4, True, 1, 2),
        ("ddp", 8, False, 3, 3),
        ("ddp", 1, True, 3, 0),
        ("gpipe", 2, True, 1, 1),
    ],
)
def test_gpus_are_selected_by_local_rank(
    parallel: str, gpus: int, visible: bool, local_rank: int, selected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_gpus(monkeypatch, gpus, visible=visible)
    info = RankInfo(rank=8 + local_rank, local_rank=local_rank, world_size=16, distributed=True)
    assert select_device(make(parallel=parallel), info) == torch.device("cuda", selected)


@pytest.mark.parametrize(
    ("gpus", "local_rank", "needed", "advice"), [(1, 0, 2, "GPUs / 2, or"), (4, 2, 6, "GPUs / 2, here")]
)
def test_too_few_gpus_for_two_per_process_are_refused(
    gpus: int, local_rank: int, needed: int, advice: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_gpus(monkeypatch, gpus, visible=False)
    with pytest.raises(UsageError) as refused:
        select_device(make(parallel="pipeline"), RankInfo(local_rank=local_rank, distributed=True))
    assert f"local rank {local_rank} needs {needed} GPUs on this node, which has {gpus}; " in str(
        refused.value
    )
    assert f"start with --nproc-per-node = {advice}" in str(refused.value)


def set_gpus(monkeypatch: pytest.MonkeyPatch, gpus: int, *, visible: bool) -> None:
    """Make torch report `gpus` GPUs, with CUDA_VISIBLE_DEVICES set if `visible`."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(gpus))))


@pytest.mark.parametrize("mode", ["ddp", "pipeline"])
def test_batchnorm_on_a_single_sample_is_explained(mode: str) -> None:
    layers = [nn.Flatten(), nn.Linear(64, 8), nn.BatchNorm1d(8), nn.Linear(8, 4)]
    config = make(dataset="synthetic", parallel=mode, split_size=int(mode == "pipeline"))
    size = 4 if mode == "pipeline" else 1
    batch = torch.randn(size, 1, 8, 8), torch.arange(size)
    model = nn.Sequential(*layers)
    strategy = select.build(config, single_process(), model, classification(), lambda: batch)
    with pytest.raises(TrainError, match="a part of the batch has one sample"):
        strategy.train_batch([(batch, size)], global_count=size)


def test_second_device_of_a_process_is_seeded_too(monkeypatch: pytest.MonkeyPatch) -> None:
    seeded: list[int] = []
    monkeypatch.setattr(torch.cuda, "manual_seed_all", seeded.append)
    Communicator(info=RankInfo(), device=torch.device("cuda", 0)).seed(7)
    assert seeded == [7]


def test_sweep_times_every_mode_and_claims_no_speed_on_a_cpu(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    size = ["--model", "mnist", "--batch-size", "6", "--image-size", "12", "--steps", "1", "--repeats", "3"]
    assert sweep.main([*size, "--json", str(tmp_path / "sweep.json"), "--splits", "4,2,7"]) == 0
    assert sweep_timing.CPU_NOTE in capsys.readouterr().out
    report = json.loads((tmp_path / "sweep.json").read_text(encoding="utf-8"))
    modes = [("one device", 0), ("two devices, naive", 0), ("pipeline", 2), ("pipeline", 4)]
    assert [(row["mode"], row["split_size"]) for row in report["rows"]] == modes
    for row in report["rows"]:
        assert 0 < row["least"] <= row["seconds"] <= row["most"]
        assert row["images_per_second"] == pytest.approx(6 / row["seconds"])
        assert row["against_one_device"] is None
    assert (report["note"], report["settings"]["batch_size"]) == (sweep_timing.CPU_NOTE, 6)
