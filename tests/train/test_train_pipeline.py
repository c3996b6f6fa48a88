"""Pipelines compute what plain training computes: cut into stages, in pieces, over devices and over ranks.

The jobs of 2 and 3 ranks run once, do all of pipeline_checks.py, and the tests here compare what their ranks saw;
what needs no other rank is done here.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import train_harness as harness

pytest.importorskip("torch")

import torch
from torch import nn

from train import models, parallel, scores, sweep
from train.config import make
from train.cut import cut
from train.dist import Place, Ranks, pick_device
from train.errors import TrainError, UsageError
from train.pipeline import TwoDevices

pytestmark = [pytest.mark.torch, pytest.mark.xdist_group("train_pipeline")]  # one worker runs the jobs
CHECKS = Path(__file__).with_name("pipeline_checks.py")
CPU, META = torch.device("cpu"), torch.device("meta")

Seen = dict[int, list[dict[str, Any]]]


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> Seen:
    """World size -> what each of its ranks reported."""
    reports = {}
    for world in (2, 3):
        folder = tmp_path_factory.mktemp(f"world{world}")
        harness.job(world, CHECKS, folder)
        reports[world] = [torch.load(folder / f"rank{rank}.pt") for rank in range(world)]
    return reports


def furthest(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    """The largest difference between two states of the same names."""
    assert one.keys() == other.keys()
    return max((one[name] - other[name]).abs().max().item() for name in one)


RUNS = [
    (2, "train_in_two_processes", "plain", ["naive", "split 5", "hybrid", "gpipe", "1f1b"]),
    (2, "train_in_two_processes", "more", ["split 1", "hybrid", "gpipe", "1f1b"]),
    (3, "train_in_three_stages", "plain", ["gpipe", "1f1b"]),
]


@pytest.mark.parametrize(("world", "check", "kind", "modes"), RUNS)
def test_every_pipeline_ends_with_the_weights_of_plain_training(
    seen: Seen, world: int, check: str, kind: str, modes: list[str]
) -> None:
    for rank in seen[world]:
        runs = rank[check][kind]
        apart = {mode: furthest(runs[mode]["weights"], runs["sequential"]["weights"]) for mode in modes}
        assert max(apart.values()) < 1e-12, apart


@pytest.mark.parametrize(("world", "check", "kind", "modes"), RUNS)
def test_every_pipeline_reports_each_sample_once_and_the_same_figures(
    seen: Seen, world: int, check: str, kind: str, modes: list[str]
) -> None:
    samples = {"plain": 34, "more": 37}[kind]
    for rank in seen[world]:
        plain = rank[check][kind]["sequential"]
        for mode in modes:
            train, test = rank[check][kind][mode]["train"], rank[check][kind][mode]["test"]
            assert (train["samples"], test["test_samples"]) == (samples, 7)
            for name in ("loss", "accuracy", "top5"):
                assert train[name] == pytest.approx(plain["train"][name], abs=1e-12)
            assert test == pytest.approx(plain["test"], abs=1e-12)


@pytest.mark.parametrize("kind", ["training", "eval"])
def test_batchnorm_sees_each_piece_by_itself_in_training_and_no_batch_at_all_in_eval(
    seen: Seen, kind: str
) -> None:
    reports = [rank["take_one_batch"][kind] for rank in seen[2]]
    for report in reports:
        assert furthest(report["pipeline"], report["by hand"]) < 1e-12
    for mode in ("gpipe", "1f1b"):
        first, second = (report[mode] for report in reports)
        assert not first.keys() & second.keys()
        assert furthest({**first, **second}, reports[0]["by hand"]) < 1e-12


def test_every_mode_goes_on_from_the_snapshot_of_every_other(seen: Seen) -> None:
    for rank in seen[2]:
        report = rank["change_modes"]
        assert report["resumed_at"] == [0, 3, 6, 9, 12]
        assert furthest(report["parts"], report["whole"]) < 1e-12


def test_mixed_precision_trains_alike_in_every_pipeline(seen: Seen) -> None:
    for rank in seen[2]:
        plain, pipeline, gpipe = rank["train_in_half_precision"].values()
        assert plain < 1.4
        assert (pipeline, gpipe) == (pytest.approx(plain, abs=1e-3), pytest.approx(plain, abs=1e-3))


def test_a_snapshot_of_another_model_is_refused_by_the_stages_that_would_fit_too(seen: Seen) -> None:
    told = [rank["load_another_model"] for rank in seen[2]]
    assert told == ["'it differs in fc2.bias'"] * 2


@pytest.mark.parametrize(
    ("attempt", "told"),
    [
        ("few microbatches", "give --microbatches 2 or more, not 1, or start fewer ranks"),
        ("many cuts", "4 of them make 5 stages, but there are 2; name 1"),
        ("sync_bn", "--sync-bn works with --parallel ddp only"),
    ],
)
def test_what_cannot_be_a_pipeline_is_refused_on_every_rank(seen: Seen, attempt: str, told: str) -> None:
    for rank in seen[2]:
        assert told in rank["refuse"][attempt]


def small() -> nn.Sequential:
    return models.small(1, 8, 8, 4)


@pytest.mark.parametrize(
    ("parts", "cuts", "begins"),
    [
        (1, "", ["conv1"]),
        (2, "", ["conv1", "fc1"]),
        (3, "", ["conv1", "fc1", "fc2"]),
        (4, "", ["conv1", "conv2", "fc1", "fc2"]),
        (2, "pool", ["conv1", "pool"]),
        (3, "conv2, fc2", ["conv1", "conv2", "fc2"]),
    ],
)
def test_stages_hold_as_many_layers_with_parameters_each_or_begin_where_cuts_says(
    parts: int, cuts: str, begins: list[str]
) -> None:
    whole = small()
    stages = cut(whole, parts=parts, cuts=cuts)
    assert [next(iter(dict(stage.named_children()))) for stage in stages] == begins
    assert [name for stage in stages for name in stage.state_dict()] == list(whole.state_dict())
    assert [layer for stage in stages for layer in stage] == list(whole)


@pytest.mark.parametrize(
    ("parts", "cuts", "told"),
    [
        (5, "", "5 stages, but this model has 4 layers with parameters (conv1, conv2, fc1, fc2)"),
        (2, "layer3", "there is no layer 'layer3'; choose from relu1, conv2"),
        (2, "conv2,fc1", "2 of them make 3 stages, but there are 2; name 1"),
        (3, "fc1,conv2", "each must be a later layer"),
        (3, "fc1,fc1", "each must be a later layer"),
        (2, "conv1", "none the first"),
        (3, "relu2,fc1", "stage 1 (relu2, pool, flatten) would have no parameters"),
        (1, "fc1", "1 of them make 2 stages, but there are 1; name 0"),
    ],
)
def test_cuts_that_do_not_fit_are_refused_with_what_would(parts: int, cuts: str, told: str) -> None:
    with pytest.raises(UsageError) as refused:
        cut(small(), parts=parts, cuts=cuts)
    assert told in str(refused.value)


def test_a_model_that_is_not_a_sequence_or_shares_parameters_between_stages_is_refused() -> None:
    with pytest.raises(UsageError, match=r"only an nn\.Sequential can be cut .* a Linear"):
        cut(nn.Linear(2, 2), parts=2)
    tied = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2))
    tied[2].weight = tied[0].weight
    with pytest.raises(UsageError, match=r"stages 0 and 1 .* share parameters"):
        cut(tied, parts=2)


@pytest.mark.parametrize("split_size", [0, 2])
def test_resnet50_in_two_stages_is_torchvisions_resnet50(split_size: int) -> None:
    torchvision = pytest.importorskip("torchvision")
    torch.manual_seed(0)
    ours = models.resnet("resnet50", 3, 10).double().eval()
    theirs = torchvision.models.resnet50(num_classes=10).double().eval()
    theirs.load_state_dict(ours.state_dict())
    halves = TwoDevices(ours, (CPU, CPU), split_size=split_size)
    assert [list(dict(stage.named_children())) for stage in halves.stages] == [
        ["conv1", "bn1", "relu", "maxpool", "layer1", "layer2"],
        ["layer3", "layer4", "avgpool", "flatten", "fc"],
    ]
    assert list(halves.state_dict()) == list(theirs.state_dict())
    images = torch.randn(3, 3, 32, 32, dtype=torch.float64)
    assert (halves(images) - theirs(images)).abs().max().item() < 1e-12


def test_two_linear_layers_on_two_devices_train_as_on_one() -> None:
    torch.manual_seed(0)
    layers = [nn.Linear(10, 10), nn.ReLU(), nn.Linear(10, 5)]
    plain = nn.Sequential(*layers).double()
    halves = TwoDevices(nn.Sequential(nn.Linear(10, 10), nn.ReLU(), nn.Linear(10, 5)).double(), (CPU, CPU))
    halves.load_state_dict(plain.state_dict())
    inputs, targets = torch.randn(20, 10).double(), torch.randn(20, 5).double()
    losses = {}
    for name, model in (("plain", plain), ("halves", halves)):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        losses[name] = []
        for _ in range(5):
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(model(inputs), targets)
            loss.backward()
            optimizer.step()
            losses[name].append(loss.item())
    assert losses["halves"] == pytest.approx(losses["plain"], abs=1e-12)
    assert losses["halves"] == sorted(losses["halves"], reverse=True)
    assert losses["halves"][-1] < 0.9 * losses["halves"][0]


@pytest.mark.parametrize("split_size", [0, 2])
def test_the_second_stage_and_the_outputs_are_on_the_second_device(split_size: int) -> None:
    # The meta device stands for the second one: it computes nothing, but refuses tensors of another device.
    halves = TwoDevices(small(), (CPU, META), cuts="fc1", split_size=split_size)
    assert [{weight.device for weight in stage.parameters()} for stage in halves.stages] == [{CPU}, {META}]
    outputs = halves(torch.randn(5, 1, 8, 8))
    assert (outputs.device, outputs.shape) == (META, (5, 4))


@pytest.mark.parametrize(
    ("parallel", "gpus", "visible", "local_rank", "picked"),
    [
        ("pipeline", 8, False, 0, 0),
        ("pipeline", 8, False, 3, 6),
        ("pipeline", 2, True, 1, 0),  # the launcher shows each process its own two
        ("pipeline", 4, True, 1, 2),
        ("ddp", 8, False, 3, 3),
        ("ddp", 1, True, 3, 0),
        ("gpipe", 2, True, 1, 1),
    ],
)
def test_a_rank_takes_its_gpus_by_its_local_rank(
    parallel: str, gpus: int, visible: bool, local_rank: int, picked: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    see(monkeypatch, gpus, visible=visible)
    place = Place(rank=8 + local_rank, local_rank=local_rank, world=16, grouped=True)
    assert pick_device(make(parallel=parallel), place) == torch.device("cuda", picked)


@pytest.mark.parametrize(
    ("gpus", "local_rank", "told"),
    [
        (
            1,
            0,
            "local rank 0 needs 2 on this node, which has 1; start with --nproc-per-node = GPUs / 2, or give",
        ),
        (
            4,
            2,
            "local rank 2 needs 6 on this node, which has 4; start with --nproc-per-node = GPUs / 2, here 2",
        ),
    ],
)
def test_too_few_gpus_for_two_per_process_are_refused_with_how_many_are_needed(
    gpus: int, local_rank: int, told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    see(monkeypatch, gpus, visible=False)
    with pytest.raises(UsageError) as refused:
        pick_device(make(parallel="pipeline"), Place(local_rank=local_rank, grouped=True))
    assert told in str(refused.value)


def see(monkeypatch: pytest.MonkeyPatch, gpus: int, *, visible: bool) -> None:
    """Let torch report `gpus` GPUs, with CUDA_VISIBLE_DEVICES set if `visible`."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(gpus))))


