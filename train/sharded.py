"""--snapshot sharded: the training state as a folder on shared storage, to which each rank writes its part.

torch.distributed.checkpoint writes and reads the parts, so that another number of ranks, or another mode, can go on
from them. This room decides when a folder counts: it is written under another name, gets a list of its files with
their sizes and checksums last, and is then renamed. It must not know models or optimizers. Every function that is
given `ranks` is called by all of them, and all return or raise together.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
import sys
import warnings
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

from train.dist import Ranks
from train.errors import TrainError, UsageError
from train.snapshot import sync

COMPLETE = "complete.json"
METADATA = ".metadata"
UNFINISHED = "unfinished.dcp"
PATTERN = "snapshot-*.dcp"
FORMAT = 1
CHUNK = 2**22  # bytes

T = TypeVar("T")
Facts = dict[str, Any]
Sums = dict[str, list[int]]  # file name -> [bytes, CRC-32]


def save(folder: Path, facts: Facts, parts: tuple[Facts, Facts], ranks: Ranks) -> None:
    """Write a snapshot of `facts["step"]` to `folder` and keep the one before it.

    `facts` are small and fit into JSON; `parts` are this rank's parts of model and optimizer. Raises `TrainError` on
    every rank where one of them cannot write; the snapshots that were there stay.
    """
    target = folder / f"snapshot-{facts['step']}.dcp"
    draft = folder / UNFINISHED

    def write() -> None:
        _quietly(dcp.save, _named(parts), storage_writer=dcp.FileSystemWriter(draft))

    try:
        _together(ranks, lambda: _clear(draft) if ranks.is_main else None)
        _together(ranks, write)
        listed = _together(ranks, lambda: _written(draft) if ranks.is_main else None)
        names = json.loads(ranks.share(listed, source=0))
        sums = _measure(draft, names, ranks)
        _together(ranks, lambda: _commit(draft, target, facts, sums) if ranks.is_main else None)
    except OSError as error:
        if ranks.is_main:
            shutil.rmtree(draft, ignore_errors=True)
        raise TrainError(
            f"the snapshot {target} cannot be written ({error}); the ones before it are kept"
        ) from error


def find_newest(folder: Path, ranks: Ranks) -> Facts | None:
    """The facts of the newest snapshot in `folder` whose files are whole, with its `path`; None where none is.

    One that is unfinished or damaged is named on stderr and skipped.
    """
    listed = json.dumps(_list(folder)).encode() if ranks.is_main else None
    for name, facts, sums in json.loads(ranks.share(listed, source=0)):
        wrong = [
            file for file in _mine(list(sums), ranks) if _sum_or_none(folder / name / file) != sums[file]
        ]
        for file in wrong:
            _say_skipped(folder / name, f"{file} is missing, or its size or checksum is wrong")
        if not ranks.any(bool(wrong)):
            return {**facts, "path": folder / name}
    return None


def read(path: Path, parts: tuple[Facts, Facts]) -> None:
    """Fill `parts` with the snapshot in `path`. Raises `ValueError` on every rank where it does not fit them."""
    try:
        _quietly(dcp.load, _named(parts), storage_reader=dcp.FileSystemReader(path))
    except CheckpointException as error:
        raise ValueError(_reason(error)) from error


def newest_step(folder: Path) -> int:
    """The step of the newest finished snapshot in `folder`, unchecked; -1 where there is none."""
    return max((facts["step"] for _, facts, _ in _list(folder, say=False)), default=-1)


def remove(folder: Path) -> None:
    """Remove the snapshots of an earlier run. Several ranks may do so at once."""
    for path in [*folder.glob(PATTERN), folder / UNFINISHED]:
        _remove(path)


def require_shared(folder: Path, ranks: Ranks) -> None:
    """Raise `UsageError` where a rank does not see in `folder` what rank 0 writes there."""
    token = secrets.token_hex(8).encode() if ranks.is_main else None
    probe = folder / f".shared-{ranks.share(token, source=0).decode()}"
    try:
        _together(ranks, lambda: probe.touch() if ranks.is_main else None)
    except OSError as error:
        raise TrainError(f"{folder} cannot be written to ({error})") from error
    blind = [rank for rank, missing in enumerate(ranks.gather(not probe.exists())) if missing]
    if ranks.is_main:
        probe.unlink(missing_ok=True)
    if blind:
        raise UsageError(
            f"--snapshot sharded needs shared storage: rank {blind[0]} does not see what rank 0 writes to {folder}; "
            "give an --out on storage that all nodes share, or --snapshot full"
        )


def _written(draft: Path) -> bytes:
    """The names of the files that make up the snapshot, as JSON. Not every torch returns them from its `save`."""
    names = {info.relative_path for info in dcp.FileSystemReader(draft).read_metadata().storage_data.values()}
    # By length first: __2_0 comes before __10_0, as the ranks do.
    return json.dumps([*sorted(names, key=lambda name: (len(name), name)), METADATA]).encode()


def _mine(names: Sequence[str], ranks: Ranks) -> list[str]:
    """The files that this rank checks: those that it wrote itself, since network storage has them at hand, and may
    not show those of others at once."""
    readers = [0 if name == METADATA else number % ranks.world for number, name in enumerate(names)]
    return [name for name, reader in zip(names, readers, strict=True) if reader == ranks.rank]


def _commit(draft: Path, target: Path, facts: Facts, sums: Sums) -> None:
    body = {"format": FORMAT, "facts": facts, "files": sums}
    with (draft / COMPLETE).open("w") as file:
        json.dump({"crc": _crc(body), **body}, file)
        file.flush()
        os.fsync(file.fileno())
    sync(draft)
    if target.exists():  # as when a run was stopped in the validation after this very step
        aside = target.with_suffix(".prev.dcp")
        _remove(aside)
        target.rename(aside)
    draft.rename(target)
    sync(target.parent)
    _prune(target)


def _prune(newest: Path) -> None:
    """Keep `newest` and the one before it. Whatever claims a later step was found damaged when this run resumed."""
    listed = [(name, facts["step"]) for name, facts, _ in _list(newest.parent, say=False)]
    last = dict(listed)[newest.name]
    before = [name for name, step in listed if step <= last and name != newest.name]
    for path in newest.parent.glob(PATTERN):
        if path.name not in (newest.name, *before[:1]):
            _remove(path)


def _remove(path: Path) -> None:
    # Without its list of files it does not count any more, also if the rest cannot be removed or that is cut short.
    (path / COMPLETE).unlink(missing_ok=True)
    shutil.rmtree(path, ignore_errors=True)


def _clear(path: Path) -> None:
    _remove(path)
    path.mkdir()


def _list(folder: Path, *, say: bool = True) -> list[tuple[str, Facts, Sums]]:
    """Name, facts and files of each finished snapshot, the newest first."""
    found = []
    for path in folder.glob(PATTERN):
        try:
            marker = json.loads((path / COMPLETE).read_text())
            crc = marker.pop("crc")
            if crc != _crc(marker) or marker["format"] != FORMAT:
                raise ValueError(f"{COMPLETE} is damaged, or of another version")
            found.append((path.name, marker["facts"], marker["files"]))
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            if say:
                _say_skipped(path, f"it is unfinished or damaged ({error})")
    return sorted(found, key=lambda one: (one[1]["step"], ".prev." not in one[0]), reverse=True)


def _measure(folder: Path, names: Sequence[str], ranks: Ranks) -> Sums:
    """Sizes and checksums of the files, each read by one rank, and by then on disk."""
    sums = torch.zeros(len(names), 2, dtype=torch.int64, device=ranks.device)

    def work() -> None:
        for name in _mine(names, ranks):
            # Some releases of torch sync a file while its end is still in Python's buffer.
            sync(folder / name)
            sums[names.index(name)] = torch.tensor(_sum(folder / name))

    _together(ranks, work)
    return dict(zip(names, ranks.sum(sums).tolist(), strict=True))


def _sum(path: Path) -> list[int]:
    size = crc = 0
    with path.open("rb") as file:
        while chunk := file.read(CHUNK):
            size += len(chunk)
            crc = zlib.crc32(chunk, crc)
    return [size, crc]


def _sum_or_none(path: Path) -> list[int] | None:
    try:
        return _sum(path)
    except OSError:
        return None


def _crc(body: Facts) -> int:
    return zlib.crc32(json.dumps(body, sort_keys=True).encode())


def _together(ranks: Ranks, work: Callable[[], T]) -> T:
    """What `work` returns. Raises `OSError` on every rank if it fails on one, so that none waits for another."""
    result: T | None = None
    problem = ""
    try:
        result = work()
    except (OSError, RuntimeError, CheckpointException) as error:
        problem = _reason(error)
    failed = [rank for rank, bad in enumerate(ranks.gather(bool(problem))) if bad]
    if failed:
        raise OSError(problem or f"rank {failed[0]} failed")
    return result


def _reason(error: BaseException) -> str:
    """The first cause in one line: what torch.distributed.checkpoint raises holds the tracebacks of all ranks."""
    where = ""
    if isinstance(error, CheckpointException):
        rank, (error, _) = next(iter(error.failures.items()))
        where = f"rank {rank}: "
    return f"{where}{str(error).strip() or type(error).__name__}".splitlines()[0]


def _named(parts: tuple[Facts, Facts]) -> Facts:
    return {"model": parts[0], "optimizer": parts[1]}


def _quietly(function: Callable[..., T], *args: Any, **kwargs: Any) -> T:
    # With one process it warns that there is only one.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return function(*args, **kwargs)


def _say_skipped(path: Path, why: str) -> None:
    print(f"snapshot {path} is skipped: {why}\n", end="", file=sys.stderr, flush=True)
