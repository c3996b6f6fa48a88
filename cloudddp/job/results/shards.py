"""Checkpoints of torch.distributed.checkpoint, of which each node has some shards: made one folder after a
pull.

The files are hard links to what was pulled from each node, so that the next pull still finds it there.
"""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Mapping
from pathlib import Path

from cloudddp.files import Folder

_METADATA, _SHARD = ".metadata", ".distcp"


def merge(base: Path, folders: Mapping[int, Path]) -> list[str]:
    """Link the shards of each checkpoint that lies in several of the `folders` (by node) into one folder
    below `base`; return the paths of these checkpoints. One of which two nodes have the same file is left as
    it is. Raises OSError."""
    found: dict[str, dict[int, list[str]]] = {}
    for node, folder in folders.items():
        for where, inner, names in os.walk(folder):
            inner[:] = [name for name in inner if Path(where, name) not in folders.values()]
            shards = [name for name in names if name == _METADATA or name.endswith(_SHARD)]
            if shards:
                found.setdefault(Path(where).relative_to(folder).as_posix(), {})[node] = shards
    merged = []
    for path, parts in sorted(found.items()):
        every = [name for names in parts.values() for name in names]
        if len(parts) > 1 and _METADATA in every and len(set(every)) == len(every):
            for node, names in parts.items():
                if folders[node] != base:
                    _link(folders[node] / path, names, base, path)
            merged.append(path)
    return merged


def _link(source: Path, names: list[str], base: Path, path: str) -> None:
    with contextlib.ExitStack() as opened:
        target = opened.enter_context(Folder.at(base))
        for part in Path(path).parts:
            target = opened.enter_context(target.enter(part, make=0o755))
        for name in names:
            if stat.S_ISREG((source / name).lstat().st_mode):
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(name, dir_fd=target.descriptor)
                os.link(source / name, name, dst_dir_fd=target.descriptor, follow_symlinks=False)
