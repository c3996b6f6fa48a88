"""The benchmark times both sides and reports them; no test judges the figures."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")

from support.training import launch

pytestmark = [pytest.mark.torch, pytest.mark.xdist_group("train_bench")]
SMALL = ["mnist", "--steps", 6, "--batch-size", 64, "--turns", 2]
# With the signature of `train` in mnist/main.py of github.com/pytorch/examples.
PEER = """
import torch.nn.functional as F

def train(args, model, device, train_loader, optimizer, epoch):
    for images, labels in train_loader:
        optimizer.zero_grad()
        F.nll_loss(model(images.to(device)), labels.to(device)).backward()
        optimizer.step()
        print(len(train_loader.dataset), args.log_interval, args.dry_run, epoch)
"""


@pytest.fixture
def peers(tmp_path: Path) -> Path:
    """A stand-in for a checkout of pytorch/examples."""
    (tmp_path / "examples" / "mnist").mkdir(parents=True)
    (tmp_path / "examples" / "mnist" / "main.py").write_text(PEER)
    return tmp_path / "examples"


# With the signature of `train` in imagenet/main.py there.
IMAGENET_PEER = """
def train(train_loader, model, criterion, optimizer, epoch, device, args):
    model.train()
    for images, target in train_loader:
        assert images.is_floating_point() and abs(images.mean()) < 2 and args.print_freq
        loss = criterion(model(images.to(device)), target.to(device))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
