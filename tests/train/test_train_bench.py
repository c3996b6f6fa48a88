"""The benchmark times both sides and reports them; no test judges the figures."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("torchvision")

from support.training import launch

pytestmark = pytest.mark.torch
SMALL = ["mnist", "--steps", 2, "--batch-size", 4, "--turns", 2]
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


def test_both_sides_are_timed_in_turns_and_reported(tmp_path: Path, peers: Path) -> None:
    report = tmp_path / "report.json"
    run = launch.run("-m", "bench.train.bench", *SMALL, "--peers", peers, "--json", report)
    assert run.code == 0, run.stderr
    machine, header, row = run.stdout.splitlines()
    assert "threads 1" in machine
    assert header.split()[:4] == ["case", "ours", "theirs", "ratio"]
    assert row.startswith("mnist 28 b4 ")
    (case,) = json.loads(report.read_text())["cases"]
    assert {side: len(turns) for side, turns in case["turns"].items()} == {"theirs": 2, "ours": 2}
    assert all(rate > 0 for turns in case["turns"].values() for rate in turns)


def test_only_our_side_is_timed_without_peers() -> None:
    from bench.train.bench import _parser, select_cases
    from train.config import make
    from train.distributed.device import select_device
    from train.distributed.rank_info import RankInfo

    device = select_device(make(device="cpu"), RankInfo())
    assert [case.peer for case in select_cases(_parser().parse_args([]), device)] == ["", "", ""]


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
