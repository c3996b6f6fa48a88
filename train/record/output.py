"""The output of a run: JSON lines, TensorBoard events, lines on stdout, and a status file for launchers.

Only rank 0 writes; on the other ranks every call does nothing.
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
LAUNCHER_STATUS_FILE = "CLOUDDDP_STATUS_FILE"  # variable: where a launcher wants a copy of the status


class Metrics:
    """The record of one run in `folder`. Call `close` at the end."""

    def __init__(self, folder: Path, *, enabled: bool, tensorboard: bool) -> None:
        self.folder = folder
        self.enabled = enabled
        self._use_tensorboard = tensorboard
        self._file: TextIO | None = None
        self._events: Any = None
        self._lock: TextIO | None = None

    def lock(self) -> None:
        """Lock the folder until the process exits. Raises `UsageError` if another run has locked it."""
        if not self.enabled:
            return
        self._lock = (self.folder / ".lock").open("w", encoding="utf-8")
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise UsageError(
                f"--out {self.folder}: another run is writing to this folder; stop it, or give another --out"
            ) from error
        except OSError:
            pass  # some network file systems have no locks

    def open(self, step: int, *, epochs: int = 0) -> None:
        """Start at `step`, with `epochs` epochs validated.

        Lines of an earlier run beyond that are removed: those steps will be done again.
        """
        if not self.enabled:
            return
        path = self.folder / METRICS
        kept = _lines_up_to(path, step, epochs) if step else []
        _write_atomically(path, "".join(line + "\n" for line in kept))
        self._file = path.open("a", encoding="utf-8")
        self._events = _event_writer(self.folder / "tensorboard", step) if self._use_tensorboard else None

    def record(self, kind: str, *, step: int, **values: Any) -> None:
        """Write one line to metrics.jsonl at once, and a TensorBoard scalar for each number.

        A number that is not finite becomes null in the line, because JSON cannot express it.
        """
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

    def print_line(self, text: str) -> None:
        """Print one line on stdout."""
        if self.enabled:
            # With its newline in one write: another rank may print at the same moment.
            print(f"{text}\n", end="", flush=True)

    def write_status(self, state: str, **values: Any) -> None:
        """Replace status.json and the launcher's copy.

        `state` is running, preempted (stopped by SIGTERM with a snapshot saved), finished or failed.
        """
        if not self.enabled or not self.folder.is_dir():
            return
        # `running` is written at each line: readers must not see half of it, but a power cut may lose it.
        final = state != "running"
        text = _json({"state": state, **values}) + "\n"
        _write_atomically(self.folder / STATUS, text, synced=final)
        if launcher_path := os.environ.get(LAUNCHER_STATUS_FILE):
            with suppress(OSError):  # no reason to fail a training run
                _write_atomically(Path(launcher_path), text, synced=False)

    def close(self) -> None:
        """Flush and close the files."""
        if self._file is not None:
            self._file.close()
        if self._events is not None:
            self._events.close()


@dataclass(frozen=True, slots=True, kw_only=True)
class Averages:
    """Averages over some steps: seconds per step and rank, in total and waiting for data, the loss per sample, and the
    shares of samples correct at the first guess and within five. The shares are None for a regression."""

    seconds: float
    data_seconds: float
    loss: float
    top1: float | None
    top5: float | None


def average(sums: Sequence[float], *, steps: int, world_size: int, classify: bool = True) -> Averages:
    """Return the averages of `steps` steps from sums over all ranks.

    `sums` is [loss, correct, correct in top 5, samples, seconds waiting for data, seconds].
    """
    loss, top1, top5, samples, data_seconds, seconds = sums
    return Averages(
        seconds=seconds / (steps * world_size),
        data_seconds=data_seconds / (steps * world_size),
        loss=loss / samples,
        top1=top1 / samples if classify else None,
        top5=top5 / samples if classify else None,
    )


def step_line(*, epoch: int, step: int, steps: int, line: Averages, since_epoch_start: Averages) -> str:
    """Return `Epoch: [e][i/n]` with time, data, loss and precision in percent, separated by tabs.

    Each value is since the last line, followed in parentheses by the value since the epoch started. `epoch` and `step`
    are printed as given.
    """
    total = since_epoch_start
    columns = [
        f"Epoch: [{epoch}][{step}/{steps}]",
        f"Time {line.seconds:.3f} ({total.seconds:.3f})",
        f"Data {line.data_seconds:.3f} ({total.data_seconds:.3f})",
        f"Loss {line.loss:.4f} ({total.loss:.4f})",
    ]
    for name, value, mean in (("Prec@1", line.top1, total.top1), ("Prec@5", line.top5, total.top5)):
        if value is not None and mean is not None:
            columns.append(f"{name} {100 * value:.3f} ({100 * mean:.3f})")
    return "\t".join(columns)


def make_output_folder(folder: Path) -> None:
    """Create the output folder. Raises `UsageError` if that fails or the folder is not writable."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(
            f"--out {folder}: cannot create the folder ({error.strerror}); give another one"
        ) from error
    if not os.access(folder, os.W_OK):
        raise UsageError(f"--out {folder}: the folder is not writable; give another one")


def _json(values: dict[str, Any]) -> str:
    return json.dumps(_replace_non_finite(values), allow_nan=False)


def _replace_non_finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {name: _replace_non_finite(item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_replace_non_finite(item) for item in value]
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
            continue  # the half line of a run that was killed while writing
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
