"""The verbs on clusters: up, down, status, ls, allow-me."""

from __future__ import annotations

import signal
from collections.abc import Callable
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import click

from cloudddp.cli.at_stake import at_stake
from cloudddp.cli.common import (
    Session,
    anyone_option,
    dry_run_option,
    json_option,
    must_confirm,
    setting,
    verb,
    warn,
    yes_option,
)
from cloudddp.cli.say import Progress, counted, dollars, duration, note, print_json, table

if TYPE_CHECKING:
    from cloudddp.aws.client import AWS
    from cloudddp.aws.discover import TypeInfo
    from cloudddp.bill import Bill
    from cloudddp.cluster import Cluster
    from cloudddp.owners import Ownership
    from cloudddp.plan import Plan
    from cloudddp.spec import Config
    from cloudddp.teardown import Down
    from cloudddp.up import Up


def cluster_settings(function: Any) -> Any:
    """The flags that shape a cluster, for `up` and `run`."""
    for decorate in reversed(
        [
            setting("cluster", "nodes", "-n", "--nodes", metavar="N"),
            setting("cluster", "instance_type", "-t", "--instance-type", metavar="TYPE"),
            setting("cluster", "spot", "--spot", is_flag=True),
            setting("cluster", "max_hours", "--max-hours", metavar="HOURS"),
            setting("cluster", "max_cost", "--max-cost", metavar="USD"),
            setting("cluster", "price", "--price", metavar="USD"),
            setting("cluster", "allow_cpu", "--allow-cpu", is_flag=True),
            setting("cluster", "zone", "--zone", metavar="ZONE"),
            setting("cluster", "vpc", "--vpc", metavar="ID"),
            setting("cluster", "subnet", "--subnet", metavar="ID"),
            setting("cluster", "image", "--image", metavar="IMAGE"),
            setting("cluster", "disk_gb", "--disk-gb", metavar="GIB"),
            setting("cluster", "ssh_from", "--ssh-from", metavar="CIDR"),
        ]
    ):
        function = decorate(function)
    return function


@verb("up")
@cluster_settings
@dry_run_option
@yes_option
def up(session: Session, dry_run: bool, yes: bool) -> None:
    """Make the cluster: nodes that are ready to train, with a deadline of their own.

    Safe to repeat. Whatever goes wrong, Ctrl-C included, nothing is left running.

    \b
    Example:
      cloudddp up -n 2 -t g5.xlarge --max-hours 4 --max-cost 10
    """
    from cloudddp.errors import Interrupted

    settings = session.settings(rehearsed=dry_run)
    if dry_run:
        from cloudddp.cli import rehearsal

        rehearsal.up(settings)
        return
    try:
        made = bring_up(session, settings, yes=yes)
    except KeyboardInterrupt:  # while things are being made it is an Interrupted, with everything undone
        raise Interrupted(
            "interrupted before anything was made, or when all was ready", hint="cloudddp status tells which"
        ) from None
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # too late to change anything: the cluster is up
    click.echo(describe_up(made))
    note("next: cloudddp launch SCRIPT   (cloudddp down ends the bill)")


def bring_up(
    session: Session, settings: Config, *, yes: bool, check: Callable[[TypeInfo], None] = lambda _: None
) -> Up:
    """Make the cluster, asking first; for `up` and `run`. `check` may refuse what the instance type cannot do."""
    from cloudddp import up as making

    with Progress() as say:

        def agree(plan: Plan, info: TypeInfo) -> None:
            say.stop()
            check(info)
            click.echo(describe_plan(plan, info, settings), err=True)
            must_confirm("Start these nodes?", yes=yes, session=session)

        return making.up(session.aws(settings), settings.cluster, say=say, agree=agree)


