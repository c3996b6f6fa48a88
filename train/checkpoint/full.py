"""The training state in one file: written so that a crash at any moment leaves a valid one, and read without
shared storage.

A state is a dictionary that holds a `step`. On loading, the rank with the newest valid snapshot is elected
and sends it to all, because after a restart rank 0 may be on another node.
"""

from __future__ import annotations

import io
import os
import sys
import zipfile
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from train.distributed.communicator import Communicator
from train.errors import TrainError

NAME = "snapshot.pt"
PREVIOUS = "snapshot.prev.pt"
TEMPORARY_FILES = ".*.pt.*.tmp"
FORMAT = 4
MAX_STEPS = 2**53

State = dict[str, Any]


def save(folder: Path, state: State, *, writer: int = 0) -> None:
    """Write `state` as the newest snapshot in `folder` and keep the one before it.

    `writer` is the rank that writes; it keeps the temporary files of several writers apart. Raises
    `TrainError` if the write fails; the existing snapshots stay.
    """
    write(folder / NAME, state, writer=writer, previous=folder / PREVIOUS)


def write(path: Path, state: State, *, writer: int = 0, previous: Path | None = None) -> None:
    """Write `state` to `path` at once or not at all; an existing file is renamed to `previous`, if that is
    given.

    Raises `TrainError` if the write fails; existing files stay.
    """
    folder = path.parent
    temporary = temporary_file(path, writer)
    try:
        with temporary.open("wb") as file:
            torch.save({"format": FORMAT, **state}, file)
            file.flush()
            os.fsync(file.fileno())
        if previous is not None:
            with suppress(FileNotFoundError):  # this is the first snapshot
                path.replace(previous)
        temporary.replace(path)
        sync(folder)
    except (OSError, RuntimeError) as error:  # RuntimeError: how torch's writer reports a short write
        temporary.unlink(missing_ok=True)
        kept = "; the one before it is kept" if any(one and one.exists() for one in (path, previous)) else ""
        raise TrainError(f"cannot write {path} ({_failed_write(error)}){kept}") from error


def _failed_write(error: BaseException) -> BaseException:
    """Return the error of the operating system, such as a full disk. torch's writer goes on after it, and
    then raises one about the position in the file."""
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, OSError):
        cause = cause.__cause__ or cause.__context__
    return cause or error


def temporary_file(path: Path, writer: int) -> Path:
    """Return the file that becomes `path`. Each path has its own: the best weights may be written while a
    thread writes a snapshot."""
    return path.with_name(f".{path.name}.{writer}.tmp")


def remove(folder: Path) -> None:
    """Remove the snapshots of an earlier run, so that none of them is ever newer than one of this run."""
    for name in (NAME, PREVIOUS):
        (folder / name).unlink(missing_ok=True)


def remove_temporary_files(folder: Path) -> None:
    """Remove the partial files of writers that were killed. Must not be called while a rank writes.

    A writer overwrites its own, but after a restart another rank may be the writer here.
    """
    for path in folder.glob(TEMPORARY_FILES):
        path.unlink(missing_ok=True)


def load_local(folder: Path) -> State | None:
    """Return the newest valid state in `folder`, on the CPU, or None. A damaged file is reported on stderr
    and skipped."""
    # The file written last, whatever its step: a run that was forced to resume may count its steps
    # differently.
    state = read(folder / NAME)
    return read(folder / PREVIOUS) if state is None else state


def newest_step(folder: Path) -> int:
    """Return the step of the newest valid state in `folder`; -1 if there is none."""
    state = load_local(folder)
    return -1 if state is None else int(state["step"])


def load_newest(folder: Path, comm: Communicator) -> State | None:
    """Return on every rank the newest state that any rank finds in its `folder`, or None if no rank has
    one."""
    return elect(load_local(folder), comm)


def elect(own: State | None, comm: Communicator) -> State | None:
    """Return on every rank the state with the highest step of those that the ranks have, or None if none has
    one."""
    steps = comm.gather(-1 if own is None else int(own["step"]))
    newest = max(steps)
    if newest < 0:
        return None
    source = steps.index(newest)
    blob = comm.broadcast_bytes(_to_bytes(own) if comm.rank == source else None, source=source)
    return _from_bytes(blob)


def read(path: Path) -> State | None:
    """Return the state in a file, on the CPU; None if there is no file. A damaged one is reported on stderr
    and skipped."""
    if not path.exists():
        return None
    try:
        # torch does not verify the checksums in its own files when it reads them; zipfile does.
        with zipfile.ZipFile(path) as archive:
            damaged = archive.testzip()
        if damaged is not None:
            raise ValueError(f"wrong checksum of {damaged}")
        state = torch.load(path, map_location="cpu", weights_only=True)
        if not isinstance(state, dict) or "step" not in state or "format" not in state:
            raise ValueError("not a snapshot of this trainer")
        if not is_count(state["step"]):
            raise ValueError(f"its step is {state['step']}")
        if state["format"] != FORMAT:
            raise ValueError(f"format {state['format']}, but this trainer reads format {FORMAT}")
    except Exception as error:  # whatever is wrong with this file, an older one may still be good
        reason = f"{type(error).__name__}: {error}"
        print(f"skipping snapshot {path}: {reason}\n", end="", file=sys.stderr, flush=True)
        return None
    return state


def is_count(value: Any) -> bool:
    """Return whether the value is a possible number of steps."""
    return type(value) is int and 0 <= value < MAX_STEPS


def _to_bytes(state: State | None) -> bytes:
    buffer = io.BytesIO()
    torch.save(state, buffer)
    return buffer.getvalue()


def _from_bytes(blob: bytes) -> State:
    state: State = torch.load(io.BytesIO(blob), map_location="cpu", weights_only=True)
    return state


def sync(path: Path) -> None:
    """Flush the content of a file, or the names in a folder, to disk. A rename is durable only when its
    folder is."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
