"""Which snapshot a run goes on from, and what goes into the next: model, optimizer and scaler, with the run's own
progress beside them.

It must not know the training loop: progress is a dictionary of numbers to it. How a snapshot lies on the disk is known
by snapshot.py (one file) and sharded.py (a part from each rank). Every method is called by all ranks.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from train import sharded, snapshot
from train.config import Config
from train.dist import Ranks
from train.errors import UsageError
from train.parallel import Replicas

Progress = dict[str, Any]


class Checkpoints:
    """The snapshots of one run. `samples` is the size of the training set."""

    def __init__(
        self,
        config: Config,
        ranks: Ranks,
        parallel: Replicas,
        optimizer: torch.optim.Optimizer,
        *,
        samples: int,
    ) -> None:
        self.config = config
        self.ranks = ranks
        self.parallel = parallel
        self.optimizer = optimizer
        self.fingerprint = {**config.fingerprint, "training samples": samples}
        self.newest: int | None = None  # the step of the newest snapshot
        self.begun: int | None = None  # the step of the one that is being written

    def save(self, progress: Progress) -> None:
        """Write a snapshot: on rank 0, or with --snapshot-per-node on local rank 0 of every node; a sharded one on
        all ranks. `progress` holds a `step`, and what fits into JSON.

        Raises `TrainError` on every rank where one of them could not.
        """
        facts = {
            **progress,
            "fingerprint": self.fingerprint,
            "scaler": self.parallel.scaler.state_dict(),
            "world_size": self.ranks.world,
            "torch": str(torch.__version__),
        }
        self.parallel.align_buffers()
        self.begun = progress["step"]
        if self.config.snapshot == "sharded":
            parts = self.parallel.state(self.optimizer, whole=False)
            sharded.save(self.config.folder, facts, parts, self.ranks)
        else:
            self._save_whole(facts)
        self.newest, self.begun = self.begun, None

    @property
    def kept(self) -> str:
        """What the same command would do, as the end of a sentence."""
        last = "starts again" if self.newest is None else f"goes on from the snapshot of step {self.newest}"
        # A rank that is gone cannot say whether it has written it.
        return last if self.begun is None else f"{last}, or from that of step {self.begun} if it is finished"

    def _save_whole(self, facts: Progress) -> None:
        place = self.ranks.place
        model, optimizer = self.parallel.state(self.optimizer)
        state = {**facts, "model": model, "optimizer": optimizer}

        def write() -> None:
            if place.local_rank == 0 if self.config.snapshot_per_node else place.rank == 0:
                snapshot.save(self.config.folder, state, writer=place.rank)

        self.ranks.together(write, what="write the snapshot")

    def resume(self) -> tuple[Progress | None, list[str]]:
        """The progress of the newest snapshot that any rank has, its weights taken over, or None; and in which
        settings it differs, where --force is given. With `--fresh` the old snapshots are removed first, but not when
        torchrun has restarted the ranks of this very job.

        Raises `UsageError` where that snapshot belongs to a run with other settings, unless forced.
        """
        # Agents of torchrun on several nodes do not count restarts alike.
        if self.config.fresh and not self.ranks.any(self.ranks.place.restarts > 0):
            for kind in (snapshot, sharded):
                self.ranks.in_turn(partial(kind.remove, self.config.folder), what="remove the old snapshots")
        state = self._find()
        snapshot.sweep(self.config.folder)  # all ranks are past the collective operations above: none writes
        if state is None:
            return None, []
        other = self._compare(state["fingerprint"])
        self._take_over(state)
        self.newest = state["step"]
        return state, other

    def _find(self) -> snapshot.State | None:
        """The newest snapshot of the kind that --snapshot names. Raises `UsageError` if one of the other kind is
        newer: to go on from the older one, or from nothing, is hardly what was meant."""
        folder, ranks, kind = self.config.folder, self.ranks, self.config.snapshot
        if kind == "sharded":
            sharded.require_shared(folder, ranks)
            state = sharded.find_newest(folder, ranks)
            step, other = (snapshot.newest_step(folder) if ranks.is_main else -1), "full"
        else:
            state = snapshot.load_newest(folder, ranks)
            step, other = sharded.newest_step(folder), "sharded"
        step = max(ranks.gather(step))
        if step > (-1 if state is None else state["step"]):
            raise UsageError(
                f"the newest snapshot in {folder} (step {step}) is {other}, and --snapshot {kind} reads its own kind "
                f"only; give --snapshot {other}, another --out, or --fresh to start again"
            )
        return state

    def _compare(self, then: Progress) -> list[str]:
        """In which settings a snapshot differs from this run."""
        other = [
            f"{name} {then.get(name)} (now {value})"
            for name, value in self.fingerprint.items()
            if then.get(name) != value
        ]
        if other and not self.config.force:
            raise UsageError(
                f"the snapshot in {self.config.folder} is of another run: {', '.join(other)}; "
                "give another --out, --fresh to start again, or --force to go on from it all the same"
            )
        return other

    def _take_over(self, state: snapshot.State) -> None:
        try:
            self._load_weights(state)
        except (KeyError, ValueError, RuntimeError) as error:
            raise UsageError(
                f"the snapshot in {self.config.folder} does not fit this model and optimizer ({error}); "
                "give another --out, or --fresh"
            ) from error
        if state["scaler"] and self.parallel.scaler.is_enabled():
            self.parallel.scaler.load_state_dict(state["scaler"])

    def _load_weights(self, state: snapshot.State) -> None:
        if self.config.snapshot == "full":
            self.parallel.load(self.optimizer, (state["model"], state["optimizer"]))
            return
        parts = self.parallel.state(self.optimizer, whole=False)
        sharded.read(state["path"], parts)
        self.parallel.load(self.optimizer, parts, whole=False)
