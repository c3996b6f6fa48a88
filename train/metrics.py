"""What a run tells: JSON lines, TensorBoard events, lines for people, and a status file for launchers.

Rank 0 alone writes; on the other ranks every call does nothing. It must not know training: it is handed finished
numbers.
"""

from __future__ import annotations

import fcntl
import json
import math
import os
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from train.errors import UsageError

METRICS = "metrics.jsonl"
STATUS = "status.json"
LAUNCHERS = "CLOUDDDP_STATUS_FILE"  # names the file in which a launcher wants the status, too


class Metrics:
    """The record of one run in `folder`. `close` it at the end."""

    def __init__(self, folder: Path, *, enabled: bool, tensorboard: bool) -> None:
        self.folder = folder
        self.enabled = enabled
        self._use_tensorboard = tensorboard
        self._file: TextIO | None = None
        self._events: Any = None
        self._lock: TextIO | None = None

    def lock(self) -> None:
        """Take the folder for this run, until the process ends. Raises `UsageError` where another run has it."""
        if not self.enabled:
            return
        self._lock = (self.folder / ".lock").open("w", encoding="utf-8")
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise UsageError(
                f"--out {self.folder}: another run writes to this folder; end it, or give another --out"
            ) from error
        except OSError:
            pass  # some network storage knows no locks

    def open(self, step: int, *, epochs: int = 0) -> None:
        """Begin at `step`, with `epochs` epochs validated. Lines of an earlier run beyond that are dropped: what they
        tell will be done again."""
        if not self.enabled:
            return
        path = self.folder / METRICS
        kept = _lines_up_to(path, step, epochs) if step else []
        _write_atomically(path, "".join(line + "\n" for line in kept))
        self._file = path.open("a", encoding="utf-8")
        self._events = _event_writer(self.folder / "tensorboard", step) if self._use_tensorboard else None

    def record(self, kind: str, *, step: int, **values: Any) -> None:
        """One line in metrics.jsonl, on disk at once, and a TensorBoard scalar for each number. A number that is
        not finite is null in the line, because JSON has no other word for it."""
        if not self.enabled or self._file is None:
            return
        line = {"kind": kind, "step": step, **values, "time": round(time.time(), 3)}
        self._file.write(_json(line) + "\n")
        self._file.flush()
        if self._events is None:
            return
        for name, value in values.items():
            if isinstance(value, (int, float)):
                self._events.add_scalar(f"{kind}/{name}", value, step)

    def say(self, text: str) -> None:
        """One line for the person who watches."""
        if self.enabled:
            # With its newline in one write: another rank's line may come at the same moment.
            print(f"{text}\n", end="", flush=True)

    def status(self, state: str, **values: Any) -> None:
        """Replace status.json, and the launcher's copy. `state` is running, preempted (told to stop; a snapshot is
        there), finished or failed."""
        if self.enabled and self.folder.is_dir():
            # `running` is written at each line: readers must not see half of it, but a power cut may take it.
            last = state != "running"
            text = _json({"state": state, **values}) + "\n"
            _write_atomically(self.folder / STATUS, text, synced=last)
            if launchers := os.environ.get(LAUNCHERS):
                with suppress(OSError):  # no reason to lose a training
                    _write_atomically(Path(launchers), text, synced=False)

    def close(self) -> None:
        """Flush and close the files."""
        if self._file is not None:
            self._file.close()
        if self._events is not None:
            self._events.close()


@dataclass(frozen=True, slots=True, kw_only=True)
class Meters:
    """Means over some steps: seconds per step and per rank, in all and waiting for data, the loss per sample, and
    the shares right at the first guess and within five. The shares are None where nothing is guessed."""

    seconds: float
    data_seconds: float
    loss: float
    top1: float | None
    top5: float | None


def meters(sums: Sequence[float], *, steps: int, world: int, guesses: bool = True) -> Meters:
    """The means behind sums over all ranks: [loss, right at first, right in five, samples, seconds of waiting for
    data, seconds], of the `steps` steps of each of `world` ranks."""
    loss, top1, top5, samples, data_seconds, seconds = sums
    return Meters(
        seconds=seconds / (steps * world),
        data_seconds=data_seconds / (steps * world),
        loss=loss / samples,
        top1=top1 / samples if guesses else None,
        top5=top5 / samples if guesses else None,
    )


def step_line(*, epoch: int, step: int, steps: int, now: Meters, mean: Meters) -> str:
    """`Epoch: [e][i/n]` with time, data, loss and precision in percent, each since the last line and, in brackets,
    since the epoch began. The columns are divided by tabs; `epoch` and `step` are printed as given."""
    columns = [
        f"Epoch: [{epoch}][{step}/{steps}]",
        f"Time {now.seconds:.3f} ({mean.seconds:.3f})",
        f"Data {now.data_seconds:.3f} ({mean.data_seconds:.3f})",
        f"Loss {now.loss:.4f} ({mean.loss:.4f})",
    ]
    for name, value, average in (("Prec@1", now.top1, mean.top1), ("Prec@5", now.top5, mean.top5)):
        if value is not None and average is not None:
            columns.append(f"{name} {100 * value:.3f} ({100 * average:.3f})")
    return "\t".join(columns)


def make_folder(folder: Path) -> None:
    """Make the output folder. Raises `UsageError` where it cannot be written to."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(
            f"--out {folder}: the folder cannot be made ({error.strerror}); give another"
        ) from error
    if not os.access(folder, os.W_OK):
        raise UsageError(f"--out {folder}: the folder cannot be written to; give another")


def _json(values: dict[str, Any]) -> str:
    return json.dumps(_finite(values), allow_nan=False)


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {name: _finite(one) for name, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(one) for one in value]
    return value


def _lines_up_to(path: Path, step: int, epochs: int) -> list[str]:
    if not path.exists():
        return []
    kept = []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            values = json.loads(line)
            if values["step"] <= step and values.get("epoch", 0) <= epochs:
                kept.append(line)
        except (ValueError, KeyError, TypeError):
            continue  # the half line of a run that was killed while it wrote
    return kept


def _event_writer(folder: Path, step: int) -> Any:
    # Imported here because it costs as much time as a short training run, and only rank 0 needs it.
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        return None
    return SummaryWriter(folder, purge_step=step)


def _write_atomically(path: Path, text: str, *, synced: bool = True) -> None:
    temporary = path.with_name(f".{path.name}.tmp")
    with temporary.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        if synced:
            os.fsync(file.fileno())
    temporary.replace(path)
