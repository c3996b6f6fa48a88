"""The verbs on clusters: up, down, status, ls, allow-me."""

from __future__ import annotations

import signal
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import click

from cloudddp.cli.common import Session, dry_run_option, json_option, must_confirm, setting, verb, yes_option
from cloudddp.cli.say import Progress, counted, dollars, duration, note, print_json, table

if TYPE_CHECKING:
    from cloudddp.aws.client import AWS
    from cloudddp.aws.discover import TypeInfo
    from cloudddp.cluster import Cluster
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


def bring_up(session: Session, settings: Config, *, yes: bool) -> Up:
    """Make the cluster, asking first; for `up` and `run`."""
    from cloudddp import up as making

    with Progress() as say:

        def agree(plan: Plan, info: TypeInfo) -> None:
            say.stop()
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
        else f"cluster {cluster.name} was up already; nothing was changed"
    )
    return f"{head}; its nodes end themselves in {_left(cluster)}\n{nodes_table(cluster)}"


def nodes_table(cluster: Cluster) -> str:
    rows = [
        (str(rank), node.id, node.state, node.type, node.zone, node.private_ip, node.public_ip or "-")
        for rank, node in enumerate(cluster.nodes)
    ]
    rows += [("-", node.id, node.state, node.type, node.zone, "-", "-") for node in cluster.gone]
    return table(("NODE", "INSTANCE", "STATE", "TYPE", "ZONE", "PRIVATE", "PUBLIC"), rows)


@verb("down")
@dry_run_option
@yes_option
def down(session: Session, dry_run: bool, yes: bool) -> None:
    """Remove the cluster, all of it, and check that nothing is left.

    Works from any computer with the account, by tag. Exits 3, listing it, if anything is left. Safe to repeat.
    """
    settings = session.settings(rehearsed=dry_run)
    if dry_run:
        from cloudddp.cli import rehearsal

        rehearsal.down(settings)
        return
    from cloudddp import cluster

    aws = session.aws(settings)
    live = [c for c in cluster.find(aws, settings.cluster.name) if c.nodes]
    if live:
        click.echo("\n".join(_about(c) for c in live), err=True)
        must_confirm("End these nodes?", yes=yes, session=session)
    report = take_down(session, settings)
    click.echo(describe_down(report, settings.cluster.name, simulated=session.sim))
    if report.nothing:
        _say_what_else(aws, settings)


def _about(found: Cluster) -> str:
    age = duration((datetime.now(UTC) - found.created).total_seconds()) if found.created else "unknown time"
    return f"cluster {found.name} ({found.id}): {counted(len(found.nodes), 'node')}, made {age} ago by {found.owner or '-'}"


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
        where = inventory.with_id(cluster_id) if cluster_id else inventory.named(settings.cluster.name)
        report = teardown.down(aws, where, say=say)
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
            f"{what} {dollars(report.cost)} on AWS, on demand (seconds are billed, at least 60 a node)"
        )
    return "\n".join(lines)


@verb("status")
@json_option
def status(session: Session, as_json: bool) -> None:
    """Show the cluster's nodes, deadline and cost so far. Exits 1 where there is none. One AWS call."""
    from cloudddp import cluster
    from cloudddp.errors import CloudDDPError

    settings = session.settings()
    found = cluster.find(session.aws(settings), settings.cluster.name)
    live = [c for c in found if c.nodes] or found[:1]
    if as_json:
        print_json([cluster_json(c) for c in live])
    elif live:
        click.echo("\n\n".join(describe_cluster(c) for c in live))
    if not live or not live[0].nodes:
        raise CloudDDPError(
            f"there is no cluster {settings.cluster.name!r}" + ("; its nodes have ended" if live else ""),
            hint="make one: cloudddp up; `cloudddp ls` shows all",
        )


@verb("ls")
@json_option
def ls(session: Session, as_json: bool) -> None:
    """List every cloudddp cluster in the region, whoever made it."""
    from cloudddp import cluster

    settings = session.settings()
    found = [c for c in cluster.find(session.aws(settings)) if c.nodes]
    if as_json:
        print_json([cluster_json(c) for c in found])
        return
    if not found:
        note("no clusters")
        return
    rows = [
        (c.name, c.id, str(len(c.nodes)), c.type, _left(c), dollars(c.cost()), c.owner or "-") for c in found
    ]
    click.echo(table(("CLUSTER", "ID", "NODES", "TYPE", "ENDS IN", "SO FAR", "OWNER"), rows))


def _hour(cluster: Cluster) -> float | None:
    return None if cluster.node_hour is None else cluster.node_hour * len(cluster.nodes)


def _left(cluster: Cluster) -> str:
    if cluster.expires is None:
        return "no deadline"
    return duration((cluster.expires - datetime.now(UTC)).total_seconds())


def describe_cluster(cluster: Cluster) -> str:
    hour = _hour(cluster)
    price = "price unknown" if hour is None else f"{dollars(hour)} an hour"
    head = f"cluster {cluster.name} ({cluster.id}) in {cluster.region}, made by {cluster.owner or '-'}"
    if cluster.missing:
        have = "has" if cluster.missing == 1 else "have"
        head += f"\n  warning: {counted(cluster.missing, 'node')} of it {have} ended"
    if cluster.nodes:
        head += f"\n  {price}, {dollars(cluster.cost())} so far; ends in {_left(cluster)}"
    return head + "\n" + nodes_table(cluster)


def cluster_json(cluster: Cluster) -> dict[str, Any]:
    hour = _hour(cluster)
    return {
        "cluster": cluster.name,
        "cluster_id": cluster.id,
        "region": cluster.region,
        "owner": cluster.owner,
        "created": cluster.created.isoformat() if cluster.created else None,
        "expires": cluster.expires.isoformat() if cluster.expires else None,
        "usd_per_hour": None if hour is None else round(hour, 4),
        "usd_so_far": None if cluster.cost() is None else round(cluster.cost() or 0.0, 4),
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
def allow_me(session: Session) -> None:
    """Open SSH to this computer's address as it is now, and close it to the one before."""
    from cloudddp import cluster

    settings = session.settings()
    block = cluster.allow_caller(session.aws(settings), settings.cluster)
    click.echo(f"SSH to cluster {settings.cluster.name} is open to {block}")


COMMANDS = (up, down, status, ls, allow_me)
