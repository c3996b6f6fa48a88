"""What the host waits for in a step: once for the device, and for no collective of its own.

On a GPU each further wait would leave the device without work until the host has launched the next kernels.
"""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("torch")

import torch
from support.training.check_job import run_check_job
from support.training.small_trainer import single_process, small_trainer
from support.training.waits import CountWaits

from train.config import make
from train.data.datasets import load
from train.task import next_token, regression

pytestmark = [pytest.mark.torch, pytest.mark.xdist_group("train_modes")]
# Waits for the device, blocking collectives, collectives in the background. The one in the background carries
# the requests to stop; its result is read together with the norm of the gradients.
STEP = (1, 0, 1)


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, dict]]:
    return run_check_job(2, "waits_checks.py", tmp_path_factory.mktemp("waits"))


@pytest.mark.parametrize("flags", ["plain", "more"])
def test_ranks_wait_once_per_step(reports: list[dict[str, dict]], flags: str) -> None:
    for rank in reports:
        *steady, last = rank["loop"][flags]["steps"]
        assert steady == [STEP] * 4
        assert last == STEP


def test_request_to_stop_is_seen_by_all_ranks_without_a_wait_of_its_own(
    reports: list[dict[str, dict]],
) -> None:
    for rank in reports:
        assert rank["stopped_loop"] == {"steps": [STEP] * 3, "stopped": 3}


def test_line_of_the_log_takes_one_reduction(reports: list[dict[str, dict]]) -> None:
    for rank in reports:
        collectives = [step[1:] for step in rank["logging_loop"]["steps"]]
        assert collectives == [(0, 1), (0, 1), (1, 1), (0, 1), (1, 1)]


def test_step_waits_for_the_device_once(tmp_path: Path) -> None:
    trainer = small_trainer(single_process(), tmp_path, clip=1.0)
    for batch, counts in trainer.train_reader.batches():
        with CountWaits() as waits:
            trainer.train_step(batch, counts)
        assert waits.count == 1  # for the norm of the gradients, which must be finite, and requests to stop


def test_pixels_and_losses_are_computed_without_a_wait() -> None:
    pytest.importorskip("sklearn")
    tokens = torch.zeros(2, 3, dtype=torch.int64)
    data = load(make(dataset="digits"), download=False)
    batch = data.example()
    with CountWaits() as waits:
        data.preprocess(batch)
        data.task.sums(torch.zeros(2, 10), batch)
        regression().sums(torch.zeros(2, 1), (None, torch.zeros(2)))
        next_token().sums(torch.zeros(2, 3, 5), (tokens, tokens))
    assert waits.count == 0
