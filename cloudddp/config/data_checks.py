"""[[data]] and [[shared]]: where they may be in the project, and what they need. Pure."""

from __future__ import annotations

import json
import posixpath
from collections.abc import Sequence

from cloudddp.config.spec import DATA, RESULTS, DataSpec, JobSpec, SharedSpec
from cloudddp.errors import UsageError

MOST = 50  # a request to an agent has at most 100 (agent.protocol.start)
_RESERVED = (".git", ".cloudddp", "cloudddp.toml", ".venv", ".conda")


def problem(spec: DataSpec | SharedSpec, others: Sequence[DataSpec | SharedSpec]) -> str:
    """Return why data cannot be at its path, beside others; '' if it can."""
    shown = _shown(spec)
    if spec.place in ("", ".", "..", "~") or spec.place.startswith("../"):
        return f"{shown} has no path in the project"
    variable = spec.variable if isinstance(spec, DataSpec) else ""
    if variable == DATA:
        return f"{shown}: its path {spec.place} has no letter or digit of A-Z, 0-9 for its variable {DATA}..."
    for other in others:
        if _overlap(spec.place, other.place):
            return f"{shown}: its path {spec.place} overlaps the path {other.place}"
        if isinstance(other, DataSpec) and variable == other.variable:
            return f"{shown}: its path {spec.place} has the same variable as {other.place}, {variable}"
    return ""


def _shown(spec: DataSpec | SharedSpec) -> str:
    section = "data" if isinstance(spec, DataSpec) else "shared"
    return f"[[{section}]] source = {json.dumps(spec.source, ensure_ascii=False)}"


def _overlap(one: str, other: str) -> bool:
    return f"{one}/".startswith(f"{other}/") or f"{other}/".startswith(f"{one}/")


def check(job: JobSpec, data: Sequence[DataSpec], shared: Sequence[SharedSpec]) -> None:
    """Raise UsageError for data and shared folders where others are, or results, or files of cloudddp."""
    _check_places(job, data, (*job.not_sent, RESULTS))
    # Results may be in a shared folder, and it may be in theirs.
    _check_places(job, shared, (RESULTS, *(one.place for one in data)))


def _check_places(job: JobSpec, data: Sequence[DataSpec | SharedSpec], others: Sequence[str]) -> None:
    """Raise UsageError for data where results, other data or files of cloudddp are."""
    for one in data:
        for taken in (*others, *_RESERVED):
            if _overlap(one.place, posixpath.normpath(taken)):
                what = f"{taken}, where jobs write results" if taken in (*job.not_sent, RESULTS) else taken
                raise UsageError(
                    f"{_shown(one)}: its path {one.place} overlaps {what}",
                    hint='give another path = "FOLDER"',
                )
