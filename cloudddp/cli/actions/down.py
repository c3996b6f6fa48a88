"""`down`: remove the cluster, and report what may remain."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from datetime import UTC, datetime

from cloudddp import local_state, signals
from cloudddp.aws import inventory, removal
from cloudddp.aws.client import AWS
from cloudddp.cli import session as sessions
from cloudddp.cli.actions import rehearsal
from cloudddp.cli.actions.at_stake import at_stake
from cloudddp.cli.console import Console
from cloudddp.cli.formats import dollars
from cloudddp.cli.session import Session
from cloudddp.cli.views import clusters as views
from cloudddp.cli.views import lifecycle
from cloudddp.cluster import inspect, known, name_lock, teardown
from cloudddp.cluster.known import Known
from cloudddp.cluster.ownership import Ownership
from cloudddp.cluster.teardown import DownReport
from cloudddp.config.options import GlobalOptions
from cloudddp.errors import CloudDDPError, Command, CredentialsError, Leftovers, renewal_first


def down(console: Console, options: GlobalOptions, *, anyone: bool, dry_run: bool, yes: bool) -> None:
    session = sessions.start(console, options, anyone=anyone, dry_run=dry_run)
    if dry_run:
        rehearsal.down(console, session.settings)
        return
    name, aws = session.settings.cluster.name, session.aws(finishing=True)
    ownership = session.ownership(aws)
    try:
        found = inspect.find(aws, name)
    except CredentialsError as error:
        raise _without_credentials(aws, name, error) from None
    live = [c for c in found if any(map(ownership.mine, c.live))]
    for warning in (text for c in live for text in c.warnings):
        console.warn(warning)
    if live:
        console.print("\n".join(lifecycle.summary(c) for c in live), err=True)
        for line in (line for c in live for line in at_stake(c, session.settings)):
            console.log("  warning: ", *line)
        console.must_confirm("Terminate these nodes?", yes=yes)
    report = take_down(session)
    others = lifecycle.not_removed(report)
    if report.nothing and others:
        listed = "".join(f"\n  {text}" for text in others)
        raise CloudDDPError(
            f"cluster {name!r} is not yours; {ownership.caller}. Nothing was removed:{listed}",
            hint=("to remove it anyway: ", Command("down", "--anyone")),
        )
    elsewhere = _created_elsewhere(aws, name)
    console.print(lifecycle.down(report, name, simulated=options.sim, region=aws.region if elsewhere else ""))
    for text in others:
        console.log(f"not removed, because it is not yours: {text} (--anyone removes it)")
    if report.nothing:
        _release_name(console, aws, name, ownership)
        _report_other_clusters(console, aws, name)
    for region in elsewhere:
        console.log(
            f"a cluster {name!r} was also created in {region} from this computer, and may still be up there: ",
            Command("down", "--region", region),
            " removes it",
        )


def _created_elsewhere(aws: AWS, name: str) -> list[str]:
    """Return the other regions in which this computer has created a cluster of that name that is not known to be gone."""
    records = [
        one for one in local_state.known_clusters() if (one.name, one.endpoint) == (name, aws.endpoint)
    ]
    return sorted({record.region for record in records} - {aws.region})


def take_down(session: Session, cluster_id: str | None = None) -> DownReport:
    """Remove the cluster, or the one with this id of several with its name. Raises Leftovers if that fails."""
    aws = session.aws(finishing=True)
    with session.console.progress() as progress, signals.protected(lambda: progress(teardown.STILL_REMOVING)):
        if cluster_id:
            report = teardown.down(aws, inventory.with_id(cluster_id), progress=progress)
        else:
            where = inventory.named(session.settings.cluster.name)
            report = teardown.down(
                aws, where, progress=progress, mine=session.ownership(aws).mine,
                known=known.combined(_own_journals(aws, session.settings.cluster.name)),
            )  # fmt: skip
    if report.left or report.reasons:
        raise teardown.leftovers(report)
    return report


def _own_journals(aws: AWS, name: str) -> Iterator[Known]:
    """Yield what this computer knows about clusters of that name, unless an `up` is creating them."""
    for record in local_state.known_clusters():
        if (record.name, record.region, record.endpoint) != (name, aws.region, aws.endpoint):
            continue
        with contextlib.suppress(OSError, CloudDDPError):  # an unreadable journal counts as empty
            folder = local_state.ClusterFolder(record.id)
            if not folder.is_being_created():
                yield known.from_journal(folder)


def _without_credentials(aws: AWS, name: str, error: CredentialsError) -> CloudDDPError:
    """Return the error of a teardown without credentials, with what this computer knows about the cluster."""
    now = f"{datetime.now(UTC):%Y-%m-%dT%H:%M:%SZ}"
    lines = []
    for record in local_state.known_clusters():
        if (record.name, record.region, record.endpoint) != (name, aws.region, aws.endpoint):
            continue
        if record.expires > now:
            ids: Iterable[str] = ()
            with contextlib.suppress(OSError, CloudDDPError):  # an unreadable journal counts as empty
                ids = local_state.ClusterFolder(record.id).created_instances()
            nodes = ", ".join(sorted(ids)) or "nodes unknown"
            lines.append(f"\n  cluster {record.name} ({record.id}): {nodes}, until {record.expires}")
    if not lines:
        return error
    return Leftovers(
        f"{error.message}. Nothing was removed, and this may still be running:{''.join(lines)}",
        hint=renewal_first(error, Command("down")),
    )


def _release_name(console: Console, aws: AWS, name: str, ownership: Ownership) -> None:
    """Delete a key pair that reserves the name without being tagged as part of the cluster.

    Raises CloudDDPError if it belongs to another user: `up` would refuse the name, so "does not exist" would be
    misleading.
    """
    holder = name_lock.holder(aws, name)
    if holder is None:
        return
    if not ownership.mine(holder.key):
        owner = holder.key.tags.owner or views.UNKNOWN_OWNER
        raise CloudDDPError(
            f"the name {name!r} is reserved by key pair {holder.key.id} of {owner}",
            hint=(Command("down", "--anyone"), " deletes it; or choose another name with -c"),
        )
    if (error := removal.delete(aws, holder.key)) is not None:
        raise error
    console.print(f"cluster {name}: deleted key pair {holder.key.id}, which reserved the name")


def _report_other_clusters(console: Console, aws: AWS, name: str) -> None:
    """Report where the cluster may be, since it is not here. Raises CloudDDPError if it is probably elsewhere."""
    for other in inspect.find(aws):
        if other.live:
            price = dollars(views.hourly(other))
            console.log(
                f"another cluster is up in this region: {other.name}, {price} an hour (-c {other.name})"
            )
    now = f"{datetime.now(UTC):%Y-%m-%dT%H:%M:%SZ}"
    for record in local_state.known_clusters():
        elsewhere = record.region != aws.region and record.endpoint == aws.endpoint
        if record.name == name and elsewhere and record.expires > now:
            raise CloudDDPError(
                f"cluster {name!r} was created in {record.region} from this computer, and may still be up there",
                hint=Command("down", "--region", record.region),
            )
