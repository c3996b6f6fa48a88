"""What a run tells: JSON lines, TensorBoard events, a line per epoch for people, and a status file for launchers.

Rank 0 alone writes; on the other ranks every call does nothing. It must not know training: it is handed finished
numbers.
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any, TextIO

from train.errors import UsageError

METRICS = "metrics.jsonl"
STATUS = "status.json"


class Metrics:
    """The record of one run in `folder`. `close` it at the end."""

    def __init__(self, folder: Path, *, enabled: bool, tensorboard: bool) -> None:
        self.folder = folder
        self.enabled = enabled
        self._use_tensorboard = tensorboard
        self._file: TextIO | None = None
        self._events: Any = None

    def open(self, step: int) -> None:
        """Begin at `step`. Lines of an earlier run beyond it are dropped: those steps will be done again."""
        if not self.enabled:
            return
        path = self.folder / METRICS
        kept = _lines_up_to(path, step) if step else []
        _write_atomically(path, "".join(line + "\n" for line in kept))
        self._file = path.open("a", encoding="utf-8")
        self._events = _event_writer(self.folder / "tensorboard", step) if self._use_tensorboard else None

    def record(self, kind: str, *, step: int, **values: Any) -> None:
        """One line in metrics.jsonl, on disk at once, and a TensorBoard scalar for each number."""
        if not self.enabled or self._file is None:
            return
        line = {"kind": kind, "step": step, **values, "time": round(time.time(), 3)}
        self._file.write(json.dumps(line) + "\n")
        self._file.flush()
        if self._events is None:
            return
        for name, value in values.items():
            self._events.add_scalar(f"{kind}/{name}", value, step)

    def say(self, text: str) -> None:
        """One line for the person who watches."""
        if self.enabled:
            print(text, flush=True)

    def status(self, state: str, **values: Any) -> None:
        """Replace status.json. `state` is running, finished or failed."""
        if self.enabled and self.folder.is_dir():
            _write_atomically(self.folder / STATUS, json.dumps({"state": state, **values}) + "\n")

    def close(self) -> None:
        """Flush and close the files."""
        if self._file is not None:
            self._file.close()
        if self._events is not None:
            self._events.close()


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


def _lines_up_to(path: Path, step: int) -> list[str]:
    if not path.exists():
        return []
    kept = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            if json.loads(line)["step"] <= step:
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


def _write_atomically(path: Path, text: str) -> None:
    temporary = path.with_name(f".{path.name}.tmp")
    with temporary.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)
