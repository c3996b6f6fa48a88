"""Which snapshot a run resumes from, and what goes into the next one: model, optimizer, scaler and the
tensors of hooks, with the run's progress.

Progress is just a dictionary of numbers here. full.py (one file) and sharded.py (a part from each rank) know
the layout on disk. Every method is called by all ranks.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor

from train.checkpoint import best, full, sharded
from train.checkpoint.background import Background, copied
from train.config import Config, fixed_flags, flag
from train.distributed.communicator import Communicator
from train.errors import UsageError
from train.parallel.strategy import Strategy

Progress = dict[str, Any]
SAMPLES = "training samples"
# What Python and PyTorch raise for content that this trainer does not write.
INVALID = (KeyError, TypeError, ValueError, AttributeError, RuntimeError, OverflowError)


class Snapshots:
    """The snapshots of one run. `samples` is the size of the training set; None if it is unknown."""

    def __init__(
        self,
        config: Config,
        comm: Communicator,
        strategy: Strategy,
        optimizer: torch.optim.Optimizer,
        *,
        samples: int | None,
    ) -> None:
        self.config = config
        self.comm = comm
        self.strategy = strategy
        self.optimizer = optimizer
        self.settings: dict[str, Any] = {**config.recorded(), SAMPLES: samples}
        self.newest_step: int | None = None
        self.writing_step: int | None = None
        self._changes: list[str] = []
        self._background = Background(comm) if config.snapshots.snapshot_async else None

    # -- writing ---------------------------------------------------------------------------------------------

    def save(self, progress: Progress, tensors: Mapping[str, Tensor]) -> None:
        """Write a snapshot: on rank 0, or with --snapshot-per-node on local rank 0 of every node; a sharded
        one on all ranks. `progress` holds a `step`, and only what can be written as JSON; `tensors` are those
        of hooks, of which this rank may hold parts.

        Raises `TrainError` on every rank if one of them could not; with --snapshot-async, if the one before
        could not be written.
        """
        self.finish()
        facts = {
            **progress,
            "settings": self.settings,
            "scaler": self.strategy.scaler.state_dict(),
            "world_size": self.comm.world_size,
            "torch": str(torch.__version__),
        }
        self.strategy.sync_buffers()
        self.writing_step = progress["step"]
        folder = self.config.folder
        if self.config.snapshots.snapshot == "sharded":
            parts = (*self.strategy.state(self.optimizer, whole=False), dict(tensors))
            if self._background is not None:
                self._background.start(sharded.save, folder, facts, copied(parts), self._background.comm)
                return
            sharded.save(folder, facts, parts, self.comm)
        else:
            state = self._whole_state(facts, tensors)
            write = partial(full.save, folder, writer=self.comm.rank) if self._is_writer else _nothing
            if self._background is not None:
                self._background.start(write, copied(state) if self._is_writer else {})
                return
            self.comm.run_together(partial(write, state), what="write the snapshot")
        self._written()

    def finish(self) -> None:
        """Wait for a snapshot that is being written in the background. Raises `TrainError` on every rank if
        one of them could not write it."""
        if self._background is not None and self._background.busy:
            self.comm.run_together(self._background.wait, what="write the snapshot")
            self._written()

    def _written(self) -> None:
        self.newest_step, self.writing_step = self.writing_step, None

    @property
    def _is_writer(self) -> bool:
        return self.comm.writes(per_node=self.config.snapshots.snapshot_per_node)

    def _whole_state(self, facts: Progress, tensors: Mapping[str, Tensor]) -> full.State:
        model, optimizer = self.strategy.state(self.optimizer)
        hooks = {name: whole(value) for name, value in tensors.items()}
        return {**facts, "model": model, "optimizer": optimizer, "hook_tensors": hooks}

    @property
    def resume_advice(self) -> str:
        """What running the same command again would do, as the end of a sentence."""
        if self.newest_step is None:
            text = "starts again"
        else:
            text = f"resumes from the snapshot of step {self.newest_step}"
        if self.writing_step is None:
            return text
        return f"{text}, or from step {self.writing_step} if that was saved"  # by ranks that are lost

    @property
    def kept(self) -> str:
        """What is left of a run that fails, as a part of a sentence."""
        newest, writing = self.newest_step, self.writing_step  # the latter in the background
        if newest is None:
            more = "" if writing is None else f", unless that of step {writing} was saved"
            return f"there is no snapshot yet{more}"
        more = "" if writing is None else f", and that of step {writing} if it was saved"
        return f"the snapshot of step {newest} is kept{more}"

    # -- resuming --------------------------------------------------------------------------------------------

    def resume(self, tensors: Mapping[str, Tensor]) -> tuple[Progress | None, list[str]]:
        """Load the newest snapshot that any rank has, and into `tensors` what it holds of them.

        Returns its progress, or None where there is none, and the notes to print. With --fresh the old
        snapshots are removed first, except when torchrun has restarted the ranks of this very job.

        Raises `UsageError` where there is none with --resume require, and where the snapshot is from a run
        with other settings, unless forced.
        """
        folder, comm, flags = self.config.folder, self.comm, self.config.snapshots
        # Agents of torchrun on several nodes do not count restarts alike.
        if flags.fresh and not comm.any(comm.info.restarts > 0):
            for remove in (full.remove, sharded.remove, best.remove):
                comm.local_rank_0_first(partial(remove, folder), what="remove the old snapshots")
        state = self._find()
        # All ranks have passed the collectives above, so none is writing.
        full.remove_temporary_files(folder)
        if state is None:
            if flags.resume == "require":
                raise UsageError(f"--resume require: no rank has a valid snapshot in {folder}")
            return None, []
        try:
            notes = self._compare(state["settings"])
            self._load_scaler(state["scaler"])
        except INVALID as error:
            raise self.invalid(error) from error
        self._load(state, tensors)
        self.newest_step = state["step"]
        return state, notes

    def invalid(self, error: Exception) -> UsageError:
        """Return the error of a snapshot whose files are intact, but do not hold what this trainer writes."""
        reason = f"{type(error).__name__}: {' '.join(str(error).split())}"
        return UsageError(
            f"the snapshot in {self.config.folder} is not one that this trainer has written ({reason}); give "
            "another --out, or --fresh to start again"
        )

    def refuse_changes_of_finished_run(self, step: int, total_steps: int) -> None:
        """Raise `UsageError` if nothing is left to train and the flags say otherwise than those that were
        trained."""
        if step > total_steps and not self.config.snapshots.force:
            raise UsageError(
                f"the run in {self.config.folder} has done {step} steps, and the flags ask for "
                f"{total_steps}: give more --epochs or --max-steps, another --out, or --fresh to start again"
            )
        finished = step >= total_steps
        if finished and self._changes and not self.config.snapshots.force:
            raise UsageError(
                f"the run in {self.config.folder} is complete, and was trained with other flags: "
                f"{', '.join(self._changes)}; give another --out, --fresh to start again, or more --epochs"
            )

    def _find(self) -> full.State | None:
        """Return the newest snapshot of the kind that --snapshot names.

        Raises `UsageError` if one of the other kind is newer: to resume from the older one, or from nothing,
        is probably not intended.
        """
        folder, comm, kind = self.config.folder, self.comm, self.config.snapshots.snapshot
        if kind == "sharded":
            sharded.require_shared_storage(folder, comm)
            state = sharded.find_newest(folder, comm)
            other_step, other = (full.newest_step(folder) if comm.is_main else -1), "full"
        else:
            state = full.load_newest(folder, comm)
            other_step, other = sharded.newest_step(folder), "sharded"
        other_step = max(comm.gather(other_step))
        if other_step > (-1 if state is None else state["step"]):
            raise UsageError(
                f"the newest snapshot in {folder} (step {other_step}) is {other}, but --snapshot {kind} "
                f"reads only its own kind; give --snapshot {other}, another --out, or --fresh to start again"
            )
        return state

    def _compare(self, saved: Mapping[str, Any]) -> list[str]:
        """Return what to say of the flags that are not those of the snapshot. Raises `UsageError` for one
        without which the snapshot cannot be continued."""
        changed = {name: value for name, value in self.settings.items() if saved.get(name, value) != value}
        texts = {name: _change(name, saved[name], value) for name, value in changed.items()}
        self._changes = list(texts.values())
        fixed = [texts[name] for name in changed if name in fixed_flags() or name == SAMPLES]
        if fixed and not self.config.snapshots.force:
            raise UsageError(
                f"the snapshot in {self.config.folder} is from another run: {', '.join(fixed)}; "
                "give another --out, --fresh to start again, or --force to resume from it anyway"
            )
        if not changed:
            return []
        forced = (
            "--force: the snapshot is from another run" if fixed else "resuming with other flags than before"
        )
        return [f"{forced}: {', '.join(self._changes)}"]

    def _load(self, state: full.State, tensors: Mapping[str, Tensor]) -> None:
        try:
            if self.config.snapshots.snapshot == "full":
                self.strategy.load(self.optimizer, (state["model"], state["optimizer"]))
                for name in tensors.keys() & state["hook_tensors"].keys():
                    fill(tensors[name], state["hook_tensors"][name])
            else:
                model, optimizer = self.strategy.state(self.optimizer, whole=False)
                sharded.read(state["path"], (model, optimizer, dict(tensors)))
                self.strategy.load(self.optimizer, (model, optimizer), whole=False)
        except INVALID as error:
            raise UsageError(
                f"the snapshot in {self.config.folder} does not fit this model and optimizer "
                f"({' '.join(str(error).split())}); "
                "give another --out, or --fresh"
            ) from error

    def _load_scaler(self, saved: Mapping[str, Any]) -> None:
        """Load the loss scale of fp16. A snapshot of a run without it holds none."""
        if wrong := [name for name, value in saved.items() if not math.isfinite(value)]:
            raise ValueError(f"{wrong[0]} of the scaler is {saved[wrong[0]]}")
        if saved and self.strategy.scaler.is_enabled():
            self.strategy.scaler.load_state_dict(dict(saved))


@torch.no_grad()
def whole(value: Tensor) -> Tensor:
    """Return the whole tensor on the CPU. Called by every rank that holds a part of it."""
    gathered: Tensor = value.full_tensor() if isinstance(value, DTensor) else value
    return gathered.detach().cpu()


@torch.no_grad()
def fill(value: Tensor, saved: Tensor) -> None:
    """Copy the whole tensor `saved` into `value`, or this rank's part of it. Raises `ValueError` for another
    shape."""
    if value.shape != saved.shape:
        raise ValueError(f"a tensor of the shape {tuple(saved.shape)} instead of {tuple(value.shape)}")
    if isinstance(value, DTensor):
        local = saved.to(value.to_local().device, value.dtype)
        # Every rank has read the same one: nothing has to be sent.
        saved = distribute_tensor(local, value.device_mesh, value.placements, src_data_rank=None)
    value.copy_(saved)


def _change(name: str, before: Any, now: Any) -> str:
    return f"{name if name == SAMPLES else flag(name)} {_shown(now)} (was {_shown(before)})"


def _shown(value: Any) -> str:
    return " ".join(map(str, value)) if isinstance(value, list) else str(value) or "none"


def _nothing(_state: full.State) -> None:
    pass
