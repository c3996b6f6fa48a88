"""Ways to spread a transformer, activation checkpointing, averages of weights and snapshots in the background: the same numbers
as without."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("torch")

from support.training.check_job import Reports, run_check_job
from support.training.output import differing_paths, max_difference

pytestmark = [pytest.mark.torch, pytest.mark.xdist_group("train_modes")]


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> Reports:
    return {
        world: run_check_job(world, "modes_checks.py", tmp_path_factory.mktemp(f"world{world}"))
        for world in (1, 2, 4)
    }


@pytest.mark.parametrize("world", [1, 2, 4])
@pytest.mark.parametrize("mode", ["ddp", "fsdp", "hsdp", "tensor"])
def test_transformer_is_the_same_in_every_mode(reports: Reports, world: int, mode: str) -> None:
    expected = reports[1][0]["transformer"]["ddp"]
    for rank in reports[world]:
        found = rank["transformer"].get(mode)
        if found is None:
            assert world == 1  # one rank forms no groups
            continue
        assert max_difference(expected["weights"], found["weights"]) < 1e-12
        assert found["test"] == pytest.approx(expected["test"], abs=1e-12)


@pytest.mark.parametrize("mode", ["ddp", "fsdp"])
def test_activations_computed_again_change_nothing(reports: Reports, mode: str) -> None:
    for rank in reports[2]:
        found = rank["recomputed"]
        assert max_difference(found[f"{mode} False"], found[f"{mode} True"]) < 1e-12


@pytest.mark.parametrize("how", ["ddp full", "fsdp full", "fsdp sharded"])
def test_average_of_weights_continues_over_an_interruption(reports: Reports, how: str) -> None:
    expected = reports[2][0]["averaged"]["ddp full"][0]
    for rank in reports[2]:
        whole, parts = rank["averaged"][how]
        assert differing_paths(whole, parts) == []
        assert max_difference(expected, whole) < 1e-12
        one, other = rank["averaged"][f"{how} test"]
        assert one == other == pytest.approx(rank["averaged"]["ddp full test"][0], abs=1e-12)


def test_files_of_background_snapshots_are_complete(tmp_path: Path) -> None:
    from support.training import launch
    from support.training.output import read_snapshot

    flags = [
        "--dataset",
        "synthetic",
        "--synthetic-size",
        40,
        "--image-size",
        8,
        "--batch-size",
        8,
        "--epochs",
        3,
    ]
    run = launch.start_train(
        *flags, "--no-tensorboard", "--snapshot-async", "--save-every", 2, "--out", tmp_path
    )
    launch.succeeded([run])
    assert read_snapshot(tmp_path)["step"] == 15