"""


@pytest.mark.skipif(sys.platform != "linux", reason="only glibc has the setting")
def test_sides_are_timed_in_turns_and_reported(tmp_path: Path, peers: Path) -> None:
    report = tmp_path / "report.json"
    # From another folder, in which the workers find the same modules.
    run = launch.run(
        "-m",
        "bench.train.bench",
        *SMALL,
        "--peers",
        peers,
        "--json",
        report,
        cwd=tmp_path,
        PYTHONPATH=launch.ROOT,
    )
    assert run.code == 0, run.stderr
    note, machine, header, row = run.stdout.splitlines()
    assert "Ours makes glibc keep freed memory" in note
    assert "threads 1" in machine
    assert header.split()[:6] == ["case", "ours", "theirs", "ratio", "kept", "ratio"]
    assert row.startswith("mnist 28 b64 ")
    written = json.loads(report.read_text())
    assert written["note"] == note
    (case,) = written["cases"]
    turns = case["turns"]
    assert {side: len(rates) for side, rates in turns.items()} == {"theirs": 2, "theirs_kept": 2, "ours": 2}
    assert all(rate > 0 for rates in turns.values() for rate in rates)
    for side, name in (("theirs", "ratio"), ("theirs_kept", "ratio_kept")):
        ratios = [a / b for a, b in zip(turns["ours"], turns[side], strict=True)]
        assert case[name] == pytest.approx(sum(ratios) / 2)
    # The setting takes effect where it should: without it every step fetches its memory from the system
    # again.
    faults = {side: case[side]["page_faults"] for side in turns}
    assert 2 * max(faults["theirs_kept"], faults["ours"]) < faults["theirs"]


def test_jpeg_case_times_both_sides_on_the_same_files(tmp_path: Path, peers: Path) -> None:
    pytest.importorskip("torchvision")
    import torch

    from bench.train import bench, worker
    from train import models
    from train.data.datasets import load

    (peers / "imagenet").mkdir()
    (peers / "imagenet" / "main.py").write_text(IMAGENET_PEER)
    known = bench.CPU_CASES["jpeg"]
    assert (known.jpeg, known.peer, known.flags) == (True, "imagenet/main.py", {"workers": 1})
    # The same with a small network, read without workers.
    size = {"model": "small", "shape": (3, 32, 32), "classes": 10, "batch_size": 4, "steps": 3}
    case = dataclasses.replace(known, **size, flags={})
    device = torch.device("cpu")
    worker.write_pictures(case, tmp_path)
    config = worker.make_config(case, device, tmp_path)
    loader = worker.picture_loader(config, device)
    assert loader.dataset.samples == load(config, download=False).train.samples
    assert [inputs.shape for inputs, _ in loader] == [(4, 3, 32, 32)] * 3

    def network() -> torch.nn.Module:
        return models.build("small", shape=case.shape, classes=10, seed=0)

    trainer = worker.our_trainer(case, config, device, network())
    try:
        ours = trainer.train_epoch()
    finally:
        trainer.close()
    theirs = worker.peer_side(case, config, device, network(), peers).run_epoch()
    assert trainer.step == case.steps
    assert 0 < ours["data_wait"] < 1
    assert 0 < theirs["data_wait"] < 1


def test_a_row_names_the_side_without_a_setting() -> None:
    from bench.train.bench import missing_settings

    every = {"cudnn_benchmark": True, "fused": True, "channels_last": True}
    row = {"ours": {"settings": every}, "theirs": {"settings": {**every, "fused": False}}}
    assert missing_settings(row) == ["theirs without fused"]
    assert missing_settings({"ours": {"settings": every}}) == []


def test_every_gpu_case_has_the_fast_settings_on_both_sides(tmp_path: Path, peers: Path) -> None:
    import torch

    from bench.train import bench, worker
    from train import models

    for case in bench.GPU_CASES.values():
        assert case.flags["fused"] and case.flags["channels_last"]
    # The small case, on the CPU: the settings are read from the optimizer and the weights that are trained.
    flags = {"fused": True, "channels_last": True}
    case = worker.Case(
        model="mnist", shape=(1, 28, 28), classes=10, batch_size=2, steps=1, peer="mnist/main.py", flags=flags
    )
    device = torch.device("cpu")
    config = worker.make_config(case, device, tmp_path)
    assert config.precision.deterministic is False  # cudnn.benchmark: see set_numerics

    def network() -> torch.nn.Module:
        return models.build("mnist", shape=case.shape, classes=10, seed=0)

    theirs = worker.peer_side(case, config, device, network(), peers)
    trainer = worker.our_trainer(case, config, device, network())
    ours = worker.Side(trainer.train_epoch, trainer.strategy.module, trainer.optimizer)
    try:
        for side in (theirs, ours):
            side.run_epoch()
            assert side.settings["fused"] and side.settings["channels_last"]
        plain = worker.Side(dict, network(), torch.optim.SGD(network().parameters()))
        assert not plain.settings["fused"] and not plain.settings["channels_last"]
    finally:
        trainer.close()


def test_only_our_side_is_timed_without_peers() -> None:
    from bench.train.bench import _parser, select_cases
    from train.config import make
    from train.distributed.device import select_device
    from train.distributed.rank_info import RankInfo

    device = select_device(make(device="cpu"), RankInfo())
    cases = select_cases(_parser().parse_args([]), device)
    assert [(case.model, case.jpeg, case.peer) for case in cases] == [
        ("resnet18", False, ""),
        ("mnist", False, ""),
        ("resnet18", True, ""),
    ]


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["mnits"], "choose from resnet18, mnist, jpeg"),
        (["mnist", "--peers", "nowhere"], "must be a checkout of github.com/pytorch/examples"),
        (["mnist", "--variants", "speed=9"], "speed is not one of amp"),
    ],
)
def test_bad_arguments_are_refused(argv: list[object], message: str) -> None:
    run = launch.run("-m", "bench.train.bench", *argv)
    assert run.code == 2
    assert message in run.stderr
    assert "Traceback" not in run.stderr


# -- bench/gpu.sh --------------------------------------------------------------------------------------------

GPU_SCRIPT = launch.ROOT / "bench" / "gpu.sh"
# Stands in for the interpreter: it has neither tyro nor matplotlib, and runs only what has no line here.
PYTHON = """#!/bin/sh
case "$*" in
  *"import tyro"* | *"import matplotlib"*) exit 1 ;;
  *machine.json) echo '{"Python": "3"}' >"$2" ;;
  *resnet50*compile*) exit 0 ;;                                # claims success and writes nothing
  *"bench.train.bench resnet50"*) echo "an error"; exit 7 ;;
  *"bench.train.bench jpeg"*) sleep 60 ;;
  *"bench.train.bench resnet18"*) for last; do :; done; echo "{}" >"$last" ;;
  *) exec "$REAL_PYTHON" "$@" ;;
