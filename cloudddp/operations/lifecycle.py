"""Creating a cluster, and the limits of one that exists."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from datetime import UTC, datetime, timedelta

from cloudddp.aws.client import AWS
from cloudddp.aws.instance_types import TypeInfo
from cloudddp.cluster import up as creating
from cloudddp.cluster.extend import ROUNDING, Limits
from cloudddp.cluster.model import Cluster
from cloudddp.cluster.plan import Plan
from cloudddp.cluster.up import Callbacks, UpResult
from cloudddp.errors import CloudDDPError
from cloudddp.formats import dollars
from cloudddp.job import ranks
from cloudddp.operations.reporter import Reporter
from cloudddp.operations.session import Session


def bring_up(
    session: Session[Reporter],
    agree: Callable[[Sequence[Plan], TypeInfo, AWS], None],
    *,
    on_ready: Callable[[Cluster], None] = lambda _: None,
    on_others: Callable[[Sequence[Cluster]], None] = lambda _: None,
) -> UpResult:
    """Create the cluster, or return the one that exists.

    `agree` is called with the plans before anything is created, and raises to refuse them; `on_ready` and
    `on_others` as in `Callbacks`. Raises UsageError before, where a node would run more ranks than a type
    has GPUs.
    """
    spec, clouds = session.settings.cluster, session.account.clouds()
    with session.console.progress() as progress:

        def confirm(plans: Sequence[Plan], info: TypeInfo) -> None:
            progress.stop()
            for plan in plans:
                ranks.nproc(session.settings.job, [plan.context.info.gpus] * spec.nodes)
            agree(plans, info, clouds[0])

        return creating.up(
            clouds,
            spec,
            Callbacks(progress, confirm, on_others, on_ready),
            searched_regions=session.account.searched_regions(clouds),
            project=session.root.name,
        )


def require_limits(session: Session[Reporter], existing: Cluster, given: Collection[str]) -> None:
    """Raise CloudDDPError if a cluster may run for longer or cost more than the limits that were `given`."""
    spec, now = session.settings.cluster, datetime.now(UTC)
    ends, beyond = existing.expires, []
    if "max_hours" in given and (ends is None or ends > now + timedelta(hours=spec.max_hours)):
        verb = "is" if existing.overdue else "runs for another"
        beyond.append(f"{verb} {existing.time_left}, more than --max-hours {spec.max_hours:g}")
    if "max_cost" in given and spec.max_cost is not None:
        usd = Limits(now, now, now, existing.cost(now).usd, existing.hour).cost(ends) if ends else None
        if usd is None or usd > ROUNDING * spec.max_cost:
            beyond.append(
                f"may cost {dollars(usd)} until its deadline, more than --max-cost {spec.max_cost:g}"
            )
    if beyond:
        raise CloudDDPError(
            f"cluster {existing.name!r} was created before and {' and '.join(beyond)}. Nothing was changed",
            hint="leave that option out, or move the deadline: `cloudddp extend --until TIME`",
        )
    if "max_hours" in given:
        session.console.suggest(
            f"cluster {existing.name!r} was created before, and ends in {existing.time_left}: `cloudddp "
            "extend --hours H` moves its deadline"
        )
