"""The output of a run: JSON lines, lines on stdout, and a status file for launchers.

Only rank 0 writes; on the other ranks every call does nothing.
"""

from __future__ import annotations

import errno
import fcntl
import json
import math
import os
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO, TextIO

from train.errors import UsageError
from train.record.loggers import Logger, no_loggers, reason

METRICS = "metrics.jsonl"
STATUS = "status.json"
LAUNCHER_STATUS_FILE = "CLOUDDDP_STATUS_FILE"  # variable: where a launcher wants a copy of the status


class RunOutput:
    """The record of one run in `folder`; `loggers` get every line, too. Call `close` at the end."""

    def __init__(
        self, folder: Path, *, enabled: bool, loggers: Callable[[int], Sequence[Logger]] = no_loggers
    ) -> None:
        self.folder = folder
        self.enabled = enabled
        self._open_loggers = loggers
        self._loggers: Sequence[Logger] = ()
        self._failed: list[Logger] = []  # get no more lines
        self._file: TextIO | None = None
        self._lock: BinaryIO | None = None

    def lock(self) -> None:
        """Lock the folder until the process exits. Raises `UsageError` if another run has locked it."""
        if not self.enabled:
            return
        try:
            lock = os.open(self.folder / ".lock", os.O_CREAT | os.O_NOFOLLOW | os.O_RDWR, 0o666)
        except OSError as error:
            if error.errno != errno.ELOOP:
                raise
            raise UsageError(
                f"--out {self.folder}: .lock is a symbolic link; remove it, or give another --out"
            ) from error
        self._lock = os.fdopen(lock, "rb")
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise UsageError(
                f"--out {self.folder}: another run is writing to this folder; stop it, or give another --out"
            ) from error
        except OSError:
            pass  # some network file systems have no locks

    def open(self, step: int, *, evaluated: int = 0) -> None:
        """Start at `step`; the evaluations up to the step `evaluated` have their lines.

        Lines of an earlier run beyond that are removed: those steps will be done again.
        """
        if not self.enabled:
            return
        self._loggers = self._open_loggers(step)  # first: it may refuse the run
        path = self.folder / METRICS
        kept = _lines_up_to(path, step, evaluated) if step else []
        _write_atomically(path, "".join(line + "\n" for line in kept))
        self._file = path.open("a", encoding="utf-8")

    def record(self, kind: str, *, step: int, **values: Any) -> None:
        """Write one line to metrics.jsonl at once, and give its numbers to the loggers.

        A number that is not finite becomes null in the line, because JSON cannot express it.
        """
        if not self.enabled or self._file is None:
            return
        line = {"kind": kind, "step": step, **values, "time": round(time.time(), 3)}
        self._file.write(_json(line) + "\n")
        self._file.flush()
        numbers = {name: value for name, value in values.items() if isinstance(value, (int, float))}
        for logger in self._loggers:
            if logger in self._failed:
                continue
            try:
                logger.log(kind, step, numbers)
            except Exception as error:  # no reason to fail a training run
                self._failed.append(logger)
                _warn(f"{logger.name}: cannot log: {reason(error)}; the run continues without it")

    def print_line(self, text: str) -> None:
        """Print one line on stdout, if anybody reads it."""
        if self.enabled:
            print_line(text)

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

    def close(self, exit_code: int = 0) -> None:
        """Flush and close the files. The loggers learn how the run has ended; one that fails does not change
        that."""
        for logger in self._loggers:
            try:
                logger.close(exit_code)
            except Exception as error:
                _warn(f"{logger.name}: cannot end the run: {reason(error)}")
        self._loggers = ()
        if self._file is not None:
            self._file.close()


def print_line(text: str) -> None:
    """Print one line on stdout. Where its reader has gone, as after `| head`, this and all later lines are
    discarded."""
    try:
        # With its newline in one write: another rank may print at the same moment.
        print(f"{text}\n", end="", flush=True)
    except BrokenPipeError:
        # The line is still in the buffer, and flushing that at exit would fail again.
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, sys.stdout.fileno())
        os.close(null)


def _warn(text: str) -> None:
    with suppress(OSError):
        print(f"train: {text}\n", end="", file=sys.stderr, flush=True)


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


def _lines_up_to(path: Path, step: int, evaluated: int) -> list[str]:
    if not path.exists():
        return []
    kept = []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            values = json.loads(line)
            if values["step"] <= (step if values["kind"] == "train" else evaluated):
                kept.append(line)
        except (ValueError, KeyError, TypeError, RecursionError):
            continue  # the half line of a run that was killed while writing, or garbage
    return kept


def _write_atomically(path: Path, text: str, *, synced: bool = True) -> None:
    temporary = path.with_name(f".{path.name}.tmp")
    temporary.unlink(missing_ok=True)  # of a killed run, or a link to a file elsewhere
    with temporary.open("x", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        if synced:
            os.fsync(file.fileno())
    temporary.replace(path)
