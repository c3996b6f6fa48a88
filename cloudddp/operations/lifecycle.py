"""Creating a cluster, and removing one of the caller: what AWS lists and what this computer has recorded."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator, Sequence
from datetime import UTC, datetime, timedelta

from cloudddp import local_state, signals
from cloudddp.aws import inventory
from cloudddp.aws.client import AWS
from cloudddp.aws.instance_types import TypeInfo
from cloudddp.cluster import created_ids, teardown
from cloudddp.cluster import up as creating
from cloudddp.cluster.created_ids import Known
from cloudddp.cluster.extend import ROUNDING, Limits
from cloudddp.cluster.model import Cluster
from cloudddp.cluster.plan import Plan
from cloudddp.cluster.teardown import DownReport
from cloudddp.cluster.up import UpResult
from cloudddp.errors import CloudDDPError
from cloudddp.formats import dollars
from cloudddp.job import ranks
from cloudddp.local_state import ClusterRecord
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
    `on_others` as of `cluster.up`. Raises UsageError before, where a node would run more ranks than a type
    has GPUs.
    """
    spec, clouds = session.settings.cluster, session.clouds()
    with session.console.progress() as progress:

        def confirm(plans: Sequence[Plan], info: TypeInfo) -> None:
            progress.stop()
            for one in plans:
                ranks.nproc(session.settings.job, [one.context.info.gpus] * spec.nodes)
            agree(plans, info, clouds[0])

        return creating.up(
            clouds,
            spec,
            progress=progress,
            confirm=confirm,
            on_ready=on_ready,
            looked_in=session.looked_in(clouds),
            project=session.root.name,
            on_others=on_others,
        )


def require_limits(session: Session[Reporter], existing: Cluster, given: Collection[str]) -> None:
    """Raise CloudDDPError if a cluster that exists may run for longer or cost more than the limits that were
    `given`."""
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


def take_down(session: Session[Reporter], cluster_id: str | None = None) -> DownReport:
    """Remove the cluster, or the one with this id of several with its name. Raises Leftovers if that
    fails."""
    aws = session.aws(finishing=True)
    with session.console.progress() as progress, signals.protected(lambda: progress(teardown.STILL_REMOVING)):
        if cluster_id:
            report = teardown.down(aws, inventory.with_id(cluster_id), progress=progress)
        else:
            where = inventory.named(session.settings.cluster.name)
            report = teardown.down(
                aws,
                where,
                progress=progress,
                mine=session.ownership(aws).mine,
                known=created_ids.combined(_own_journals(aws, session.settings.cluster.name)),
            )
    if report.left or report.reasons:
        raise teardown.leftovers(report)
    if not cluster_id:  # what AWS does not list any more, or never did
        teardown.forget(aws, {one.id for one in _records(aws, session.settings.cluster.name)})
    return report


def _records(aws: AWS, name: str) -> list[ClusterRecord]:
    """Return what this computer has created under that name in the region."""
    where = (name, aws.region, aws.endpoint)
    return [one for one in local_state.known_clusters() if (one.name, one.region, one.endpoint) == where]


def _own_journals(aws: AWS, name: str) -> Iterator[Known]:
    """Yield what this computer knows about clusters of that name, unless an `up` is creating them."""
    for record in _records(aws, name):
        with contextlib.suppress(OSError, CloudDDPError):  # an unreadable journal counts as empty
            folder = local_state.ClusterFolder(record.id)
            if not folder.is_being_created():
                yield created_ids.from_journal(folder)
