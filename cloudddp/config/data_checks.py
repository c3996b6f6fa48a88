"""[[data]]: where it may be in the project, and what it needs. Pure."""

from __future__ import annotations

import json
import posixpath
from collections.abc import Sequence

from cloudddp.config.spec import DATA, RESULTS, ClusterSpec, DataSpec, JobSpec
from cloudddp.errors import UsageError

MOST = 50  # a request to an agent has at most 100 (agent.protocol.start)
_RESERVED = (".git", ".cloudddp", "cloudddp.toml", ".venv", ".conda")


def problem(spec: DataSpec, others: Sequence[DataSpec]) -> str:
    """Return why data cannot be at its path, beside others; '' if it can."""
    shown = f"[[data]] source = {json.dumps(spec.source, ensure_ascii=False)}"
    if spec.place in ("", ".", "..", "~") or spec.place.startswith("../"):
        return f"{shown} has no path in the project"
    if spec.variable == DATA:
        return f"{shown}: its path {spec.place} has no letter or digit of A-Z, 0-9 for its variable {DATA}..."
    for other in others:
        if _overlap(spec.place, other.place):
            return f"{shown}: its path {spec.place} overlaps the path {other.place}"
        if spec.variable == other.variable:
            return f"{shown}: its path {spec.place} has the same variable as {other.place}, {spec.variable}"
    return ""


def _overlap(one: str, other: str) -> bool:
    return f"{one}/".startswith(f"{other}/") or f"{other}/".startswith(f"{one}/")


def check(cluster: ClusterSpec, job: JobSpec, data: Sequence[DataSpec]) -> None:
    """Raise UsageError for data that contradicts other settings, or is too much for a request to an agent."""
    if len(data) > MOST:
        raise UsageError(
            f"{len(data)} times [[data]], and at most {MOST} are possible",
            hint="name the folder above them",
        )
    _check_role(cluster, data)
    _check_places(job, data)


def _check_role(cluster: ClusterSpec, data: Sequence[DataSpec]) -> None:
    """Raise UsageError where nodes are to read from S3 and have no role that may allow it."""
    if cluster.instance_profile is None and (buckets := [one.source for one in data if one.is_s3]):
        raise UsageError(
            f"[[data]] source = {buckets[0]} needs cluster.instance_profile: the nodes read it with its role",
            hint="give --instance-profile PROFILE to `up` (infra/iam/data.json is its policy)",
        )


def _check_places(job: JobSpec, data: Sequence[DataSpec]) -> None:
    """Raise UsageError for data where results or files of cloudddp are."""
    for one in data:
        for taken in (*job.not_sent, RESULTS, *_RESERVED):
            if _overlap(one.place, posixpath.normpath(taken)):
                what = f"{taken}, where jobs write results" if taken in (*job.not_sent, RESULTS) else taken
                raise UsageError(
                    f"[[data]] source = {json.dumps(one.source, ensure_ascii=False)}: its path {one.place} "
                    f"overlaps {what}",
                    hint='give another path = "FOLDER"',
                )
