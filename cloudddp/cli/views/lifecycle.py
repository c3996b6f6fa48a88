"""What `up` and `down` are about to do and have done, as text."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime

from cloudddp import formats
from cloudddp.aws.instance_types import TypeInfo
from cloudddp.aws.reservations import Reservation
from cloudddp.cli.views.clusters import UNKNOWN_OWNER, amount, at, end_of, nodes_table
from cloudddp.cluster import nodes_end
from cloudddp.cluster.model import Cluster
from cloudddp.cluster.plan import Plan
from cloudddp.cluster.preconditions import reservation_title
from cloudddp.cluster.prices import Price
from cloudddp.cluster.requests import efa_devices, is_spot
from cloudddp.cluster.teardown import DownReport
from cloudddp.cluster.up import UpResult
from cloudddp.config.spec import ClusterSpec, connection_mode
from cloudddp.errors import Message, q
from cloudddp.formats import counted, dollars, duration, moment


def plans(
    found: Sequence[Plan], info: TypeInfo, spec: ClusterSpec, credentials_end: datetime | None = None
) -> str:
    """Return what is about to be created, with the first type and in the first region that has capacity, and
    when the credentials end."""
    lines = [plan(found[0], info, spec, credentials_end), f"  where     {_zones(found[0])}"]
    if spec.wait_capacity != "0":
        lines[-1] += f"; if no zone has capacity, tries again for {spec.wait_capacity}"
    lines += [f"            else {_else(one, found[0], spec)}" for one in found[1:]]
    warnings = dict.fromkeys(one.context.image.warning for one in found if one.context.image.warning)
    return "\n".join(lines + [f"  warning   {text}" for text in warnings])


def _else(the_plan: Plan, first: Plan, spec: ClusterSpec) -> str:
    """Return what is created where the candidates before have no capacity; zones and hours, if they are not
    those of the first one."""
    price, places, life = the_plan.price, _zones(the_plan), duration(the_plan.hours * 3600)
    market = "spot" if is_spot(the_plan.launches[0].request.params) else "on demand"
    what = f"{the_plan.context.info.name} {market}" if len(spec.candidates) > 1 else ""
    where = places if places != _zones(first) else ""
    what = " in ".join(filter(None, (what, where)))
    now = f"now {dollars(price.spot[0])} per node, at most " if price.spot else ""
    within = f" in {life}" if life != duration(first.hours * 3600) else ""
    return f"{what}, {now}{dollars(price.hour)} an hour, at most {dollars(the_plan.cost)}{within}"


def _zones(the_plan: Plan) -> str:
    zones = [launch.zone for launch in the_plan.launches]
    return f"{the_plan.context.region}: {zones[0]}" + (
        f", else {' or '.join(zones[1:])}" if zones[1:] else ""
    )


def plan(the_plan: Plan, info: TypeInfo, spec: ClusterSpec, credentials_end: datetime | None = None) -> str:
    """Return what a cluster in one region is, until when, and what it costs."""
    gpus = f"{info.gpus} x {info.gpu_name}" if info.gpus else "no GPU"
    price, context = the_plan.price, the_plan.context
    kind = "spot, at most " if is_spot(the_plan.launches[0].request.params) else ""
    total, node, extras = _parts(price)
    hourly = f"{node} per node ({price.source})" if price.node_hour else price.source
    lines = [
        f"cluster {spec.name}: {spec.nodes} x {info.name} ({gpus} each)",
        f"  price     {kind}{total} an hour: {hourly}, "
        f"{extras} for {'disks and addresses' if price.addresses else 'disks'}",
        f"  deadline  {moment(the_plan.expires)}, in {duration(the_plan.hours * 3600)}: the nodes then "
        "terminate",
        f"  at most   {dollars(the_plan.cost)} until then; data transfer, snapshots and taxes are not "
        "counted",
    ]
    if spec.volume_init_rate:
        lines.append(
            f"  volumes   filled from the image at {spec.volume_init_rate} MiB/s; billed per GiB, up to "
            f"{context.image.disk_gb} on each node (aws.amazon.com/ebs/pricing), not counted above"
        )
    if spec.idle_minutes:
        lines.append(
            f"  idle      a node ends once unused for {duration(60 * spec.idle_minutes)}: no job, no SSH "
            "connection"
        )
    if (how := _access(spec)) is not None:
        lines.append(f"  access    {how}")
    if price.spot:
        low, high = price.spot
        now = dollars(low) if low == high else f"{dollars(low)} to {dollars(high)}"
        lines.insert(2, f"  spot      now {now} per node, depending on the zone; it may change at any time")
    if ending := formats.credentials_end(credentials_end):
        early = credentials_end is not None and credentials_end < the_plan.expires
        until = ", before the deadline: log in again by then to use or remove the cluster" if early else ""
        lines.append(f"  login     {ending}{until}")
    if context.reservation is not None:
        lines.append(f"  capacity  {_capacity(context.reservation)}")
    if network := _network(the_plan, info, spec):
        lines.append(f"  network   {', '.join(network)}")
    return "\n".join(lines)


def _parts(price: Price) -> tuple[str, str, str]:
    """Return the price per hour of the cluster, of a node, and of all disks and addresses, with so many
    decimals that they add up: rounding the price of a node to cents is off by half a cent for each node.
    Pure."""
    for decimals in (2, 3, 4, 5):
        scale = 10**decimals
        total, node, extras = (round(usd * scale) for usd in (price.hour, price.node_hour, price.extras_hour))
        if total == price.nodes * node + extras:
            break
    else:
        total = price.nodes * node + extras
    return (
        f"${total / scale:.{decimals}f}",
        f"${node / scale:.{decimals}f}",
        f"${extras / scale:.{decimals}f}",
    )


def _capacity(found: Reservation) -> str:
    if not found.block:
        return f"{reservation_title(found)} in {found.zone}"
    minutes = f"{found.ends_before.total_seconds() / 60:.0f} minutes"
    ends = f", until {moment(found.end)}; EC2 terminates its nodes {minutes} before" if found.end else ""
    return f"{reservation_title(found)} in {found.zone}{ends}"


def _network(the_plan: Plan, info: TypeInfo, spec: ClusterSpec) -> list[str]:
    """Return what connects the nodes, and how they get their addresses, where that is not the ordinary
    case."""
    context = the_plan.context
    found = []
    if devices := efa_devices(context.interfaces):
        found.append(f"EFA with {counted(devices, 'device')} per node")
    elif info.cards > 1 and spec.nodes > 1:
        found.append(f"one of the type's {info.cards} network cards, without EFA: slow between nodes")
    if context.own_placement_group:
        found.append("nodes close together in a placement group")
    elif (reserved := context.reservation) is not None and spec.nodes > 1 and not reserved.block:
        own = "of the cluster: none, as the reservation might not fill it"
        found.append(f"placement group {reserved.placement_group or own}")
    if connection_mode(spec) == "private":
        found.append("S3 by the VPC's own way: a NAT gateway is billed per GB, a gateway endpoint is free")
    if the_plan.elastic_ips:
        addresses = counted(the_plan.elastic_ips, "Elastic IP")
        found.append(f"{addresses}: billed until `down` releases them, also after the deadline")
    return found


def _access(spec: ClusterSpec) -> str | None:
    """Return how SSH reaches the nodes, in words; None for the default."""
    if connection_mode(spec) == "public":
        return (
            None
            if spec.proxy_command is None
            else "SSH by the proxy command; the nodes have public addresses"
        )
    how = "by private address"
    if spec.proxy_jump is not None:
        how = f"through {spec.proxy_jump}"
    elif spec.proxy_command is not None:
        how = "by the proxy command"
    return f"SSH {how}; the nodes have no public address"


def up(created: UpResult) -> str:
    cluster = created.cluster
    head = f"cluster {cluster.name} is ready"
    if created.plan is None:
        who = f"created by {cluster.owner or '-'} {at(cluster.created)}"
        head = f"cluster {cluster.name} is already up, {who}; nothing was changed"
    end = end_of(cluster) if cluster.overdue else f"its nodes terminate in {cluster.time_left}"
    if unused := nodes_end.of(cluster).unused:
        end += f", or {unused}"
    return f"{head}; {end}\n{nodes_table(cluster)}"


def nothing(name: str, regions: Sequence[str], denied: Sequence[str]) -> str:
    """Return that there is no cluster of that name in these regions; `denied`, by a policy of the
    organization."""
    more = f"; denied by your organization: {', '.join(denied)}" if denied else ""
    return f"cluster {name} does not exist; nothing to do (asked: {', '.join(regions)}{more})"


def down(report: DownReport, name: str, *, simulated: bool, region: str = "") -> str:
    """Return what was removed. `region`, where there may be a cluster of that name elsewhere."""
    where = f" in {region}" if region else ""
    kinds = [resource.kind for resource in report.deleted]
    parts = [f"{counted(len(report.terminated), 'node')} terminated"] if report.terminated else []
    parts += [f"{counted(kinds.count(kind), kind)} deleted" for kind in dict.fromkeys(kinds)]
    lines = [f"cluster {name}: {', '.join(parts)}; nothing is left{where}"]
    if report.terminated:
        verb = "this would have cost" if simulated else "this cost"
        about = "about " if not simulated and not report.cost.at_most else ""
        lines.append(
            f"{verb} {about}{amount(report.cost)} on AWS, at the on-demand price "
            "(billed by the second, at least 60 s per node)"
        )
    return "\n".join(lines)


def not_removed(report: DownReport) -> list[str]:
    """Return what `down` left to its owners, one line for each owner and cluster."""
    found: dict[str, list[str]] = {}
    for one in report.others:
        created = f", created {at(one.tags.created)}" if one.tags.created else ""
        owner = f"{one.tags.cluster_id or 'no id'} of {one.tags.owner or UNKNOWN_OWNER}{created}"
        found.setdefault(owner, []).append(one.id)
    return [f"cluster {owner}: {', '.join(ids)}" for owner, ids in found.items()]


def others(found: Sequence[Cluster]) -> list[str]:
    """Return a line for each of the caller's other clusters: what it costs, and what removes it."""
    return [
        Message(
            f"your cluster {one.name} in {one.region} also runs: {counted(len(one.live), 'node')}, "
            f"{dollars(one.hour)} an hour; `cloudddp down -c {q(one.name)} --region {q(one.region)}` removes "
            "it"
        )
        for one in found
    ]


def summary(found: Cluster) -> str:
    """Return one line that identifies a cluster, before it is removed."""
    age = duration((datetime.now(UTC) - found.created).total_seconds()) if found.created else "unknown time"
    known = found.id or f"without an id: {', '.join(node.id for node in found.live)}"
    count = counted(len(found.live), "node")
    return (
        f"cluster {found.name} ({known}) in {found.region}: {count}, created {age} ago by "
        f"{found.owner or '-'}"
    )
