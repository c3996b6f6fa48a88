"""Runs the checks of a script on this rank and saves what they return; the tests compare.

A script runs many checks in one job, since starting a job costs more than the checks themselves. Checks
report what they see and do not judge it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from support.training import launch

from train.config import make
from train.distributed.communicator import Communicator
from train.distributed.process_group import join
from train.distributed.rank_info import find_rank
from train.process_exit import exit_process

Check = Callable[..., Any]
Reports = dict[int, list[dict[str, Any]]]  # world size -> what each rank reported


def run_checks(
    folder: Path,
    checks: Sequence[Check] | Mapping[int, Sequence[Check]],
    *args: Any,
    after: Callable[[Communicator], object] | None = None,
    **settings: Any,
) -> None:
    """Call each check with (comm, folder, *args), save the results as FOLDER/rank<r>.pt, and exit the
    process.

    `checks` may depend on the world size. `after` is called after the rank has left the process group, and
    its result is saved, too.
    """
    config = make(dataset="synthetic", timeout=60.0, **settings)
    with join(config, find_rank(config, os.environ)) as comm:
        selected = checks[comm.world_size] if isinstance(checks, Mapping) else checks
        report = {check.__name__: check(comm, folder, *args) for check in selected}
    if after is not None:
        report["after"] = after(comm)
    torch.save(report, folder / f"rank{comm.rank}.pt")
    exit_process(0)


def run_check_job(world_size: int, script: str, folder: Path, *args: object) -> list[dict[str, Any]]:
    """Run a check script with `world_size` ranks. Returns what each rank reported."""
    launch.run_ranks(world_size, launch.CHECKS / script, folder, *args)
    return [torch.load(folder / f"rank{rank}.pt") for rank in range(world_size)]
