"""--keep-best: the weights of the best evaluations, apart from the snapshots, of which only the newest two
are kept."""

from __future__ import annotations

import math
import os
import shutil
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from train.checkpoint import full
from train.config import Config
from train.distributed.communicator import Communicator
from train.errors import TrainError, UsageError
from train.hooks import Hook, Run
from train.task import Task

NAME = "best.pt"
NUMBERED = "best-step-{}.pt"
Entry = list[float]  # value, step, epoch


class BestWeights(Hook):
    """Keeps the weights of the best evaluations: those of the best one in best.pt, and with a number above 1
    also those of the others, in best-step-N.pt.

    They are written before the snapshot of the same step. After a crash between the two, the resumed run
    adopts best.pt; where the same evaluation comes again, it writes the same files. Raises `UsageError` where
    the task has no such metric.
    """

    def __init__(self, config: Config, task: Task) -> None:
        self.metric = config.snapshots.best_metric or task.best
        if self.metric not in task.names:
            what = "--best-metric" if config.snapshots.best_metric else "the best metric of the task,"
            raise UsageError(f"{what} {self.metric}: must be one of {', '.join(task.names)}")
        self.larger = task.larger if self.metric == task.best else self.metric != "loss"
        self.entries: list[Entry] = []  # the best first
        self._keep = config.snapshots.keep_best

    @property
    def best(self) -> Entry | None:
        """The best evaluation so far: its value, step and epoch. Of equal ones the first."""
        return self.entries[0] if self.entries else None

    def after_evaluation(self, run: Run, figures: dict[str, float]) -> None:
        value = figures[f"test_{self.metric}"]
        reported = run.evaluated_step >= run.step  # by a run that is complete, and is only shown again
        if not math.isfinite(value) or reported:
            return
        before = next((entry for entry in self.entries if entry[1] == run.step), None)
        entry: Entry = [value, run.step, run.epoch]
        if before is not None and self._rank([before, entry])[0] == before:
            return  # adopted after a crash
        self.entries = self._rank([entry, *(one for one in self.entries if one is not before)])
        if self._keep and entry in self.entries:
            self._write(run, value)
        if self._keep and _is_writer(run):
            self._prune(run.config.folder)

    def _rank(self, entries: list[Entry]) -> list[Entry]:
        """Return those that are kept, the best first; of equal values the earlier step."""
        ranked = sorted(entries, key=lambda entry: (-entry[0] if self.larger else entry[0], entry[1]))
        return ranked[: max(1, self._keep)]

    def after_resume(self, run: Run) -> None:
        """Make the entries those of the files. A run that was killed between best.pt and its snapshot has a
        best.pt of which the snapshot does not know; with other flags the same evaluation may not come again.
        The folder of a new node has none, and a run with a smaller --keep-best has left too few."""
        if not self._keep:
            return
        folder, comm = run.config.folder, run.comm
        best = read_best(folder, comm)
        found = [entry] if best is not None and (entry := _entry(best, self.metric)) else []
        if self._keep > 1:
            files = [float((folder / NUMBERED.format(int(step))).exists()) for _, step, _ in self.entries]
            counts = comm.sum(torch.tensor([0.0, *files], device=comm.device)).tolist()[1:]
            others = [entry for entry, count in zip(self.entries, counts, strict=True) if count]
            found += [entry for entry in others if not found or entry[1] != found[0][1]]
        self.entries = self._rank(found)
        if self.entries:
            write = partial(self._complete, folder, best, comm.rank)
            comm.run_together(write if _is_writer(run) else _nothing, what="write the best weights")

    def _complete(self, folder: Path, best: full.State | None, writer: int) -> None:
        """Write the files of the best evaluation that this folder lacks; `best` is what another one has."""
        step = int(self.entries[0][1])
        path, numbered = folder / NAME, folder / NUMBERED.format(step)
        here = full.read(path)
        if here is None or here["step"] != step:
            if best is not None and best["step"] == step:
                full.write(path, best, writer=writer)
            elif numbered.exists():
                _link(numbered, path, writer)
        if self._keep > 1 and path.exists() and not numbered.exists():
            _link(path, numbered, writer)

    def _write(self, run: Run, value: float) -> None:
        state = {
            "step": run.step,
            "epoch": run.epoch,
            "metric": self.metric,
            "value": value,
            "model": run.strategy.model_state(),
        }
        write = partial(self._write_files, run.config.folder, state, run.comm.rank)
        run.comm.run_together(write if _is_writer(run) else _nothing, what="write the best weights")

    def _write_files(self, folder: Path, state: full.State, writer: int) -> None:
        own = folder / (NUMBERED.format(state["step"]) if self._keep > 1 else NAME)
        full.write(own, state, writer=writer)
        if self._keep > 1 and self.entries[0][1] == state["step"]:
            _link(own, folder / NAME, writer)

    def _prune(self, folder: Path) -> None:
        """Remove the files of evaluations that are not among the best, perhaps of a run with a larger
        --keep-best."""
        kept = {NUMBERED.format(int(entry[1])) for entry in self.entries} if self._keep > 1 else set()
        for path in folder.glob(NUMBERED.format("*")):
            if path.name not in kept:
                with suppress(OSError):  # too many files do no harm
                    path.unlink()

    def status(self) -> dict[str, Any]:
        best = self.best
        return {} if best is None else {f"best_{self.metric}": best[0], "best_epoch": int(best[2])}

    def state(self) -> dict[str, Any]:
        return {"metric": self.metric, "entries": self.entries}

    def load(self, state: dict[str, Any]) -> None:
        # Values of another metric cannot be compared.
        entries = [list(entry) for entry in state["entries"]] if state["metric"] == self.metric else []
        for entry in entries:
            value, step, epoch = entry
            finite = isinstance(value, float) and math.isfinite(value)
            if not (finite and full.is_count(step) and full.is_count(epoch)):
                raise ValueError(f"an entry of the best evaluations is {entry}")
        self.entries = entries[: max(1, self._keep)]


