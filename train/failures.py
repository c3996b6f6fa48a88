"""What ended a rank, as a sentence and an exit code instead of a traceback, wherever a person can cause and mend it.

It must not know training; it is told what was raised or seen, and with which settings.
"""

from __future__ import annotations

import errno
import math
from dataclasses import dataclass
from pathlib import Path

from train.config import Config
from train.errors import Preempted, TrainError

NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ending:
    """What to print and to exit with. What ends all ranks alike is said by one of them."""

    text: str
    code: int
    alike: bool = False


def explain(error: BaseException, config: Config) -> Ending | None:
    """How a rank that raised `error` ends; None for what only a change of the program mends."""
    if isinstance(error, TrainError):
        return Ending(text=str(error), code=error.exit_code, alike=isinstance(error, Preempted))
    if isinstance(error, KeyboardInterrupt):
        text = "interrupted; the same command goes on from the newest snapshot, if there is one"
        return Ending(text=text, code=130, alike=True)
    if _out_of_memory(error):
        advice = "give a smaller --batch-size, a larger --accumulate, or a smaller model or data"
        return Ending(text=f"out of memory ({str(error).partition('. ')[0]}): {advice}", code=1)
    if isinstance(error, OSError) and _of_the_folder(error, config.folder):
        return Ending(text=f"{error}: make room there, or give another --out", code=1)
    return None


def _out_of_memory(error: BaseException) -> bool:
    """Whether the memory of the device or of this machine was too small."""
    import torch

    # The allocator of the CPU has no error of its own.
    on_cpu = isinstance(error, RuntimeError) and "can't allocate memory" in str(error)
    return on_cpu or isinstance(error, (MemoryError, torch.OutOfMemoryError))


def _of_the_folder(error: OSError, folder: Path) -> bool:
    """Whether the disk is full, or a file of the run's own folder cannot be written."""
    return error.errno in NO_ROOM or folder in Path(str(error.filename)).parents


def not_finite(step: int, *, rank: int, loss: float) -> TrainError:
    """The end of a rank whose gradients of that step are not finite. `loss` is this rank's own."""
    where = f"step {step}, rank {rank}"
    if math.isfinite(loss):
        return TrainError(
            f"{where}: the gradients are not finite, though this rank's own loss is; stopped before the weights "
            "changed; the last snapshot is kept; where another rank's loss is to blame, that one says so"
        )
    return TrainError(
        f"{where}: the loss is {loss}; stopped before the weights changed; the last snapshot is kept; "
        "try a lower --lr, --clip, or a look at the data"
    )


def never_finite(step: int, *, scale: float) -> TrainError:
    """The end of a run under fp16 whose gradients stay infinite, with the loss scaled by as little as `scale`."""
    return TrainError(
        f"step {step}: the gradients are not finite, however little --amp fp16 scales the loss (by {scale:.1e} now); "
        "no weights have changed since that began, and the last snapshot is kept; try --amp bf16, or none to see "
        "which rank it begins on, a lower --lr, or a look at the data"
    )