def describe_plan(plan: Plan, info: TypeInfo, settings: Config) -> str:
    """Return what is about to be made, where, until when, and what it costs."""
    spec = settings.cluster
    gpus = f"{info.gpus} x {info.gpu_name}" if info.gpus else "no GPU"
    kind = "spot, at most " if spec.spot else ""
    return (
        f"cluster {spec.name}: {spec.nodes} x {spec.instance_type} ({gpus} each)\n"
        f"  price     {kind}{dollars(plan.price.hour)} an hour: {dollars(plan.price.node_hour)} a node ({plan.price.source}), "
        f"{dollars(plan.price.extras_hour)} for disks and addresses\n"
        f"  deadline  {plan.expires:%Y-%m-%d %H:%M} UTC, in {duration(plan.hours * 3600)}: the nodes end themselves\n"
        f"  at most   {dollars(plan.cost)} until then, traffic not counted"
        + (
            f"\n  network   one of the type's {info.cards} network cards, without EFA: slow between nodes"
            if info.cards > 1 and spec.nodes > 1
            else ""
        )
    )


def describe_up(made: Up) -> str:
    cluster = made.cluster
    head = (
        f"cluster {cluster.name} is ready"
        if made.plan
        else f"cluster {cluster.name} was up already, made by {cluster.owner or '-'} {_at(cluster.created)}; nothing was changed"
    )
    return f"{head}; its nodes end themselves in {_left(cluster)}\n{nodes_table(cluster)}"


def nodes_table(cluster: Cluster) -> str:
    rows = [
        (str(rank), node.id, node.state, node.type, node.zone, node.private_ip, node.public_ip or "-")
        for rank, node in enumerate(cluster.nodes)
    ]
    rows += [("-", node.id, node.state, node.type, node.zone, "-", "-") for node in cluster.gone]
    header = ("NODE", "INSTANCE", "STATE", "TYPE", "ZONE", "PRIVATE", "PUBLIC")
    return table(header, rows, spare=("ZONE", "TYPE", "PRIVATE"))


@verb("down")
@anyone_option
@dry_run_option
@yes_option
def down(session: Session, dry_run: bool, yes: bool) -> None:
    """Remove the cluster, all of it, and check that nothing is left.

    Works from any computer with the account, by tag, on what you made (or with --anyone, on what anybody made). Exits
    3, listing it, if anything is left. Safe to repeat.
    """
    settings = session.settings(rehearsed=dry_run)
    if dry_run:
        from cloudddp.cli import rehearsal

        rehearsal.down(settings)
        return
    from cloudddp import cluster

    aws = session.aws(settings)
    whose = session.ownership(aws)
    live = [c for c in cluster.find(aws, settings.cluster.name) if any(map(whose.mine, c.nodes))]
    warn(text for c in live for text in c.warnings)
    if live:
        click.echo("\n".join(_about(c) for c in live), err=True)
        for line in (line for c in live for line in at_stake(c, settings)):
            note(f"  warning: {line}")
        must_confirm("End these nodes?", yes=yes, session=session)
    report = take_down(session, settings)
    if report.nothing and report.others:
        raise _others_only(report, settings.cluster.name, whose)
    click.echo(describe_down(report, settings.cluster.name, simulated=session.sim))
    for text in _others(report):
        note(f"not removed, since it is not yours: {text} (--anyone removes it)")
    if report.nothing:
        _release_name(aws, settings, whose)
        _say_what_else(aws, settings)


def _about(found: Cluster) -> str:
    age = duration((datetime.now(UTC) - found.created).total_seconds()) if found.created else "unknown time"
    known = found.id or f"without an id: {', '.join(node.id for node in found.nodes)}"
    return f"cluster {found.name} ({known}): {counted(len(found.nodes), 'node')}, made {age} ago by {found.owner or '-'}"


def _others(report: Down) -> list[str]:
    """Return what `down` did not remove, one line for each owner and cluster."""
    found: dict[str, list[str]] = {}
    for one in report.others:
        made = f", made {_at(one.tags.created)}" if one.tags.created else ""
        whose = f"{one.cluster_id or 'no id'} of {one.tags.owner or 'an unknown owner'}{made}"
        found.setdefault(whose, []).append(one.id)
    return [f"cluster {whose}: {', '.join(ids)}" for whose, ids in found.items()]


def _others_only(report: Down, name: str, whose: Ownership) -> Exception:
    from cloudddp.errors import CloudDDPError

    listed = "".join(f"\n  {text}" for text in _others(report))
    return CloudDDPError(
        f"cluster {name!r} is not yours; {whose.caller}. Nothing was removed:{listed}",
        hint="to remove it anyway: cloudddp down --anyone",
    )


