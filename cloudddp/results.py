"""Bringing results home: a tar stream from a node, unpacked beside its place and moved there when it is whole.

One file that cannot travel costs its owner that file, not the others; what was left out is said.
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cloudddp import nodes
from cloudddp.cluster import PROJECT
from cloudddp.errors import NodeError, UsageError
from cloudddp.nodes import Runner

if sys.version_info >= (3, 12):
    import tarfile
else:  # Debian 12's own Python, 3.11.2, has no extraction filters yet
    from backports import tarfile


@dataclass(frozen=True, slots=True)
class Pulled:
    """What a pull brought. `older` files were last written before the job began; `notes` say what was
    missing or left out, and why."""

    files: int
    size: int
    older: int
    notes: tuple[str, ...]


def pull(runner: Runner, names: Sequence[str], *, node: int, to: Path, since: float | None = None) -> Pulled:
    """Copy files and folders of the project on one node into the folder `to`. `since`: when the job began.

    Files arrive in a folder beside it first and are moved when all are there, so that a broken transfer never
    leaves half a snapshot under a good name. Raises NodeError.
    """
    for name in names:
        if name.startswith(("/", "~")) or ".." in name.split("/"):
            raise UsageError(f"{name!r} is not a path inside the project")
    to.mkdir(parents=True, exist_ok=True)
    incoming = Path(tempfile.mkdtemp(prefix=".incoming-", dir=to))
    try:
        notes = _receive(runner, names, node, incoming)
        times = [p.lstat().st_mtime for p in incoming.rglob("*") if p.is_symlink() or not p.is_dir()]
        count, size = _settle(incoming, to)
        return Pulled(count, size, sum(time < int(since or 0) for time in times), notes)
    finally:
        shutil.rmtree(incoming, ignore_errors=True)


def _receive(runner: Runner, names: Sequence[str], node: int, folder: Path) -> tuple[str, ...]:
    reading, writing = os.pipe()
    problems: list[Exception] = []
    refused: list[str] = []

    def unpack() -> None:
        try:
            with os.fdopen(reading, "rb") as source, tarfile.open(fileobj=source, mode="r|") as archive:
                for member in archive:
                    try:
                        archive.extract(member, folder, filter="data")  # refuses what would leave the folder
                    except tarfile.FilterError as error:
                        refused.append(f"left out {error}")
                while source.read(1 << 16):
                    pass  # the archive's padding: leave the sender no broken pipe
        except Exception as error:
            problems.append(error)

    thread = threading.Thread(target=unpack, daemon=True)
    thread.start()
    # A name that begins with '-' would be taken for an option.
    safe = [f"./{name}" if name.startswith("-") else name for name in names]
    command = nodes.command("pack", f"--project={PROJECT}", *safe)
    try:
        with os.fdopen(writing, "wb", buffering=0) as sink:
            result = runner.run(
                node, command, command_timeout=120, on_stdout=lambda data: _write_all(sink, data)
            )
    except BrokenPipeError:
        thread.join()
        raise NodeError(
            f"node {node}: the files cannot be unpacked here: {problems[0] if problems else ''}"
        ) from None
    thread.join()
    if result.exit_code:
        raise NodeError(f"node {node}: {nodes.last_words(result)}")
    if problems:
        raise NodeError(f"node {node}: the files cannot be unpacked here: {problems[0]}")
    said = result.stderr.decode(errors="replace").splitlines()
    return tuple(line for line in said if line.startswith(("missing ", "left out "))) + tuple(refused)


def _write_all(sink: Any, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[sink.write(view) :]


def _settle(incoming: Path, to: Path) -> tuple[int, int]:
    count = size = 0
    for path in sorted(incoming.rglob("*")):
        target = to / path.relative_to(incoming)
        if path.is_dir() and not path.is_symlink():
            target.mkdir(parents=True, exist_ok=True)
            continue
        target.parent.mkdir(parents=True, exist_ok=True)
        count, size = count + 1, size + path.lstat().st_size
        try:
            path.replace(target)
        except OSError as error:
            raise NodeError(
                f"{target} cannot be written: {error.strerror}", hint="give another folder with --to"
            ) from None
    return count, size
