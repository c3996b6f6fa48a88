"""Ways to spread a transformer, activation checkpointing, averages of weights and snapshots in the
background: the same numbers as without."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("torch")

import torch
from support.training.check_job import Reports, run_check_job
from support.training.output import differing_paths, max_difference, read_snapshot
from support.training.small_trainer import single_process, small_trainer
from torch import Tensor

from train.hooks import Hook, Run

pytestmark = [pytest.mark.torch, pytest.mark.xdist_group("train_modes")]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    """The folder of the job with that many ranks."""
    return {world: tmp_path_factory.mktemp(f"world{world}") for world in (2, 4)}


@pytest.fixture(scope="module")
def reports(folders: dict[int, Path]) -> Reports:
    return {world: run_check_job(world, "modes_checks.py", folder) for world, folder in folders.items()}


def test_transformer_is_the_same_in_every_mode(reports: Reports) -> None:
    expected = reports[4][0]["transformer"]["alone"]
    for rank in reports[4]:
        for found in rank["transformer"].values():
            assert max_difference(expected["weights"], found["weights"]) < 1e-12
            assert found["test"] == pytest.approx(expected["test"], abs=1e-12)


@pytest.mark.parametrize("mode", ["ddp", "fsdp"])
def test_activation_checkpointing_does_not_change_weights(reports: Reports, mode: str) -> None:
    for rank in reports[2]:
        found = rank["recomputed"]
        assert max_difference(found[f"{mode} False"], found[f"{mode} True"]) < 1e-12


def test_average_of_weights_continues_over_an_interruption(reports: Reports) -> None:
    for rank in reports[2]:
        for how in ("ddp full", "fsdp sharded"):
            whole, parts = rank["averaged"][how]
            assert differing_paths(whole, parts) == []
            assert max_difference(rank["averaged"]["ddp full"][0], whole) < 1e-12
            one, other = rank["averaged"][f"{how} test"]
            assert one == other == pytest.approx(rank["averaged"]["ddp full test"][0], abs=1e-12)


BEST_FILES = [
    ("ddp", ["node0", "node1"]),
    ("fsdp sharded", ["shared"]),
    ("pipeline", ["shared"]),
    ("gpipe", ["shared"]),
]


@pytest.mark.parametrize(("how", "written"), BEST_FILES)
def test_best_weights_of_every_mode_are_those_of_the_whole_model(
    reports: Reports, folders: dict[int, Path], how: str, written: list[str]
) -> None:
    """Whichever rank writes them; a plain model and the same mode load them."""
    folder = folders[2] / "best"
    assert (
        sorted(str(path.parent.relative_to(folder / how)) for path in folder.glob(f"{how}/*/best.pt"))
        == written
    )
    expected = torch.load(folder / "ddp" / "node0" / "best.pt", weights_only=True)
    for name in written:
        kept = torch.load(folder / how / name / "best.pt", weights_only=True)
        assert (kept["metric"], kept["step"]) == ("loss", expected["step"])
        assert max_difference(kept["model"], expected["model"]) < 1e-12
        subject = small_trainer(single_process(), folder / "plain", dtype=torch.float64)
        subject.strategy.module.load_state_dict(kept["model"])
        loss = subject.evaluate()["test_loss"]
        for rank in reports[2]:
            assert rank["best"][how]["status"]["best_loss"] == pytest.approx(loss, abs=1e-12)
            assert rank["best"][how]["again"]["test_loss"] == pytest.approx(loss, abs=1e-12)


def test_files_of_background_snapshots_are_complete(tmp_path: Path) -> None:
    for name, background in (("background", True), ("foreground", False)):
        subject = small_trainer(
            single_process(), tmp_path / name, epochs=1, save_every=2, snapshot_async=background
        )
        subject.fit()
        subject.close()
    for name, step in (("snapshot.pt", 5), ("snapshot.prev.pt", 4)):
        found, expected = (read_snapshot(tmp_path / folder, name) for folder in ("background", "foreground"))
        assert found["step"] == expected["step"] == step
        assert differing_paths(found["model"], expected["model"]) == []


class Weights(Hook):
    """Keeps the weights after each step."""

    def __init__(self) -> None:
        self.kept: list[dict[str, Tensor]] = []

    def after_step(self, run: Run) -> None:
        parameters = run.strategy.module.named_parameters()
        self.kept.append({name: value.detach().clone() for name, value in parameters})


def test_average_of_weights_follows_them_at_first(tmp_path: Path) -> None:
    trainer = small_trainer(single_process(), tmp_path, ema=0.5, epochs=4, dtype=torch.float64)
    expected = {name: value.detach().clone() for name, value in trainer.strategy.module.named_parameters()}
    weights = Weights()
    trainer.hooks.append(weights)
    trainer.fit()
    assert len(weights.kept) == 20
    for step, kept in enumerate(weights.kept, start=1):
        decay = min(0.5, (1 + step) / (10 + step))
        expected = {name: decay * value + (1 - decay) * kept[name] for name, value in expected.items()}
    averages = {name.removeprefix("ema."): value for name, value in trainer._tensors().items()}
    assert max_difference(averages, expected) < 1e-12
