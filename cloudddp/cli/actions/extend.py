"""`extend`: move the deadline of the cluster."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from datetime import UTC, datetime

from cloudddp import signals
from cloudddp.aws import reservations
from cloudddp.cli.console import Console
from cloudddp.cli.session import Session, start_session
from cloudddp.cli.views.clusters import amount
from cloudddp.cluster import extend as extending
from cloudddp.cluster.extend import LONGEST, Limits
from cloudddp.cluster.model import Cluster
from cloudddp.cluster.preconditions import latest_reservation_end
from cloudddp.cluster.prices import Cost
from cloudddp.errors import NodeError, UsageError, q
from cloudddp.formats import duration, format_time, plural
from cloudddp.local_state import ClusterFolder
from cloudddp.operations.node_connections import reachable
from cloudddp.tags import iso
from cloudddp.text import node_list


def extend(console: Console, *, hours: float | None, until: str | None, max_cost: float | None) -> None:
    if [hours, until, max_cost].count(None) != 2:
        hint = "--hours H (more), --until TIME, or --max-cost USD (of the whole cluster)"
        raise UsageError("give one new deadline", hint=hint)
    time = None if until is None else parse_until(until, datetime.now())
    session = start_session(console)
    with reachable(session, required=()) as (cluster, runner):
        before = extending.timers(runner).values
        limits = _limits(session, cluster, before.values())
        new = extending.new_deadline(limits, hours=hours, until=time, usd=max_cost)
        apart = (new - limits.current).total_seconds()
        console.print_text(
            f"cluster {cluster.name} ({cluster.id}): {plural(len(cluster.live), 'node')}, "
            f"{amount(cluster.cost())} so far\n"
            f"  deadline  {format_time(limits.current)} -> {format_time(new)}, {duration(abs(apart))} "
            f"{'later' if apart >= 0 else 'earlier'}\n"
            f"  cost      {amount(Cost(limits.cost(new), at_most=True))} in all",
            err=True,
        )
        console.must_confirm("Move the deadline?")
        with (
            ClusterFolder(cluster.id).exclusive(lambda: console.log("waiting for another cloudddp command")),
            signals.protected(lambda: console.log("still moving the deadline; this takes a moment")),
        ):
            after = extending.move(session.account.aws(), cluster, runner, new, before)
    for error in after.errors.values():
        console.warn(str(error))
    if missed := [node for node in cluster.nodes if after.values.get(node) != new]:
        raise NodeError(
            f"the new deadline, {format_time(new)}, is not confirmed by {node_list(missed)}, which may still "
            f"have the previous one, {format_time(limits.current)}",
            hint=f"when it answers: `cloudddp extend --until {q(iso(new))}`",
        )
    console.print(f"cluster {cluster.name}: the deadline is now {format_time(new)}")


def parse_until(text: str, now: datetime) -> datetime:
    """Return the moment that a user means by ISO 8601, or by 18:00 of today; local time unless it has a zone.
    `now`: in local time. Raises UsageError."""
    for candidate in (text, f"{now:%Y-%m-%d}T{text}"):
        with contextlib.suppress(ValueError, OverflowError, OSError):
            return datetime.fromisoformat(candidate).astimezone(UTC)
    hint = "for example 18:00, 2026-12-01T08:00 or 2026-12-01T08:00Z"
    raise UsageError(f"--until: {text!r} is not a time", hint=hint)


def _limits(session: Session, cluster: Cluster, timers: Iterable[datetime | None]) -> Limits:
    spec, now = session.settings.cluster, datetime.now(UTC)
    last = (cluster.created or now) + LONGEST
    if spec.reservation is not None:
        last = min(
            last, latest_reservation_end(reservations.find(session.account.aws(), spec.reservation)) or last
        )
    known = [*timers, *(node.tags.expires for node in cluster.nodes.values())]
    current = min((one for one in known if one is not None), default=now)
    return Limits(now, current, last, cluster.cost(now).usd, cluster.hour, spec.max_cost)
