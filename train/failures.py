"""Describes what ended a rank as a sentence and an exit code, wherever a user can cause and fix it."""

from __future__ import annotations

import errno
import json
import math
import os
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch

from train.config import Config
from train.errors import Preempted, TrainError

DISK_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS)


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """What to print and which code to exit with. What fails in the same way on all ranks is reported by rank
    0; the cause of a rank that `follows` another one by that."""

    message: str
    exit_code: int
    same_on_all_ranks: bool = False
    follows: bool = False

    def record(self, happened: float) -> None:
        """Leave the message where torchrun looks for the cause of a failed job, without a traceback, which it
        would show for every rank. It names the earliest: a rank that follows is later, also within the same
        second. `happened`: seconds since the epoch."""
        path = os.environ.get("TORCHELASTIC_ERROR_FILE")
        if not path:
            return
        details = {"py_callstack": self.message, "timestamp": str(int(happened) + self.follows)}
        with suppress(OSError):
            Path(path).write_text(json.dumps({"message": {"message": self.message, "extraInfo": details}}))


def describe_failure(error: BaseException, config: Config) -> Failure | None:
    """Describe why a rank that raised `error` ends. None for what only a change of the program can fix."""
    if isinstance(error, TrainError):
        stopped = isinstance(error, Preempted)
        return Failure(
            message=str(error), exit_code=error.exit_code, same_on_all_ranks=stopped, follows=error.follows
        )
    if isinstance(error, KeyboardInterrupt):
        message = "interrupted; run the same command to resume from the newest snapshot, if there is one"
        return Failure(message=message, exit_code=130, same_on_all_ranks=True)
    if _is_out_of_memory(error):
        advice = "use a smaller --batch-size, a larger --accumulate, or a smaller model or dataset"
        return Failure(message=f"out of memory ({str(error).partition('. ')[0]}): {advice}", exit_code=1)
    if isinstance(error, OSError) and _is_output_error(error, config.folder):
        return Failure(message=f"{error}: free some space there, or give another --out", exit_code=1)
    return None


def _is_out_of_memory(error: BaseException) -> bool:
    # The CPU allocator has no exception of its own.
    on_cpu = isinstance(error, RuntimeError) and "can't allocate memory" in str(error)
    return on_cpu or isinstance(error, (MemoryError, torch.OutOfMemoryError))


def _is_output_error(error: OSError, folder: Path) -> bool:
    """Return whether the disk is full, or a file in the output folder cannot be written."""
    return error.errno in DISK_FULL or folder in Path(str(error.filename)).parents


def not_finite(step: int, *, loss: float, kept: str) -> TrainError:
    """Return the error of a rank whose gradients in this step are not finite. `loss` is this rank's own,
    `kept` what is left of the run."""
    if math.isfinite(loss):
        return TrainError(
            f"step {step}: the gradients are not finite, although this rank's own loss is; stopped before "
            f"updating the weights; {kept}; if another rank's loss is the cause, that rank reports it"
        )
    return TrainError(
        f"step {step}: the loss is {loss}; stopped before updating the weights; {kept}; "
        "use a lower --lr or --clip, or check the data"
    )


def scale_too_small(step: int, *, scale: float, kept: str) -> TrainError:
    """Return the error of a run under fp16 whose gradients stay infinite, with the loss scaled by only
    `scale`."""
    return TrainError(
        f"step {step}: the gradients are not finite even with the --amp fp16 loss scale reduced to "
        f"{scale:.1e}; no weights have changed since the first such step; {kept}; try --amp bf16, or none to "
        "see which rank is the cause, a lower --lr, or check the data"
    )
