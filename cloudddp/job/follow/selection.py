"""Which part of a job's logs a client reads. Pure."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Selection:
    """Read the logs of these ranks (all if empty), from what was written in the last `since` seconds, and
    from the last `tail` lines of each. `setup`: with the output of the setup commands, unless `ranks` are
    named."""

    ranks: tuple[int, ...] = ()
    since: float | None = None
    tail: int | None = None
    setup: bool = False


EVERYTHING = Selection()
