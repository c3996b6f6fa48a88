"""Files that a run reads and that something else has written, or damaged: each is refused with one sentence
and exit code 2."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

import torch
from support.training import launch
from support.training.damage import MakesFolder, change, truncate
from support.training.small_trainer import datasets, single_process, small_trainer

from train import pretrained
from train.checkpoint import full
from train.config import make
from train.errors import UsageError
from train.trainer import Trainer

pytestmark = [pytest.mark.torch, pytest.mark.xdist_group("train_options")]


def with_code(path: Path) -> None:
    torch.save({"model": {"fc1.bias": torch.zeros(3)}, "more": MakesFolder(path.with_name("executed"))}, path)


def cut(path: Path) -> None:
    torch.save({"fc1.bias": torch.zeros(3)}, path)
    truncate(path)


UNREAD = [
    (
        with_code,
        "cannot be read (it is damaged, or holds objects other than tensors, which could execute code",
    ),
    (cut, "cannot be read ("),
    (Path.mkdir, "cannot be read ("),
    (Path.touch, "cannot be read ("),
    (lambda path: torch.save([1, 2], path), "holds no weights, only list"),
    (lambda path: torch.save({"model": {"fc1.bias": 3}}, path), "holds no weights, only dict"),
]


@pytest.mark.parametrize(
    ("write", "message"), UNREAD, ids=["code", "cut", "folder", "empty", "list", "number"]
)
def test_invalid_weights_file_is_refused(
    tmp_path: Path, write: Callable[[Path], object], message: str
) -> None:
    path = tmp_path / "weights.pt"
    write(path)
    with pytest.raises(UsageError) as refusal:
        pretrained.prepare(make(weights=str(path)), torch.nn.Linear(2, 2))
    assert str(refusal.value).startswith(f"--weights {path}: {message}")
    assert "weights_only" not in str(refusal.value)
    assert not (tmp_path / "executed").exists()


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (truncate, "--evaluate: no rank has a valid {path}; give --weights FILE, or another --out"),
        (
            lambda path: change(path, model={"fc1.bias": torch.zeros(3)}),
            "{path} does not fit this model (Missing key",
        ),
    ],
    ids=["cut", "other model"],
)
def test_damaged_best_weights_are_not_evaluated(
    tmp_path: Path, damage: Callable[[Path], object], message: str
) -> None:
    path = tmp_path / "best.pt"
    torch.save({"format": full.FORMAT, "step": 3, "model": {"fc1.bias": torch.zeros(3)}}, path)
    damage(path)
    run = launch.start_train(*launch.TINY, "--out", tmp_path, "--evaluate")
    assert run.wait() == 2, run.stdout + run.stderr
    *notes, line = run.stderr.splitlines()
    assert line.startswith(f"train: rank 0: {message.format(path=path)}")
    assert all(note.startswith(f"skipping snapshot {path}: ") for note in notes)
    assert len(notes) <= 1


def trainer(folder: Path) -> Trainer:
    return small_trainer(single_process(), folder, epochs=2, optimizer="sgd")


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run that has saved a snapshot after its first epoch, of 5 steps."""
    folder = tmp_path_factory.mktemp("saved")
    subject = trainer(folder)
    subject.train_epoch()
    subject.save()
    return folder


@pytest.fixture
def path(tmp_path: Path, saved: Path) -> Path:
    """A copy of that snapshot."""
    (tmp_path / full.NAME).write_bytes((saved / full.NAME).read_bytes())
    return tmp_path / full.NAME


@pytest.mark.parametrize(
    "values",
    [
        {"steps_per_epoch": math.nan},
        {"evaluated": 10**30},
        {"skipped": "many"},
        {"epoch_sums": [10**400]},
        {"line_sums": None},
        {"hooks": []},
        {"hooks": {"BestWeights": {"metric": "accuracy", "entries": [[0.5, math.nan, 1]]}}},
        {"hooks": {"BestWeights": {"metric": "accuracy", "entries": [[0.5, 3]]}}},
        {"hooks": ...},
        {"settings": ...},
        {"settings": 3},
        {"model": []},
        {"optimizer": {"state": {}}},
        {"optimizer": None},
        {"scaler": 3},
        {"scaler": {"scale": "large"}},
        {"settings": {"lr": torch.zeros(3)}},
        {"hook_tensors": 3},
    ],
    ids=str,
)
def test_snapshot_with_impossible_values_is_refused(path: Path, values: dict[str, Any]) -> None:
    change(path, **values)
    with pytest.raises(UsageError, match=rf"^the snapshot in {path.parent} .*--fresh") as refusal:
        trainer(path.parent).resume()
    assert len(str(refusal.value).splitlines()) == 1


