"""Files in the folder of a job that have holes. A rank's log whose middle was dropped (ranks/rank_log.py) is
sent without its hole. A file with other holes is left out: 1 TiB may take no space on the node's disk, and
would fill the one that gets it."""

from __future__ import annotations

import contextlib
import stat
from pathlib import Path
from typing import Optional

from agent.files.tree import Found, OnSkipped
from agent.node import store
from agent.ranks import rank_log

EMPTY = 1 << 26  # bytes of holes that may be sent as zeros


def sent_size(one: Found, left_out: OnSkipped) -> Optional[int]:
    """Return how many bytes of a file are sent, None for one that is left out."""
    size, filled = one.info.st_size, one.info.st_blocks * 512
    if not stat.S_ISREG(one.info.st_mode) or filled >= size:
        return size
    with contextlib.suppress(OSError), store.open_regular(Path(one.path)) as file:
        begin, end = rank_log.hole_of(file.fileno())
        size -= end - begin
    if size - filled > max(filled, EMPTY):
        left_out(one.name, f"{size >> 20} MiB, of which {filled >> 20} MiB were written")
        return None
    return size
