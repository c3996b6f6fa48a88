"""The training state on disk: written so that a crash at any moment leaves a loadable one, and read so that no
shared storage is needed.

It must not know models or optimizers: a state is a dictionary that holds a `step`. On loading, the rank with the
newest valid snapshot is elected and sends it to all, because after a restart rank 0 may be on another node.
"""

from __future__ import annotations

import io
import os
import sys
import zipfile
from pathlib import Path
from typing import Any

import torch

from train.dist import Ranks
from train.errors import TrainError

NAME = "snapshot.pt"
PREVIOUS = "snapshot.prev.pt"
TEMPORARY = ".snapshot.{}.tmp"
FORMAT = 3

State = dict[str, Any]


def save(folder: Path, state: State, *, writer: int = 0) -> None:
    """Write `state` as the newest snapshot of `folder` and keep the one before it.

    `writer` is the rank that writes; it keeps the temporary files of several writers apart. Raises `TrainError`
    where the disk refuses; the snapshots that were there stay.
    """
    path = folder / NAME
    temporary = folder / TEMPORARY.format(writer)
    try:
        with temporary.open("wb") as file:
            torch.save({"format": FORMAT, **state}, file)
            file.flush()
            os.fsync(file.fileno())
        try:
            path.replace(folder / PREVIOUS)
        except FileNotFoundError:
            pass  # the first snapshot has none before it
        temporary.replace(path)
        sync(folder)
    except (OSError, RuntimeError) as error:  # RuntimeError: how torch's writer reports a short write
        temporary.unlink(missing_ok=True)
        raise TrainError(
            f"the snapshot {path} cannot be written ({error}); the ones before it are kept"
        ) from error


def remove(folder: Path) -> None:
    """Remove the snapshots of an earlier run, so that none of them is ever newer than one of this run."""
    for name in (NAME, PREVIOUS):
        (folder / name).unlink(missing_ok=True)


def sweep(folder: Path) -> None:
    """Remove the half-written files of writers that were killed, while nobody writes. A writer overwrites its own,
    but after a restart another rank may be the writer here."""
    for path in folder.glob(TEMPORARY.format("*")):
        path.unlink(missing_ok=True)


def load_local(folder: Path) -> State | None:
    """The newest valid state in `folder`, on the CPU, or None. A damaged file is named on stderr and skipped."""
    # What was written last, whatever its step: a run that was forced to go on may count its steps otherwise.
    state = _read(folder / NAME)
    return _read(folder / PREVIOUS) if state is None else state


def newest_step(folder: Path) -> int:
    """The step of the newest valid state in `folder`; -1 where there is none."""
    state = load_local(folder)
    return -1 if state is None else int(state["step"])


def load_newest(folder: Path, ranks: Ranks) -> State | None:
    """The newest state that any rank finds in its `folder`, on every rank, or None where no rank has one."""
    mine = load_local(folder)
    steps = ranks.gather(-1 if mine is None else int(mine["step"]))
    newest = max(steps)
    if newest < 0:
        return None
    source = steps.index(newest)
    blob = ranks.share(_to_bytes(mine) if ranks.rank == source else None, source=source)
    return _from_bytes(blob)


def _read(path: Path) -> State | None:
    if not path.exists():
        return None
    try:
        # torch does not compare the checksums in its own files when it reads them; zipfile does.
        with zipfile.ZipFile(path) as archive:
            damaged = archive.testzip()
        if damaged is not None:
            raise ValueError(f"checksum of {damaged} is wrong")
        state = torch.load(path, map_location="cpu", weights_only=True)
        if not isinstance(state, dict) or not isinstance(state.get("step"), int) or "format" not in state:
            raise ValueError("it is not a snapshot of this trainer")
        if state["format"] != FORMAT:
            raise ValueError(f"its format is {state['format']}, and this trainer reads {FORMAT}")
    except Exception as error:  # whatever is wrong with this file, an older one may still be good
        why = f"{type(error).__name__}: {error}"
        print(f"snapshot {path} is skipped: {why}\n", end="", file=sys.stderr, flush=True)
        return None
    return state


def _to_bytes(state: State | None) -> bytes:
    buffer = io.BytesIO()
    torch.save(state, buffer)
    return buffer.getvalue()


def _from_bytes(blob: bytes) -> State:
    return torch.load(io.BytesIO(blob), map_location="cpu", weights_only=True)


def sync(path: Path) -> None:
    """Put the content of a file, or the names in a folder, on disk. A rename is there only when its folder is."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