esac
"""
bash_only = pytest.mark.skipif(sys.platform != "linux", reason="needs coreutils")


def gpu_script(out: Path, *argv: object, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["bash", str(GPU_SCRIPT), *map(str, argv)],
        env={**launch.environment(PYTHON=sys.executable), "OUT": str(out), **env},
        capture_output=True,
        text=True,
        check=False,
        timeout=launch.HANG,
    )


@bash_only
def test_gpu_script_needs_a_gpu(tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text('#!/bin/sh\ncase "$*" in *torch.cuda.device_count*) echo 0 ;; esac\n')
    python.chmod(0o755)
    run = gpu_script(tmp_path / "out", PYTHON=str(python))
    assert run.returncode == 2
    assert run.stderr.startswith("gpu.sh: torch finds no GPU here")
    assert len(run.stderr.splitlines()) == 1
    assert not (tmp_path / "out").exists()


@bash_only
@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--parts", "resnet51"], "no part is named resnet51; choose from resnet50, jpeg"),
        (["--peers", "nowhere"], "must be a checkout of github.com/pytorch/examples"),
        (["--device", "cpu"], "add --short"),
        (["--limit"], "--limit needs a value"),
        (["--speed"], "unknown argument --speed"),
    ],
)
def test_gpu_script_refuses_bad_arguments(argv: list[str], message: str, tmp_path: Path) -> None:
    run = gpu_script(tmp_path / "out", *argv)
    assert run.returncode == 2
    assert message in run.stderr


@bash_only
def test_gpu_script_survives_parts_that_fail_or_hang(tmp_path: Path) -> None:
    python, out = tmp_path / "python", tmp_path / "out"
    python.write_text(PYTHON)
    python.chmod(0o755)
    out.mkdir()
    (out / "resnet50.json").write_text("{}")  # of an earlier run: no proof of success
    parts = "resnet50,jpeg,resnet18,resnet50-compiled"
    run = gpu_script(
        out,
        "--device",
        "cpu",
        "--short",
        "--parts",
        parts,
        "--limit",
        2,
        PYTHON=str(python),
        REAL_PYTHON="/bin/true",
    )
    assert run.returncode == 1
    last = run.stdout.splitlines()[-1]
    assert last.endswith(": resnet50 (failed), jpeg (timed out), resnet50-compiled (failed)")
    lines = [json.loads(line) for line in (out / "parts.jsonl").read_text().splitlines()]
    assert [(one["part"], one["result"], one["exit"]) for one in lines] == [
        ("resnet50", "failed", 7),
        ("jpeg", "timed out", 124),
        ("resnet18", "ok", 0),
        ("resnet50-compiled", "failed", 0),
    ]
    assert not (out / "resnet50.json").exists()
    assert "an error" in (out / "log").read_text()
    assert json.loads((out / "machine.json").read_text())["Python"]


@bash_only
def test_gpu_script_starts_no_part_after_the_total_limit(tmp_path: Path) -> None:
    python, out = tmp_path / "python", tmp_path / "out"
    python.write_text(PYTHON)
    python.chmod(0o755)
    run = gpu_script(
        out,
        "--device",
        "cpu",
        "--short",
        "--parts",
        "jpeg,resnet18",
        "--total",
        1,
        PYTHON=str(python),
        REAL_PYTHON="/bin/true",
    )
    assert run.returncode == 1
    assert "resnet18 (not started)" in run.stdout


@bash_only
def test_gpu_script_measures_the_price_of_the_process_group_without_tyro(tmp_path: Path) -> None:
    python, out = tmp_path / "python", tmp_path / "out"
    python.write_text(PYTHON)
    python.chmod(0o755)
    run = gpu_script(
        out,
        "--device",
        "cpu",
        "--short",
        "--parts",
        "small",
        "--limit",
        190,
        PYTHON=str(python),
        REAL_PYTHON=sys.executable,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    assert "tyro is not installed: using a stand-in" in run.stdout
    small = json.loads((out / "small.json").read_text())
    assert {mode: len(runs) for mode, runs in small["runs"].items()} == {"alone": 1, "torchrun": 1}
    rates = {mode: runs[0]["epochs"][1]["samples_per_second"] for mode, runs in small["runs"].items()}
    assert small["ratio"] == pytest.approx(rates["torchrun"] / rates["alone"])
