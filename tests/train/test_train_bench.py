"""The benchmark times both sides and reports them; no test judges the figures."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")

from support.training import launch

pytestmark = [pytest.mark.torch, pytest.mark.xdist_group("train_bench")]
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


@pytest.mark.parametrize(
    ("argv", "message"),
    [
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
@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--parts", "resnet51"], "no part is named resnet51; choose from resnet50, jpeg"),
        (["--peers", "nowhere"], "must be a checkout of github.com/pytorch/examples"),
        (["--device", "cpu"], "add --short"),
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
    small = ("--device", "cpu", "--short", "--parts", parts, "--limit", 2)
    run = gpu_script(out, *small, PYTHON=str(python), REAL_PYTHON="/bin/true")
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
