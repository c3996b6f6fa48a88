"""Reads what a training run has written, and compares states."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import torch
from support.training import launch

from train.checkpoint import full

# Fields of metrics.jsonl that depend on the clock.
CLOCK_FIELDS = {
    "time",
    "seconds",
    "samples_per_second",
    "samples_per_second_per_device",
    "step_seconds",
    "data_wait",
}


def read_status(folder: Path) -> dict[str, Any]:
    """Return status.json; step 0 before there is one."""
    try:
        return json.loads((folder / "status.json").read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {"state": None, "step": 0}


def read_metrics(folder: Path, kind: str = "") -> list[dict[str, Any]]:
    """Return the lines of metrics.jsonl, or those of one kind."""
    text = (folder / "metrics.jsonl").read_text(encoding="utf-8")
    lines = [json.loads(line) for line in text.splitlines()]
    return [line for line in lines if kind in ("", line["kind"])]


def read_snapshot(folder: Path, name: str = full.NAME) -> dict[str, Any]:
    return torch.load(folder / name, weights_only=True)


def read_weights(folder: Path) -> dict[str, Any]:
    return read_snapshot(folder)["model"]


def wait_for_step(folder: Path, step: int, *runs: launch.Run) -> None:
    """Wait until the run in `folder` has logged this step, or one of `runs` has ended."""
    launch.until(
        lambda: read_status(folder)["step"] >= step or any(run.ended() for run in runs),
        f"step {step} in {folder}",
    )


def max_difference(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    """Return the largest difference between two states with the same names."""
    assert one.keys() == other.keys()
    return max((one[name].double() - other[name].double()).abs().max().item() for name in one)


def differing_paths(one: Any, other: Any, path: str = "") -> list[str]:
    """Return the paths at which two nested states are not bitwise equal."""
    if isinstance(one, dict) and isinstance(other, dict) and one.keys() == other.keys():
        return [name for key in one for name in differing_paths(one[key], other[key], f"{path}/{key}")]
    if isinstance(one, list | tuple) and isinstance(other, list | tuple) and len(one) == len(other):
        pairs = enumerate(zip(one, other, strict=True))
        return [name for index, pair in pairs for name in differing_paths(*pair, f"{path}/{index}")]
    equal = torch.equal(one, other) if isinstance(one, torch.Tensor) else one == other
    return [] if equal else [path]


def stop_during_snapshot(newest: Path, pid: int, temporary_files: str = full.TEMPORARY_FILES) -> None:
    """Stop the process with SIGSTOP while its new snapshot is shorter than the newest one."""
    deadline = time.monotonic() + launch.HANG
    while time.monotonic() < deadline:
        if not _is_writing(newest, temporary_files):
            continue
        os.kill(pid, signal.SIGSTOP)
        time.sleep(0.001)  # until the signal is delivered
        if _is_writing(newest, temporary_files):
            return
        os.kill(pid, signal.SIGCONT)
    raise AssertionError("the process was never seen while it wrote a snapshot")


def _is_writing(newest: Path, temporary_files: str) -> bool:
    try:
        size = newest.stat().st_size
        return any(0 < path.stat().st_size < size for path in newest.parent.glob(temporary_files))
    except FileNotFoundError:
        return False  # nothing is saved yet, or a rename came between
