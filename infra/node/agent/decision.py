"""The verdict of a job from the reports of its nodes. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Optional

from agent import causes
from cloudddp.agent.protocol.gang import MAX_AGO, Observed, Report
from cloudddp.agent.protocol.phases import JobPhase
from cloudddp.agent.protocol.training import PREEMPTED_EXIT_CODE
from cloudddp.agent.protocol.verdict import Cause, Exited, Verdict

CANCELLED = 130


@dataclass(frozen=True)
class Arrived:
    """A report, and when it came, by this node's monotonic clock."""

    at: float
    report: Report


@dataclass(frozen=True)
class Seen:
    """A failure, and when it came to be, by this node's monotonic clock."""

    at: float
    observed: Observed


def verdict(node: int, reports: Mapping[int, Arrived], seen: Iterable[Seen]) -> Verdict:
    """Return the verdict that this node decides, from the reports of the nodes that are left and what was `seen` of those
    that are not."""
    failures = [*seen]
    for one in reports.values():
        failures += [Seen(one.at - failure.ago, failure) for failure in one.report.failures]
    failures.sort(key=lambda one: one.at)
    cancels = [one.at - one.report.cancelled for one in reports.values() if one.report.cancelled is not None]
    first = _first(failures)
    if cancels and (first is None or min(cancels) <= first.at):
        return Verdict(JobPhase.CANCELLED, CANCELLED, node)
    if first is not None:
        failure = replace(first.observed.failure, exited=_exited(first, reports.values()))
        return Verdict(JobPhase.FAILED, failure.exit_code or 1, node, failure, first.observed.last_lines)
    if all(one.report.succeeded for one in reports.values()):
        return Verdict(JobPhase.SUCCEEDED, 0, node)
    codes = [one.report.exit_code for one in reports.values() if one.report.exit_code]
    code = PREEMPTED_EXIT_CODE if PREEMPTED_EXIT_CODE in codes else next(iter(codes), 1)
    return Verdict(JobPhase.FAILED, code, node)


def _first(failures: Sequence[Seen]) -> Optional[Seen]:
    """Return what failed first, of failures by time. A rank that has lost another one is recorded before that one if it
    ends faster."""
    if not failures:
        return None
    first = failures[0]
    late = (one for one in failures if one.at <= first.at + causes.SETTLE and not _is_consequence(one))
    return next(late, first)


def _is_consequence(one: Seen) -> bool:
    return causes.is_consequence(one.observed.failure, one.observed.last_lines)


def _exited(first: Seen, reports: Iterable[Arrived]) -> Optional[Exited]:
    """Return the rank that had exited with 0 before the first failure: the others may have failed for want of it."""
    failure = first.observed.failure
    if failure.cause not in (Cause.RANK, Cause.LAUNCHER, Cause.STALL):
        return None
    stalled = failure.cause is Cause.STALL and failure.rank is None  # otherwise that rank holds the others up
    likely = stalled or _is_consequence(first)
    latest = first.at + causes.SETTLE if likely else first.at
    exits = [(one.at - exited.ago, exited) for one in reports for exited in one.report.exits]
    before = sorted((at, exited.node, exited.rank) for at, exited in exits if at <= latest)
    if not before:
        return None
    at, node, rank = before[0]
    return Exited(node, rank, round(min(max(first.at - at, 0.0), MAX_AGO), 1), len(before) - 1, likely)