def read_best(folder: Path, comm: Communicator) -> dict[str, Any] | None:
    """Return on every rank the newest best.pt that any rank has in its `folder`; None if no rank has one."""
    return full.elect(full.read(folder / NAME), comm)


def remove(folder: Path) -> None:
    """Remove the best weights of an earlier run."""
    for path in [folder / NAME, *folder.glob(NUMBERED.format("*"))]:
        path.unlink(missing_ok=True)


def weights_of(state: Any) -> dict[str, Tensor] | None:
    """Return the weights in what a file holds: best.pt, a snapshot, or a state dictionary of a model; None if
    it is none of these."""
    if isinstance(state, dict) and isinstance(state.get("model"), dict):
        state = state["model"]
    if not isinstance(state, dict) or not state or not all(isinstance(one, Tensor) for one in state.values()):
        return None
    return state


def _entry(best: full.State, metric: str) -> Entry | None:
    """Return the evaluation that a best.pt is of; None if it does not say so, or is that of another
    metric."""
    value, step, epoch = best.get("value"), best["step"], best.get("epoch")
    if best.get("metric") != metric or not isinstance(value, float) or not math.isfinite(value):
        return None
    return (
        [value, step, epoch] if full.is_count(step) and full.is_count(epoch) and epoch is not None else None
    )


def _link(source: Path, target: Path, writer: int) -> None:
    """Give a file a second name. Raises `TrainError` if that fails."""
    temporary = full.temporary_file(target, writer)
    try:
        temporary.unlink(missing_ok=True)
        try:
            os.link(source, temporary)
        except OSError:  # not every file system has links
            shutil.copyfile(source, temporary)
        temporary.replace(target)
        temporary.unlink(missing_ok=True)  # rename does nothing where both are the same file
        with suppress(OSError):
            full.sync(target.parent)
    except OSError as error:
        raise TrainError(f"cannot write {target} ({error})") from error


def _is_writer(run: Run) -> bool:
    return run.comm.writes(per_node=run.config.snapshots.snapshot_per_node)


def _nothing() -> None:
    pass
