"""The folder of one node, `sim/nodes/INSTANCE_ID` below the simulator's home. Standard library only."""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import tempfile
from pathlib import Path

_MAX_TMPDIR = 60  # the path of a Unix socket has at most 107 bytes, and programs append some 40 to TMPDIR


def nodes_folder(home: Path) -> Path:
    return home / "sim" / "nodes"


def temporary_folder(folder: Path) -> Path:
    """Return the node's TMPDIR, through a short link if its own path is too long for Unix sockets."""
    target = folder / "tmp"
    if len(os.fsencode(target)) <= _MAX_TMPDIR:
        return target
    digest = hashlib.sha256(os.fsencode(target)).hexdigest()
    short = Path(tempfile.gettempdir()) / f"cloudddp-{digest[:12]}"
    with contextlib.suppress(FileExistsError):
        short.symlink_to(target)
    if not short.is_symlink() or short.readlink() != target or short.lstat().st_uid != os.getuid():
        return target
    _link_record(folder).write_text(str(short))
    return short


def remove(folder: Path) -> None:
    """Remove a node's files, and the short link to its TMPDIR."""
    with contextlib.suppress(OSError):
        short = Path(_link_record(folder).read_text())
        if short.is_symlink() and short.readlink() == folder / "tmp":
            short.unlink()
    shutil.rmtree(folder, ignore_errors=True)


def _link_record(folder: Path) -> Path:
    return folder / "run" / "tmp-link"
