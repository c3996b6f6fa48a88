"""--snapshot sharded: the training state as a folder on shared storage, to which each rank writes its part.

torch.distributed.checkpoint writes and reads the parts, so that another number of ranks, or another mode, can
resume from them. This module decides when a folder is valid: it is written under another name, a list of its
files with their sizes and checksums is added last, and then it is renamed. Every function that takes a
Communicator is called by all ranks, and all of them return or raise together.
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

from train.checkpoint.full import is_count, sync
from train.distributed.communicator import Communicator
from train.errors import TrainError, UsageError

MANIFEST = "complete.json"
METADATA = ".metadata"
UNFINISHED = "unfinished.dcp"
PATTERN = "snapshot-*.dcp"
FORMAT = 1
CHUNK = 2**22  # bytes

T = TypeVar("T")
Facts = dict[str, Any]
ShardedState = tuple[Facts, Facts, Facts]  # of the model, the optimizer, and the tensors of hooks
Checksums = dict[str, list[int]]  # file name -> [bytes, CRC-32]


def save(folder: Path, facts: Facts, parts: ShardedState, comm: Communicator) -> None:
    """Write a snapshot of `facts["step"]` to `folder` and keep the one before it.

    `facts` are small and can be written as JSON; `parts` are those of this rank. Raises
    `TrainError` on every rank if one of them cannot write; the existing snapshots stay.
    """
    target = folder / f"snapshot-{facts['step']}.dcp"
    draft = folder / UNFINISHED

    def write() -> None:
        _without_warnings(
            dcp.save,
            _as_state(parts),
            storage_writer=dcp.FileSystemWriter(draft),
            process_group=comm.group,
        )

    def list_files() -> bytes:
        return _file_names(draft) if comm.is_main else b""

    try:
        _on_all_ranks(comm, lambda: _clear(draft) if comm.is_main else None)
        _on_all_ranks(comm, write)
        names = json.loads(comm.broadcast_bytes(_on_all_ranks(comm, list_files), source=0))
        checksums = _sync_and_checksum(draft, names, comm)
        _on_all_ranks(comm, lambda: _commit(draft, target, facts, checksums) if comm.is_main else None)
    except OSError as error:
        if comm.is_main:
            shutil.rmtree(draft, ignore_errors=True)
        kept = "; the one before it is kept" if newest_step(folder) >= 0 else ""
        raise TrainError(f"cannot write the snapshot {target} ({error}){kept}") from error


def find_newest(folder: Path, comm: Communicator) -> Facts | None:
    """Return the facts of the newest snapshot in `folder` whose files are intact, with its `path`; None if
    none is.

    One that is unfinished or damaged is reported on stderr and skipped.
    """
    listed = json.dumps(_list(folder)).encode() if comm.is_main else None
    for name, facts, checksums in json.loads(comm.broadcast_bytes(listed, source=0)):
        path = folder / name
        wrong = [
            file
            for file in _own_files(list(checksums), comm)
            if _try_checksum(path / file) != checksums[file]
        ]
        for file in wrong:
            _report_skipped(path, f"{file} is missing, or has the wrong size or checksum")
        if not comm.any(bool(wrong)):
            return {**facts, "path": path}
    return None


def read(path: Path, parts: ShardedState) -> None:
    """Fill `parts` from the snapshot in `path`. Tensors of hooks that it does not have stay, and the
    optimizer's state of such parameters is removed. Raises `ValueError` on every rank where it does not fit
    them."""
    reader = dcp.FileSystemReader(path)
    saved = reader.read_metadata().state_dict_metadata
    hooks = {name: value for name, value in parts[2].items() if f"hooks.{name}" in saved}
    states = parts[1].get("state", {})
    for name in [
        one for one in states if not any(key.startswith(f"optimizer.state.{one}.") for key in saved)
    ]:
        del states[name]
    try:
        _without_warnings(dcp.load, _as_state((parts[0], parts[1], hooks)), storage_reader=reader)
    except CheckpointException as error:
        raise ValueError(_first_cause(error)) from error


def newest_step(folder: Path) -> int:
    """Return the step of the newest finished snapshot in `folder`, without checking its files; -1 if there is
    none."""
    return max((facts["step"] for _, facts, _ in _list(folder, report=False)), default=-1)


def remove(folder: Path) -> None:
    """Remove the snapshots of an earlier run. Several ranks may do so at once."""
    for path in [*folder.glob(PATTERN), folder / UNFINISHED]:
        _remove(path)


def require_shared_storage(folder: Path, comm: Communicator) -> None:
    """Raise `UsageError` if a rank does not see in `folder` what rank 0 writes there."""
    token = secrets.token_hex(8).encode() if comm.is_main else None
    probe = folder / f".shared-{comm.broadcast_bytes(token, source=0).decode()}"
    try:
        _on_all_ranks(comm, lambda: probe.touch() if comm.is_main else None)
    except OSError as error:
        raise TrainError(f"cannot write to {folder} ({error})") from error
    blind = [rank for rank, missing in enumerate(comm.gather(not probe.exists())) if missing]
    if comm.is_main:
        probe.unlink(missing_ok=True)
    if blind:
        raise UsageError(
            f"--snapshot sharded needs shared storage: rank {blind[0]} does not see what rank 0 writes to "
            f"{folder}; give an --out on storage that all nodes share, or --snapshot full"
        )


def _file_names(draft: Path) -> bytes:
    """Return the names of the snapshot's files as JSON. Not every version of torch returns them from
    `save`."""
    names = {info.relative_path for info in dcp.FileSystemReader(draft).read_metadata().storage_data.values()}
    # By length first: __2_0 comes before __10_0, as the ranks do.
    return json.dumps([*sorted(names, key=lambda name: (len(name), name)), METADATA]).encode()


def _own_files(names: Sequence[str], comm: Communicator) -> list[str]:
    """Return the files that this rank checks: those that it wrote itself, since network storage has them
    cached, and may not show those of others at once."""
    readers = [0 if name == METADATA else number % comm.world_size for number, name in enumerate(names)]
    return [name for name, reader in zip(names, readers, strict=True) if reader == comm.rank]


def _commit(draft: Path, target: Path, facts: Facts, checksums: Checksums) -> None:
    body = {"format": FORMAT, "facts": facts, "files": checksums}
    with (draft / MANIFEST).open("w") as file:
        json.dump({"crc": _crc(body), **body}, file)
        file.flush()
        os.fsync(file.fileno())
    sync(draft)
    if target.exists():  # for example, the run was stopped in the validation after this very step
        aside = target.with_suffix(".prev.dcp")
        _remove(aside)
        target.rename(aside)
    draft.rename(target)
    sync(target.parent)
    _prune(target)


def _prune(newest: Path) -> None:
    """Keep `newest` and the one before it. Anything with a later step was found damaged when this run
    resumed."""
    listed = [(name, facts["step"]) for name, facts, _ in _list(newest.parent, report=False)]
    newest_step = dict(listed)[newest.name]
    before = [name for name, step in listed if step <= newest_step and name != newest.name]
    for path in newest.parent.glob(PATTERN):
        if path.name not in (newest.name, *before[:1]):
            _remove(path)


def _remove(path: Path) -> None:
    if path.is_symlink():  # what it points to may be a snapshot of another run
        path.unlink(missing_ok=True)
        return
    # Without its manifest it is no longer valid, even if the rest cannot be removed or the removal is
    # interrupted.
    (path / MANIFEST).unlink(missing_ok=True)
    shutil.rmtree(path, ignore_errors=True)


def _clear(path: Path) -> None:
    _remove(path)
    path.mkdir()


def _list(folder: Path, *, report: bool = True) -> list[tuple[str, Facts, Checksums]]:
    """Return name, facts and files of each finished snapshot, the newest first."""
    found = []
    for path in folder.glob(PATTERN):
        try:
            manifest = json.loads((path / MANIFEST).read_text())
            crc = manifest.pop("crc")
            if crc != _crc(manifest) or manifest["format"] != FORMAT:
                raise ValueError(f"{MANIFEST} is damaged, or of another version")
            if not is_count(manifest["facts"]["step"]):
                raise ValueError(f"its step is {manifest['facts']['step']}")
            found.append((path.name, manifest["facts"], manifest["files"]))
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            if report:
                _report_skipped(path, f"unfinished or damaged ({error})")
    return sorted(found, key=lambda one: (one[1]["step"], ".prev." not in one[0]), reverse=True)


def _sync_and_checksum(folder: Path, names: Sequence[str], comm: Communicator) -> Checksums:
    """Flush the files to disk and return their sizes and checksums. Each file is read by one rank."""
    checksums = torch.zeros(len(names), 2, dtype=torch.int64, device=comm.device)

    def work() -> None:
        for name in _own_files(names, comm):
            # Some versions of torch sync a file while its end is still in Python's buffer.
            sync(folder / name)
            checksums[names.index(name)] = torch.tensor(_checksum(folder / name))

    _on_all_ranks(comm, work)
    return dict(zip(names, comm.sum(checksums).tolist(), strict=True))


def _checksum(path: Path) -> list[int]:
    size = crc = 0
    with path.open("rb") as file:
        while chunk := file.read(CHUNK):
            size += len(chunk)
            crc = zlib.crc32(chunk, crc)
    return [size, crc]


def _try_checksum(path: Path) -> list[int] | None:
    try:
        return _checksum(path)
    except OSError:
        return None


def _crc(body: Facts) -> int:
    return zlib.crc32(json.dumps(body, sort_keys=True).encode())


def _on_all_ranks(comm: Communicator, work: Callable[[], T]) -> T:
    """Return what `work` returns. Raises `OSError` on every rank if it fails on one, so that none waits for
    another."""
    results: list[T] = []
    problem = ""
    try:
        results.append(work())
    except (OSError, RuntimeError, CheckpointException) as error:
        problem = _first_cause(error, comm.rank)
    failed = [rank for rank, bad in enumerate(comm.gather(bool(problem))) if bad]
    if failed:
        raise OSError(problem or f"rank {failed[0]} failed")
    return results[0]


def _first_cause(error: BaseException, own_rank: int | None = None) -> str:
    """Return the first cause in one line: what torch.distributed.checkpoint raises has the tracebacks of all
    ranks."""
    where = ""
    if isinstance(error, CheckpointException):
        rank, (error, _) = next(iter(error.failures.items()))
        where = "" if rank == own_rank else f"rank {rank}: "
    return f"{where}{str(error).strip() or type(error).__name__}".splitlines()[0]


def _as_state(parts: ShardedState) -> Facts:
    return {"model": parts[0], "optimizer": parts[1], "hooks": parts[2]}


def _without_warnings(function: Callable[..., T], *args: Any, **kwargs: Any) -> T:
    # With one process it warns that there is only one.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return function(*args, **kwargs)


def _report_skipped(path: Path, reason: str) -> None:
    print(f"skipping snapshot {path}: {reason}\n", end="", file=sys.stderr, flush=True)
