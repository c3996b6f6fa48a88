"""The verdict of a job from the reports of its nodes. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from cloudddp.agent.protocol.gang import Observed, Report
from cloudddp.agent.protocol.phases import JobPhase
from cloudddp.agent.protocol.training import PREEMPTED_EXIT_CODE
from cloudddp.agent.protocol.verdict import Verdict

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
    first = failures[0] if failures else None
    if cancels and (first is None or min(cancels) <= first.at):
        return Verdict(JobPhase.CANCELLED, CANCELLED, node)
    if first is not None:
        failure = first.observed.failure
        return Verdict(JobPhase.FAILED, failure.exit_code or 1, node, failure, first.observed.last_lines)
    if all(one.report.succeeded for one in reports.values()):
        return Verdict(JobPhase.SUCCEEDED, 0, node)
    codes = [one.report.exit_code for one in reports.values() if one.report.exit_code]
    code = PREEMPTED_EXIT_CODE if PREEMPTED_EXIT_CODE in codes else next(iter(codes), 1)
    return Verdict(JobPhase.FAILED, code, node)