def _at(moment: datetime | None) -> str:
    return f"on {moment:%Y-%m-%d at %H:%M} UTC" if moment else "at an unknown time"


def _release_name(aws: AWS, settings: Config, whose: Ownership) -> None:
    """Delete a key pair that reserves the name although no tag says that it is this cluster's. Raises where it is not
    the caller's: `up` of this name would be refused, so "nothing there" would be only half of the truth."""
    from cloudddp import reservation
    from cloudddp.aws import inventory
    from cloudddp.errors import CloudDDPError

    name = settings.cluster.name
    held_by = reservation.holder(aws, name)
    if held_by is None:
        return
    if not whose.mine(held_by.key):
        raise CloudDDPError(
            f"the name {name!r} is reserved by key pair {held_by.key.id} of {held_by.key.tags.owner or 'an unknown owner'}",
            hint="cloudddp down --anyone deletes it; or another name with -c",
        )
    if (error := inventory.delete(aws, held_by.key)) is not None:
        raise error
    click.echo(f"cluster {name}: key pair {held_by.key.id}, which reserved the name, was deleted")


def _say_what_else(aws: AWS, settings: Config) -> None:
    """There was nothing of that name here: say where it may be instead. Raises where it surely is elsewhere."""
    from cloudddp import cluster, state
    from cloudddp.errors import CloudDDPError

    for other in cluster.find(aws):
        if other.nodes:
            note(
                f"another cluster is up here: {other.name}, {dollars(_hour(other))} an hour (-c {other.name})"
            )
    now = f"{datetime.now(UTC):%Y-%m-%dT%H:%M:%SZ}"
    for record in state.remembered():
        elsewhere = record.region != aws.region and record.endpoint == aws.endpoint
        if record.name == settings.cluster.name and elsewhere and record.expires > now:
            raise CloudDDPError(
                f"cluster {record.name!r} was made in {record.region} from this computer, and may still be up there",
                hint=f"cloudddp down --region {record.region}",
            )


def take_down(session: Session, settings: Config, cluster_id: str | None = None) -> Down:
    """Remove the cluster, or that one of several with its name; raise Leftovers where that did not succeed."""
    from cloudddp import teardown
    from cloudddp.aws import inventory

    aws = session.aws(settings)
    with Progress() as say, teardown.undisturbed(say):
        if cluster_id:
            report = teardown.down(aws, inventory.with_id(cluster_id), say=say)
        else:
            where, whose = inventory.named(settings.cluster.name), session.ownership(aws)
            report = teardown.down(aws, where, say=say, mine=whose.mine)
    if report.left or report.reasons:
        raise teardown.leftovers(report)
    return report


def describe_down(report: Down, name: str, *, simulated: bool) -> str:
    if report.nothing:
        return f"cluster {name}: nothing there, nothing to do"
    kinds = [thing.kind for thing in report.deleted]
    parts = [f"{counted(len(report.terminated), 'node')} ended"] if report.terminated else []
    parts += [f"{counted(kinds.count(kind), kind)} deleted" for kind in dict.fromkeys(kinds)]
    lines = [f"cluster {name}: {', '.join(parts)}; nothing is left"]
    if report.terminated:
        what = "this would have cost" if simulated else "this cost about"
        lines.append(
            f"{what} {amount(report.cost)} on AWS, on demand (seconds are billed, at least 60 a node)"
        )
    return "\n".join(lines)


@verb("status")
@json_option
def status(session: Session, as_json: bool) -> None:
    """Show the cluster's nodes, deadline and cost so far. Exits 1 where there is none. One AWS call."""
    from cloudddp import cluster
    from cloudddp.errors import CloudDDPError

    settings = session.settings()
    aws = session.aws(settings)
    found = cluster.find(aws, settings.cluster.name)
    live, whose = [c for c in found if c.nodes], session.ownership(aws)
    warn(text for c in live for text in c.warnings)
    if as_json:
        print_json([cluster_json(c, whose) for c in live])
    elif live:
        click.echo("\n\n".join(describe_cluster(c, whose) for c in live))
    if not live:
        last = max((c for c in found if c.ended), key=lambda c: (c.ended, c.id), default=None)
        before = f"; the last one, {last.id}, ended {_at(last.ended)}" if last else ""
        raise CloudDDPError(
            f"there is no cluster {settings.cluster.name!r} in {aws.region}{before}",
            hint="make one: cloudddp up; `cloudddp ls` shows all",
        )


