"""Which new files a pull takes where no outputs are configured: all of them up to a limit, else first what is
small, then checkpoints, the newest first. Pure.

Folders that usually hold a downloaded data set come last, and are not left out for their name alone: a script
may write results there, too. `job.scratch` leaves them out.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import NamedTuple

from agent.files.tree import Found
from cloudddp.agent.protocol.checkpoints import SHARD, STEP, checkpoint_of, is_shard, kind_of

SMALL = 1 << 20  # bytes; smaller files come first
CHECKPOINTS = (".pt", ".pth", ".ckpt", ".safetensors", ".bin", ".distcp")
DATA = frozenset(("data", "datasets", ".data", ".cache"))


class NewFile(NamedTuple):
    """`place` is the output that contains it, or the topmost of its parent folders that no sync created.
    `pulled`: before."""

    ctime: int  # ns
    place: str
    found: Found
    pulled: bool = False

    @property
    def size(self) -> int:
        return self.found.info.st_size


def is_checkpoint(name: str) -> bool:
    """Whether a file is one of a checkpoint, by its name or that of a folder with the number of a step."""
    return name.endswith(CHECKPOINTS) or is_shard(name) or any(map(STEP.fullmatch, name.split("/")[:-1]))


def choose(new: Sequence[NewFile], limit: int) -> tuple[list[NewFile], dict[str, list[NewFile]]]:
    """Return the files that a pull takes, up to `limit` bytes of those that were not pulled (0: all), and by
    their path what it leaves. A checkpoint of several files in a folder of its own is one path."""
    if not limit or sum(one.size for one in new if not one.pulled) <= limit:
        return list(new), {}
    shards = [one.found.name for one in new if kind_of(one.found.name) == SHARD]
    folders = {checkpoint_of(os.path.dirname(name)) for name in shards} - {""}
    units: dict[str, list[NewFile]] = {}
    for one in new:
        units.setdefault(_unit(one.found.name, folders), []).append(one)
    taken: list[NewFile] = []
    left: dict[str, list[NewFile]] = {}
    for name, files in sorted(units.items(), key=lambda item: _order(*item)):
        size = sum(one.size for one in files if not one.pulled)
        if size <= limit:
            limit -= size
            taken += files
        else:
            left[name] = files
    return taken, left


def _unit(name: str, distributed: set[str]) -> str:
    """Return the folder of the checkpoint to which a file belongs, or the file itself."""
    folder = checkpoint_of(os.path.dirname(name))
    return folder if folder in distributed or STEP.fullmatch(os.path.basename(folder)) else name


def _order(name: str, files: list[NewFile]) -> tuple[int, float]:
    size, newest = sum(one.size for one in files), max(one.found.info.st_mtime for one in files)
    if DATA.intersection(name.split("/")[:-1]):
        kind = 3
    elif size < SMALL:
        kind = 0
    else:
        kind = 1 if any(is_checkpoint(one.found.name) for one in files) else 2
    return kind, -newest
