"""What the agents have noticed of a job, kept in its folder: stragglers, and a stall that was left alone."""

from __future__ import annotations

import contextlib
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Optional

from agent import store
from cloudddp.agent.protocol.pace import MAX_STRAGGLERS, Straggler
from cloudddp.agent.protocol.stall import LeftStall

STRAGGLERS_FILE = "stragglers.json"
STALL_FILE = "stall.json"


@dataclass(frozen=True)
class Stragglers:
    """For each rank the last time that it was slow."""

    known: tuple[Straggler, ...] = ()


def stragglers(folder: Path) -> tuple[Straggler, ...]:
    found = store.read(folder / STRAGGLERS_FILE, Stragglers)
    return () if found is None else found.known[:MAX_STRAGGLERS]


def keep_stragglers(folder: Path, known: tuple[Straggler, ...]) -> None:
    _write(folder / STRAGGLERS_FILE, Stragglers(known))


def left_stall(folder: Path) -> Optional[LeftStall]:
    return store.read(folder / STALL_FILE, LeftStall)


def keep_left_stall(folder: Path, stall: LeftStall) -> None:
    _write(folder / STALL_FILE, stall)


def close(folder: Path) -> None:
    """Record that neither a stall nor a straggler is left: the ranks have ended."""
    now = time.time()
    stall = left_stall(folder)
    if stall is not None and stall.until is None:
        keep_left_stall(folder, replace(stall, until=max(now, stall.since)))
    known = stragglers(folder)
    if any(one.until is None for one in known):
        ended = [replace(one, until=max(now, one.since)) if one.until is None else one for one in known]
        keep_stragglers(folder, tuple(ended))


def _write(path: Path, record: Any) -> None:
    with contextlib.suppress(OSError):  # a full disk ends no job
        store.write(path, record)
