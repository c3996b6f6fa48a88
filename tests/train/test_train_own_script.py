"""A script with data and a model of its own trains on any number of ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

from support.training import launch
from support.training.output import max_difference, read_metrics, read_status, read_weights

pytestmark = [pytest.mark.torch, pytest.mark.xdist_group("train_own_script")]
SCRIPT = launch.CHECKS / "own_script.py"
UNUSED = "--find-unused-parameters"
STREAM = ("--steps-per-epoch", 4)


def trained(ranks: int, out: Path, *flags: object) -> dict[str, Any]:
    words = (SCRIPT, "--out", out, "--no-tensorboard", *flags)
    if ranks == 1:
        launch.succeeded([launch.start(*words)])
    else:
        launch.run_ranks(ranks, *words)
    return read_weights(out)


@pytest.mark.parametrize("flags", [(), STREAM], ids=["map-style", "stream"])
def test_weights_do_not_depend_on_the_number_of_ranks(tmp_path: Path, flags: tuple[object, ...]) -> None:
    single = trained(1, tmp_path / "1", *flags)
    assert max_difference(single, trained(3, tmp_path / "3", UNUSED, *flags)) < 1e-12
    lines = [read_metrics(tmp_path / ranks, "epoch") for ranks in ("1", "3")]
    for one, other in zip(*lines, strict=True):
        assert other["correct"] == one["correct"] <= 1
        assert other["test_loss"] == pytest.approx(one["test_loss"], abs=1e-12)
        assert other["samples"] == (20 if flags else 23)
    assert read_status(tmp_path / "1")["best_correct"] == max(line["test_correct"] for line in lines[0])


def test_unused_parameters_are_named_with_the_flag(tmp_path: Path) -> None:
    runs = launch.wait(*launch.start_ranks(2, SCRIPT, "--out", tmp_path, "--no-tensorboard"))
    assert {run.code for run in runs} == {1}
    advice = f"give {UNUSED} if that differs from step to step, else remove these layers or --freeze them"
    for rank, run in enumerate(runs):
        message = f"the loss does not depend on long.weight, long.bias: {advice}"
        assert run.stderr == f"train: rank {rank}: {message}\n"
    assert read_status(tmp_path)["error"] == message


def test_stream_that_ends_early_is_explained(tmp_path: Path) -> None:
    run = launch.start(SCRIPT, "--out", tmp_path, "--no-tensorboard", "--steps-per-epoch", 9)
    assert run.wait() == 1
    message = "the stream of samples ended after 5 of 9 batches of epoch 1: give a smaller --steps-per-epoch"
    assert run.stderr == f"train: rank 0: {message}\n"
    assert "Traceback" not in run.stderr


def test_stream_is_resumed_at_its_step(tmp_path: Path) -> None:
    """Also where a parameter has no state in the optimizer, because no step has used it."""
    flags = (*STREAM, "--optimizer", "adamw")
    whole = trained(1, tmp_path / "whole", *flags)
    trained(1, tmp_path / "parts", *flags, "--max-steps", 3)
    assert max_difference(whole, trained(1, tmp_path / "parts", *flags)) == 0


def test_first_weights_are_those_of_rank_0(tmp_path: Path) -> None:
    """Here each other rank builds a model with other weights. DDP copies those of rank 0 itself."""
    expected = trained(1, tmp_path / "alone")
    for mode in (("fsdp",), ("hsdp", "--group-size", 1)):
        words = (SCRIPT, "--out", tmp_path / mode[0], "--no-tensorboard", "--parallel", *mode)
        launch.run_ranks(2, *words, SHIFT_BY_RANK=1)
        assert max_difference(expected, read_weights(tmp_path / mode[0])) < 1e-12


MISTAKES = """
import sys
from torch import nn
sys.path[:0] = [{root!r}, {checks!r}]
from own_script import Network, Sentences, TASK
from train.data.datasets import Datasets
from train.script import start
from train.task import Task

def load(config, *, download):
    return Datasets(train=Sentences(), test=Sentences(), task=TASK)

def build(config, datasets):
    return Network()

def start_with(load=load, build=build, **defaults):
    start(load, build, batch_size=5, **defaults)

{mistake}
"""


@pytest.mark.parametrize(
    ("mistake", "message"),
    [
        ("start_with(load=lambda config: None)", "start() needs a function load(config, *, download): "),
        (
            "start_with(build=Network)",
            "start() needs a function build(config, datasets): too many positional",
        ),
        (
            "start_with(load=lambda config, download: [1])",
            "`load` must return Datasets(train=..., test=..., task=...), not list",
        ),
        (
            "start_with(build=lambda config, datasets: None)",
            "`build` must return a model, an nn.Module, not NoneType",
        ),
        (
            "TASK = Task(loss=TASK.loss)\nstart_with()",
            "batches are dictionaries (tokens, answer): give the task a function `forward`",
        ),
        ("start_with(learning_rate=0.1)", "defaults of this script: Unrecognized options: --learning-rate"),
    ],
)
def test_mistakes_of_a_script_are_explained(tmp_path: Path, mistake: str, message: str) -> None:
    code = MISTAKES.format(root=str(launch.ROOT), checks=str(SCRIPT.parent), mistake=mistake)
    run = launch.start("-c", code, "--no-tensorboard", cwd=tmp_path)
    assert run.wait() == 2, run.stderr
    (line,) = run.stderr.splitlines()
    assert message in line


def test_output_folder_has_the_name_of_the_script(tmp_path: Path) -> None:
    path = f"{launch.ROOT}:{launch.ROOT / 'tests'}"
    launch.succeeded([launch.start(SCRIPT, "--no-tensorboard", "--epochs", 1, cwd=tmp_path, PYTHONPATH=path)])
    assert read_status(tmp_path / "runs" / "own_script")["state"] == "finished"
