"""`extend`: move the deadline of the cluster."""

from __future__ import annotations

import re
from datetime import UTC, datetime, time, timedelta

from cloudddp import signals
from cloudddp.aws import reservations
from cloudddp.cli import session as sessions
from cloudddp.cli.console import Console
from cloudddp.cli.session import Session
from cloudddp.cli.views.clusters import amount
from cloudddp.cluster import extend as extending
from cloudddp.cluster.extend import Limits
from cloudddp.cluster.model import Cluster
from cloudddp.cluster.preconditions import latest_reservation_end
from cloudddp.config.command_line import GlobalOptions
from cloudddp.errors import Command, NodeError, UsageError
from cloudddp.formats import counted, dollars, duration, moment
from cloudddp.local_state import ClusterFolder
from cloudddp.operations.node_connections import connected
from cloudddp.ssh.fleet import Outcome
from cloudddp.tags import iso
from cloudddp.text import node_list

_TIME = re.compile(r"\d{1,2}:\d{2}(:\d{2})?")
_NEXT = timedelta(hours=12)  # a time of day that has passed means tomorrow's if that is not further away
Timers = Outcome[datetime | None]


def extend(
    console: Console,
    options: GlobalOptions,
    *,
    hours: float | None,
    until: str | None,
    max_cost: float | None,
    anyone: bool,
    yes: bool,
) -> None:
    if sum(one is not None for one in (hours, until, max_cost)) != 1:
        raise UsageError(
            "give one new deadline",
            hint="--hours H (more), --until TIME, or --max-cost USD (of the whole cluster)",
        )
    moment_given = None if until is None else parse_until(until, datetime.now().astimezone())
    session = sessions.start(console, options, anyone=anyone)
    with connected(session, partly=True, needed=()) as (cluster, runner):
        before = extending.timers(runner)
        if not before.values:
            before.all()
        for error in before.errors.values():
            console.warn(str(error))
        runner.leave_out(before.errors)
        limits = _limits(session, cluster, before)
        new = extending.new_deadline(limits, hours=hours, until=moment_given, usd=max_cost)
        console.print_text(_plan(cluster, limits, new), err=True)
        console.must_confirm("Move the deadline?", yes=yes)
        with (
            ClusterFolder(cluster.id).exclusive(lambda: console.log("waiting for another cloudddp command")),
            signals.protected(lambda: console.log("still moving the deadline; this takes a moment")),
        ):
            after = extending.move(session.aws(), cluster, runner, new)
    other = {
        node: f"node {node} ({cluster.nodes[node].id}) {_other_end(cluster, before, after, node)}"
        for node in cluster.nodes
        if after.values.get(node) != new
    }
    if moved := [node for node in cluster.nodes if node not in other]:
        which = f"{node_list(moved)} of " if other else ""
        console.print(f"{which}cluster {cluster.name}: the deadline is now {moment(new)}")
    if other:
        raise NodeError(
            "; ".join(other.values()), hint=("when it answers: ", Command("extend", "--until", iso(new)))
        )


def _other_end(cluster: Cluster, before: Timers, after: Timers, node: int) -> str:
    """Return what is known of a node that has not confirmed the new deadline."""
    old = before.values.get(node) or cluster.nodes[node].tags.expires
    shown = moment(old) if old else "its old deadline"
    if node in after.values:
        ends = after.values[node]
        return f"ends at {moment(ends)}" if ends else "has no deadline any more"
    if node in after.errors:
        return f"may still end at {shown}: {after.errors[node]}"
    return f"was not reached and still ends at {shown}"


def parse_until(text: str, now: datetime) -> datetime:
    """Return the moment that a user means by `18:00` or by ISO 8601, local time unless it has a zone. `now`:
    with the local zone. Raises UsageError."""
    hint = "for example 18:00, 2026-12-01T08:00 or 2026-12-01T08:00Z"
    try:
        if not _TIME.fullmatch(text):
            return datetime.fromisoformat(text).astimezone()
        wall = time.fromisoformat(text.rjust(5, "0"))
    except (ValueError, OverflowError, OSError):
        raise UsageError(f"--until: {text!r} is not a time", hint=hint) from None
    days = [datetime.combine(now.date() + timedelta(days=day), wall).astimezone() for day in (0, 1)]
    if days[0] > now:
        return days[0]
    if days[1] - now > _NEXT:
        raise UsageError(
            f"--until: {text} has passed today", hint=f"for tomorrow: --until {days[1]:%Y-%m-%dT%H:%M}"
        )
    return days[1]


def _limits(session: Session, cluster: Cluster, timers: Timers) -> Limits:
    spec, now, latest = session.settings.cluster, datetime.now(UTC), None
    silent = cluster.nodes.keys() - timers.values.keys()
    known = [*timers.values.values(), *(cluster.nodes[node].tags.expires for node in silent)]
    present = min((one for one in known if one is not None), default=cluster.expires)
    if spec.reservation is not None:
        latest = latest_reservation_end(reservations.find(session.aws(), spec.reservation))
    so_far = cluster.cost(now).usd
    return Limits(now, present, cluster.created, so_far, cluster.hour, spec.max_cost, latest)


def _plan(cluster: Cluster, limits: Limits, new: datetime) -> str:
    present, total, more = limits.present, limits.cost(new), ""
    old = moment(present) if present else "unknown"
    seconds = (new - (present or limits.now)).total_seconds()
    apart = f"{duration(abs(seconds))} {'later' if seconds >= 0 else 'earlier'}"
    if cluster.hour is not None and seconds > 0:
        more = f"at most {dollars(cluster.hour * seconds / 3600)} more; "
    idle = f"\n  idle      nodes that are not used end after {cluster.idle_minutes:g} min, as before"
    return (
        f"cluster {cluster.name} ({cluster.id}): {counted(len(cluster.live), 'node')}, "
        f"{amount(cluster.cost())} so far\n"
        f"  deadline  {old} -> {moment(new)}, {apart}\n"
        f"  cost      {more}{'unknown' if total is None else f'at most {dollars(total)} in all'}"
        + (idle if cluster.idle_minutes else "")
    )