@verb("ls")
@json_option
def ls(session: Session, as_json: bool) -> None:
    """List every cloudddp cluster in the region, whoever made it."""
    from cloudddp import cluster

    settings = session.settings()
    aws = session.aws(settings)
    found = [c for c in cluster.find(aws) if c.nodes]
    warn(text for c in found for text in c.warnings)
    if as_json:
        whose = session.ownership(aws)
        print_json([cluster_json(c, whose) for c in found])
        return
    if not found:
        note("no clusters")
        return
    rows = [
        (c.name, c.id or "-", str(len(c.nodes)), c.type, _left(c), amount(c.cost()), c.owner or "-")
        for c in found
    ]
    header = ("CLUSTER", "ID", "NODES", "TYPE", "ENDS IN", "SO FAR", "OWNER")
    click.echo(table(header, rows, elastic=("OWNER",), spare=("ID",)))


def _hour(cluster: Cluster) -> float | None:
    return None if cluster.node_hour is None else cluster.node_hour * len(cluster.nodes)


def _left(cluster: Cluster) -> str:
    if cluster.expires is None:
        return "no deadline"
    return duration((cluster.expires - datetime.now(UTC)).total_seconds())


def amount(bill: Bill) -> str:
    """Return a sum, marked where it is an upper bound: AWS does not always say when a node ended."""
    return f"{'at most ' if bill.at_most and bill.usd is not None else ''}{dollars(bill.usd)}"


def describe_cluster(cluster: Cluster, whose: Ownership) -> str:
    hour = _hour(cluster)
    price = "price unknown" if hour is None else f"{dollars(hour)} an hour"
    head = f"cluster {cluster.name} ({cluster.id or 'no id'}) in {cluster.region}, made by {cluster.owner or '-'}"
    if not whose.all_mine(cluster.nodes):
        head += f" (not yours; {whose.caller})"
    if cluster.missing:
        have = "has" if cluster.missing == 1 else "have"
        head += f"\n  warning: {counted(cluster.missing, 'node')} of it {have} ended"
    if cluster.nodes:
        head += f"\n  {price}, {amount(cluster.cost())} so far; ends in {_left(cluster)}"
    return head + "\n" + nodes_table(cluster)


def cluster_json(cluster: Cluster, whose: Ownership) -> dict[str, Any]:
    hour, bill = _hour(cluster), cluster.cost()
    return {
        "cluster": cluster.name,
        "cluster_id": cluster.id or None,
        "region": cluster.region,
        "owner": cluster.owner,
        "yours": whose.all_mine(cluster.nodes),
        "created": cluster.created.isoformat() if cluster.created else None,
        "expires": cluster.expires.isoformat() if cluster.expires else None,
        "usd_per_hour": None if hour is None else round(hour, 4),
        "usd_so_far": None if bill.usd is None else round(bill.usd, 4),
        "usd_so_far_is_at_most": bill.at_most,
        "nodes": [
            {
                "node": rank,
                "instance_id": node.id,
                "state": node.state,
                "type": node.type,
                "zone": node.zone,
                "spot": node.spot,
                "private_ip": node.private_ip,
                "public_ip": node.public_ip,
            }
            for rank, node in enumerate(cluster.nodes)
        ],
    }


@verb("allow-me")
@anyone_option
def allow_me(session: Session) -> None:
    """Open SSH to this computer's address as it is now, and close it to the one before."""
    from cloudddp import cluster

    settings = session.settings()
    aws = session.aws(settings)
    block = cluster.allow_caller(aws, settings.cluster, whose=session.ownership(aws))
    click.echo(f"SSH to cluster {settings.cluster.name} is open to {block}")


COMMANDS = (up, down, status, ls, allow_me)