@pytest.mark.parametrize("mode", ["ddp", "pipeline"])
def test_a_piece_of_one_sample_that_batchnorm_cannot_train_on_is_explained(mode: str) -> None:
    layers = [nn.Flatten(), nn.Linear(64, 8), nn.BatchNorm1d(8), nn.Linear(8, 4)]
    config = make(dataset="synthetic", parallel=mode, split_size=int(mode == "pipeline"))
    ranks = Ranks(place=Place(), device=CPU)
    subject = parallel.build(config, ranks, nn.Sequential(*layers), shape=(1, 8, 8))
    size = 4 if mode == "pipeline" else 1
    batch = torch.randn(size, 1, 8, 8), torch.arange(size), size
    with pytest.raises(TrainError, match="a piece of the batch has one sample"):
        subject.train_batch([batch], scores.classify, global_count=size)


def test_each_step_seeds_the_second_device_of_a_process_too(monkeypatch: pytest.MonkeyPatch) -> None:
    seeded: list[int] = []
    monkeypatch.setattr(torch.cuda, "manual_seed_all", seeded.append)
    Ranks(place=Place(), device=torch.device("cuda", 0)).seed(7)
    assert seeded == [7]


def test_gpipe_with_one_rank_says_so_and_explains_a_piece_of_one_sample(tmp_path: Path) -> None:
    pytest.importorskip("torchvision")
    flags = ["--dataset", "synthetic", "--synthetic-size", 8, "--image-size", 32, "--model", "resnet18"]
    flags += ["--parallel", "gpipe", "--microbatches", 4, "--batch-size", 4, "--no-tensorboard"]
    done = harness.python("-m", "train.main", *flags, "--out", tmp_path)
    assert done.returncode == 1
    assert done.stdout == "--parallel gpipe with one rank is one stage: it works, and gains nothing\n"
    assert "train: rank 0: a piece of the batch has one sample" in done.stderr
    assert "Traceback" not in done.stderr


