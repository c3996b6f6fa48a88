"""What the first node decides: the verdict of a job from the reports of its nodes, and whether a job that has
failed is started again, in place. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Optional

from agent.ranks import causes
from agent.ranks.causes import TimedFailure
from cloudddp.agent.protocol.frozen import frozen
from cloudddp.agent.protocol.gang import Report
from cloudddp.agent.protocol.jobs import MAX_AGO, Cause, Exited, Verdict
from cloudddp.agent.protocol.last_error import last_error
from cloudddp.agent.protocol.phases import JobPhase
from cloudddp.agent.protocol.progress import PREEMPTED_EXIT_CODE

CANCELLED = 130
HOUR = 3600.0
SAME = 3  # failures that are the same, at the same step: a further attempt would fail like them
# After others no further attempt can be made by the agents alone, or it would fail again.
RETRIED = (Cause.RANK, Cause.MEMORY, Cause.LAUNCHER, Cause.STALL, Cause.SNAPSHOT)
# The exceptions that only a change of the code or of the installation helps against, and what Python says of
# a script or module that it does not have.
USERS_OWN = ("SyntaxError", "IndentationError", "TabError", "ModuleNotFoundError", "ImportError", "NameError")
NO_SCRIPT = re.compile(r"\S*python[\d.]*: (?:No module named|can't open file|Error while finding module)")
USAGE = 2  # the exit code of argparse
SHOWS_USAGE = re.compile(r"\s*usage:", re.IGNORECASE)
# Times, process ids and addresses in a last line are others each time.
NUMBER = re.compile(r"0x[0-9a-f]+|[0-9]+")


@frozen
class TimedReport:
    """A report, and when it came, by this node's monotonic clock."""

    at: float
    report: Report


def verdict(node: int, reports: Mapping[int, TimedReport], losses: Iterable[TimedFailure]) -> Verdict:
    """Return this node's verdict, from the reports of the nodes that are left and the losses of others."""
    failures = [*losses]
    for one in reports.values():
        failures += [TimedFailure(one.at - failure.ago, failure) for failure in one.report.failures]
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


def _first(failures: Sequence[TimedFailure]) -> Optional[TimedFailure]:
    """Return what failed first. A rank that has lost another one may be recorded before that one."""
    if not failures:
        return None
    first = failures[0]
    soon = (failure for failure in failures if failure.at <= first.at + causes.SETTLE)
    return next((one for one in soon if not causes.is_consequence(one.observed)), first)


def _exited(first: TimedFailure, reports: Iterable[TimedReport]) -> Optional[Exited]:
    """Return the rank that had exited with 0 before the first failure, which may be the reason for it."""
    failure = first.observed.failure
    if failure.cause not in (Cause.RANK, Cause.LAUNCHER, Cause.STALL):
        return None
    stalled = failure.cause is Cause.STALL and failure.rank is None  # otherwise that rank holds the others up
    likely = stalled or causes.is_consequence(first.observed)
    latest = first.at + causes.SETTLE if likely else first.at
    exits = [(report.at - exited.ago, exited) for report in reports for exited in report.report.exits]
    before = sorted((at, exited.node, exited.rank) for at, exited in exits if at <= latest)
    if not before:
        return None
    at, node, rank = before[0]
    return Exited(node, rank, round(min(max(first.at - at, 0.0), MAX_AGO), 1), len(before) - 1, likely)


@frozen
class Budget:
    """The restarts that are left: `retries` in an hour. `stalls`: also of a job that has stalled."""

    retries: int
    stalls: bool = False
    times: tuple[float, ...] = ()  # of the restarts of the last hour, by the monotonic clock
    failures: tuple[tuple[object, ...], ...] = ()  # so far

    def spend(self, verdict: Verdict, step: Optional[int], now: float) -> tuple[Budget, Optional[str]]:
        """Return what is left, and why the job is not started again: '' if nobody asked; None if it is."""
        first = verdict.first
        if not self.retries:
            return self, ""
        if first is None:
            return self, "no rank has failed by itself"
        if first.cause not in RETRIED or (first.cause is Cause.STALL and not self.stalls):
            return self, ""
        found = last_error(verdict.last_lines, first.exit_code)
        is_usage = first.exit_code == USAGE and any(map(SHOWS_USAGE.match, found.lines))
        if found.kind in USERS_OWN or NO_SCRIPT.match(found.text) or is_usage:
            return self, "the script itself is wrong"
        # Without steps, a number may be how far it got. The rank that is the first may be another one each
        # time.
        error = found.text if step is None else NUMBER.sub("#", found.text)
        key = (first.cause, first.exit_code, first.signal, error, step)
        left = replace(self, failures=(*self.failures, key))
        if left.failures.count(key) >= SAME:
            where = f" at step {step}" if step is not None else ""
            return left, f"the same failure has occurred {SAME} times{where}"
        recent = tuple(time for time in self.times if now - time < HOUR)
        if len(recent) >= self.retries:
            return left, f"it has been started again {self.retries} times within an hour"
        return replace(left, times=(*recent, now)), None


def restart_note(number: int, verdict: Verdict) -> str:
    """Return what the logs say of a job that is started again, for the time `number`."""
    first = verdict.first
    why = "" if first is None or first.rank is None else f": rank {first.rank} on node {first.node} failed"
    return f"restart {number}{why}"
