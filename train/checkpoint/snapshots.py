"""Which snapshot a run resumes from, and what goes into the next one: model, optimizer and scaler, with the run's
progress.

Progress is just a dictionary of numbers here. snapshot.py (one file) and sharded.py (a part from each rank)
know the layout on disk. Every method is called by all ranks.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from train.checkpoint import full, sharded
from train.config import Config
from train.distributed.communicator import Communicator
from train.errors import UsageError
from train.parallel.ddp import DDPStrategy

Progress = dict[str, Any]


class Checkpoints:
    """The snapshots of one run. `samples` is the size of the training set."""

    def __init__(
        self,
        config: Config,
        comm: Communicator,
        strategy: DDPStrategy,
        optimizer: torch.optim.Optimizer,
        *,
        samples: int,
    ) -> None:
        self.config = config
        self.comm = comm
        self.strategy = strategy
        self.optimizer = optimizer
        self.fingerprint = {**config.fingerprint, "training samples": samples}
        self.newest_step: int | None = None
        self.writing_step: int | None = None

    def save(self, progress: Progress) -> None:
        """Write a snapshot: on rank 0, or with --snapshot-per-node on local rank 0 of every node; a sharded one on all
        ranks. `progress` holds a `step`, and only what can be written as JSON.

        Raises `TrainError` on every rank if one of them could not.
        """
        facts = {
            **progress,
            "fingerprint": self.fingerprint,
            "scaler": self.strategy.scaler.state_dict(),
            "world_size": self.comm.world_size,
            "torch": str(torch.__version__),
        }
        self.strategy.sync_buffers()
        self.writing_step = progress["step"]
        if self.config.snapshot == "sharded":
            parts = self.strategy.state(self.optimizer, whole=False)
            sharded.save(self.config.folder, facts, parts, self.comm)
        else:
            self._save_whole(facts)
        self.newest_step, self.writing_step = self.writing_step, None

    @property
    def resume_advice(self) -> str:
        """What running the same command again would do, as the end of a sentence."""
        if self.newest_step is None:
            text = "starts again"
        else:
            text = f"resumes from the snapshot of step {self.newest_step}"
        # It is unknown whether a dead rank has written its part.
        return (
            text
            if self.writing_step is None
            else f"{text}, or from step {self.writing_step} if that was saved"
        )

    def _save_whole(self, facts: Progress) -> None:
        info = self.comm.info
        model, optimizer = self.strategy.state(self.optimizer)
        state = {**facts, "model": model, "optimizer": optimizer}
        is_writer = info.local_rank == 0 if self.config.snapshot_per_node else info.rank == 0

        def write() -> None:
            if is_writer:
                full.save(self.config.folder, state, writer=info.rank)

        self.comm.run_together(write, what="write the snapshot")

    def resume(self) -> tuple[Progress | None, list[str]]:
        """Load the newest snapshot that any rank has.

        Returns its progress, or None where there is none, and the settings in which it differs, with --force. With
        --fresh the old snapshots are removed first, except when torchrun has restarted the ranks of this very job.

        Raises `UsageError` where the snapshot is from a run with other settings, unless forced.
        """
        folder, comm = self.config.folder, self.comm
        # Agents of torchrun on several nodes do not count restarts alike.
        if self.config.fresh and not comm.any(comm.info.restarts > 0):
            for remove in (full.remove, sharded.remove):
                comm.local_rank_0_first(partial(remove, folder), what="remove the old snapshots")
        state = self._find()
        # All ranks have passed the collectives above, so none is writing.
        full.remove_temporary_files(folder)
        if state is None:
            return None, []
        differences = self._compare(state["fingerprint"])
        self._load(state)
        self.newest_step = state["step"]
        return state, differences

    def _find(self) -> full.State | None:
        """Return the newest snapshot of the kind that --snapshot names.

        Raises `UsageError` if one of the other kind is newer: to resume from the older one, or from nothing, is
        probably not intended.
        """
        folder, comm, kind = self.config.folder, self.comm, self.config.snapshot
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
                f"the newest snapshot in {folder} (step {other_step}) is {other}, but --snapshot {kind} reads only its "
                f"own kind; give --snapshot {other}, another --out, or --fresh to start again"
            )
        return state

    def _compare(self, saved: Progress) -> list[str]:
        """Return the settings in which a snapshot differs from this run."""
        differences = [
            f"{name} {saved.get(name)} (now {value})"
            for name, value in self.fingerprint.items()
            if saved.get(name) != value
        ]
        if differences and not self.config.force:
            raise UsageError(
                f"the snapshot in {self.config.folder} is from another run: {', '.join(differences)}; "
                "give another --out, --fresh to start again, or --force to resume from it anyway"
            )
        return differences

    def _load(self, state: full.State) -> None:
        try:
            self._load_weights(state)
        except (KeyError, ValueError, RuntimeError) as error:
            raise UsageError(
                f"the snapshot in {self.config.folder} does not fit this model and optimizer ({error}); "
                "give another --out, or --fresh"
            ) from error
        if state["scaler"] and self.strategy.scaler.is_enabled():
            self.strategy.scaler.load_state_dict(state["scaler"])

    def _load_weights(self, state: full.State) -> None:
        if self.config.snapshot == "full":
            self.strategy.load(self.optimizer, (state["model"], state["optimizer"]))
            return
        parts = self.strategy.state(self.optimizer, whole=False)
        sharded.read(state["path"], parts)
        self.strategy.load(self.optimizer, parts, whole=False)