def test_what_the_ranks_refuse_is_one_sentence_under_torchrun_too(tmp_path: Path) -> None:
    flags = ["--dataset", "synthetic", "--parallel", "1f1b", "--microbatches", 1, "--out", tmp_path]
    done = harness.torchrun(2, "-m", "train.main", *flags)
    assert done.returncode == 1  # torchrun's own, whatever a rank's was
    said = [line for line in done.stderr.splitlines() if line.startswith("train: rank")]
    assert said
    assert all("--parallel 1f1b needs at least as many microbatches as stages" in line for line in said)
    assert "exitcode  : 2" in done.stderr
    assert "error_file: <N/A>" not in done.stderr  # torchrun's summary shows the cause


@pytest.mark.parametrize(
    ("argv", "told"),
    [
        (["--splits", "5,many"], "numbers from 1 up with commas between"),
        (["--splits", "5", "--batch-size", "2"], "none is within the batch of 2"),
        (["--json", "missing/out.json"], "no such folder"),
        (["--device", "cuda"], "the sweep needs two GPUs"),
        (["--model", "vgg"], "must be one of small, mnist"),
        (["--batch-size", "2", "--splits", "1", "--cuts", "layer9"], "there is no layer 'layer9'"),
    ],
)
def test_a_sweep_that_cannot_work_is_refused(
    argv: list[str],
    told: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    own = ["--model", "resnet18", "--image-size", "32", "--steps", "1", "--repeats", "1"]
    assert sweep.main([*own, *argv]) == 2
    said = capsys.readouterr().err
    assert said.startswith("sweep: ")
    assert told in said


def test_the_sweep_times_every_mode_and_claims_no_speed_on_a_cpu(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    size = ["--model", "mnist", "--batch-size", "6", "--image-size", "12", "--steps", "1", "--repeats", "3"]
    files = ["--json", str(tmp_path / "sweep.json"), "--plot", str(tmp_path / "sweep.svg")]
    assert sweep.main([*size, *files, "--splits", "4,2,7"]) == 0
    said = capsys.readouterr().out
    assert sweep.ONE_PROCESSOR in said

    report = json.loads((tmp_path / "sweep.json").read_text(encoding="utf-8"))
    assert [(row["mode"], row["split_size"]) for row in report["rows"]] == [
        ("one device", 0),
        ("two devices, naive", 0),
        ("pipeline", 2),
        ("pipeline", 4),
    ]
    for row in report["rows"]:
        assert 0 < row["least"] <= row["seconds"] <= row["most"]
        assert row["images_per_second"] == pytest.approx(6 / row["seconds"])
        assert row["against_one_device"] is None
    assert (report["note"], report["settings"]["batch_size"]) == (sweep.ONE_PROCESSOR, 6)

    drawn = (tmp_path / "sweep.svg").read_text(encoding="utf-8")
    words = re.findall(r"<text [^>]*>([^<]*)</text>", drawn)
    assert {"one device", "two devices, naive", "pipeline", "2", "4"} <= set(words)
    assert drawn.count("<polyline ") == 1