def with_other_shape(optimizer: dict[str, Any]) -> dict[str, Any]:
    """Return the state of an optimizer whose first momentum has a row too many."""
    (name, state), *others = optimizer["state"].items()
    momentum = torch.cat([state["momentum_buffer"]] * 2)
    return {**optimizer, "state": {name: {**state, "momentum_buffer": momentum}, **dict(others)}}


def test_optimizer_state_of_another_shape_is_refused(path: Path) -> None:
    change(path, optimizer=with_other_shape(torch.load(path, weights_only=True)["optimizer"]))
    with pytest.raises(UsageError, match=r"momentum_buffer of .* has the shape .*, the parameter .*--fresh"):
        trainer(path.parent).resume()


def test_snapshot_without_a_scaler_is_refused(tmp_path: Path) -> None:
    small_trainer(single_process(), tmp_path, amp="fp16").save()
    change(tmp_path / full.NAME, scaler=...)
    with pytest.raises(UsageError, match=r"has written \(KeyError: 'scaler'\); .*--fresh"):
        small_trainer(single_process(), tmp_path, amp="fp16").resume()


OTHER_RUNS = [
    ({"seed": 3}, "--seed 3 (was 0)"),
    ({"batch_size": 16}, "--batch-size 16 (was 5)"),
    ({"model": "mnist"}, "--model mnist (was small)"),
    ({"data": datasets(8, samples=30)}, "training samples 30 (was 22)"),
    ({"optimizer": "adamw"}, "--optimizer adamw (was sgd)"),
    ({"scheduler": "cosine"}, "--scheduler cosine (was none)"),
]


@pytest.mark.parametrize(("changed", "difference"), OTHER_RUNS, ids=[row[1] for row in OTHER_RUNS])
def test_snapshot_of_another_run_is_refused_and_forced_only_if_it_fits(
    path: Path, changed: dict[str, Any], difference: str
) -> None:
    flags = {"epochs": 2, "optimizer": "sgd", **changed}
    expected = f"the snapshot in {path.parent} is from another run: {difference}; give another --out, "
    with pytest.raises(UsageError, match=re.escape(expected)):
        small_trainer(single_process(), path.parent, **flags).resume()
    forced = small_trainer(single_process(), path.parent, force=True, **flags)
    if {"model", "optimizer"} & changed.keys():
        with pytest.raises(UsageError, match=r"does not fit this model and optimizer \("):
            forced.resume()
    else:
        assert f"--force: the snapshot is from another run: {difference}" in forced.resume()


def test_step_beyond_the_run_is_refused(path: Path) -> None:
    change(path, step=2**50)
    expected = (
        f"has done {2**50} steps, and the flags ask for 10: give more --epochs or --max-steps, another "
    )
    with pytest.raises(UsageError, match=f"{expected}--out, or --fresh to start again"):
        trainer(path.parent).resume()


def test_snapshot_in_the_background_is_not_promised(tmp_path: Path) -> None:
    subject = small_trainer(single_process(), tmp_path, snapshot_async=True)
    assert subject.snapshots.kept == "there is no snapshot yet"
    subject.save()
    assert subject.snapshots.kept == "there is no snapshot yet, unless that of step 0 was saved"
    subject.snapshots.finish()
    assert subject.snapshots.kept == "the snapshot of step 0 is kept"
    subject.train_epoch()
    subject.save()
    assert subject.snapshots.kept == "the snapshot of step 0 is kept, and that of step 5 if it was saved"
    subject.snapshots.finish()
