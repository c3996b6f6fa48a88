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
from cloudddp.config.cluster_spec import Access, ClusterSpec, Placement, connection_mode
from cloudddp.errors import Message, q
from cloudddp.formats import dollars, duration, format_time, plural


def plans(
    found: Sequence[Plan], info: TypeInfo, spec: ClusterSpec, credentials_end: datetime | None = None
) -> str:
    """Return what is about to be created, where, and what else where there is no capacity."""
    lines = [plan(found[0], info, spec, credentials_end), f"  where     {_zones(found[0])}"]
    if spec.wait_capacity != "0":
        lines[-1] += f"; if no zone has capacity, tries again for {spec.wait_capacity}"
    lines += [f"            else {_else(one, found[0], spec)}" for one in found[1:]]
    warnings = dict.fromkeys(one.context.image.warning for one in found if one.context.image.warning)
    return "\n".join(lines + [f"  warning   {text}" for text in warnings])


def _else(plan: Plan, first: Plan, spec: Placement) -> str:
    """Return what is created without capacity for the ones before, as far as it is not as the first."""
    price, places, life = plan.price, _zones(plan), duration(plan.hours * 3600)
    market = "spot" if is_spot(plan.launches[0].request.params) else "on demand"
    what = f"{plan.context.info.name} {market}" if len(spec.candidates) > 1 else ""
    where = places if places != _zones(first) else ""
    what = " in ".join(filter(None, (what, where)))
    now = f"now {dollars(price.spot[0])} per node, at most " if price.spot else ""
    within = f" in {life}" if life != duration(first.hours * 3600) else ""
    return f"{what}, {now}{dollars(price.hour)} an hour, at most {dollars(plan.cost)}{within}"


def _zones(plan: Plan) -> str:
    first, *others = (launch.zone for launch in plan.launches)
    return f"{plan.context.region}: {first}" + (f", else {' or '.join(others)}" if others else "")


def plan(plan: Plan, info: TypeInfo, spec: ClusterSpec, credentials_end: datetime | None = None) -> str:
    """Return what a cluster in one region is, until when, and what it costs."""
    gpus = f"{info.gpus} x {info.gpu_name}" if info.gpus else "no GPU"
    price, context = plan.price, plan.context
    kind = "spot, at most " if is_spot(plan.launches[0].request.params) else ""
    total, node, extras = _parts(price)
    hourly = f"{node} per node ({price.source})" if price.node_hour else price.source
    extras += " for disks and addresses" if price.addresses else " for disks"
    now = " to ".join(dict.fromkeys(map(dollars, price.spot or ())))
    life = duration(plan.hours * 3600)
    login = formats.credentials_end(credentials_end)
    if login and credentials_end is not None and credentials_end < plan.expires:
        login += ", before the deadline: log in again by then to use or remove the cluster"
    volumes = (
        f"filled from the image at {spec.volume_init_rate} MiB/s; billed per GiB, up to "
        f"{context.image.disk_gb} on each node (aws.amazon.com/ebs/pricing), not counted above"
    )
    idle = f"a node ends once unused for {duration(60 * spec.idle_minutes)}: no job, no SSH connection"
    rows = {
        "price": f"{kind}{total} an hour: {hourly}, {extras}",
        "spot": now and f"now {now} per node, depending on the zone; it may change at any time",
        "deadline": f"{format_time(plan.expires)}, in {life}: the nodes then terminate",
        "at most": f"{dollars(plan.cost)} until then; data transfer, snapshots and taxes are not counted",
        "volumes": volumes if spec.volume_init_rate else "",
        "idle": idle if spec.idle_minutes else "",
        "access": _access(spec),
        "login": login,
        "capacity": "" if context.reservation is None else _capacity(context.reservation),
        "network": ", ".join(_network(plan, info, spec)),
    }
    head = f"cluster {spec.name}: {spec.nodes} x {info.name} ({gpus} each)"
    return "\n".join([head, *(f"  {label:10}{text}" for label, text in rows.items() if text)])


def _parts(price: Price) -> tuple[str, str, str]:
    """Return the price per hour of the cluster, of a node, and of all disks and addresses, with so many
    decimals that they add up: a node's price in cents is off by up to half a cent. Pure."""
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
    ends = f", until {format_time(found.end)}; EC2 terminates its nodes {minutes} before" if found.end else ""
    return f"{reservation_title(found)} in {found.zone}{ends}"


def _network(plan: Plan, info: TypeInfo, spec: ClusterSpec) -> list[str]:
    """Return what connects the nodes and how they get addresses, where that is not the ordinary case."""
    context = plan.context
    found = []
    if devices := efa_devices(context.interfaces):
        found.append(f"EFA with {plural(devices, 'device')} per node")
    elif info.cards > 1 and spec.nodes > 1:
        found.append(f"one of the type's {info.cards} network cards, without EFA: slow between nodes")
    if context.own_placement_group:
        found.append("nodes close together in a placement group")
    elif (reserved := context.reservation) is not None and spec.nodes > 1 and not reserved.block:
        own = "of the cluster: none, as the reservation might not fill it"
        found.append(f"placement group {reserved.placement_group or own}")
    if connection_mode(spec) == "private":
        found.append("S3 by the VPC's own way: a NAT gateway is billed per GB, a gateway endpoint is free")
    if plan.elastic_ips:
        addresses = plural(plan.elastic_ips, "Elastic IP")
        found.append(f"{addresses}: billed until `down` releases them, also after the deadline")
    return found


def _access(spec: Access) -> str:
    """Return how SSH reaches the nodes, in words; '' for the default."""
    how = "by private address" if spec.proxy_command is None else "by the proxy command"
    if connection_mode(spec) == "public":
        return "" if spec.proxy_command is None else f"SSH {how}; the nodes have public addresses"
    how = how if spec.proxy_jump is None else f"through {spec.proxy_jump}"
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
    """Return that there is no such cluster in these regions. `denied`: by the organization."""
    more = f"; denied by your organization: {', '.join(denied)}" if denied else ""
    return f"cluster {name} does not exist; nothing to do (asked: {', '.join(regions)}{more})"


def down(report: DownReport, name: str, *, simulated: bool, region: str = "") -> str:
    """Return what was removed. `region`, where there may be a cluster of that name elsewhere."""
    where = f" in {region}" if region else ""
    kinds = [resource.kind for resource in report.deleted]
    parts = [f"{plural(len(report.terminated), 'node')} terminated"] if report.terminated else []
    parts += [f"{plural(kinds.count(kind), kind)} deleted" for kind in dict.fromkeys(kinds)]
    lines = [f"cluster {name}: {', '.join(parts)}; nothing is left{where}"]
    if report.terminated:
        verb = "this would have cost" if simulated else "this cost"
        about = "about " if not simulated and not report.cost.at_most else ""
        how = "on AWS, at the on-demand price (billed by the second, at least 60 s per node)"
        lines.append(f"{verb} {about}{amount(report.cost)} {how}")
    return "\n".join(lines)


def not_removed(report: DownReport) -> list[str]:
    """Return what `down` left to its owners, one line for each owner and cluster."""
    found: dict[str, list[str]] = {}
    for other in report.others:
        created = f", created {at(other.tags.created)}" if other.tags.created else ""
        owner = f"{other.tags.cluster_id or 'no id'} of {other.tags.owner or UNKNOWN_OWNER}{created}"
        found.setdefault(owner, []).append(other.id)
    return [f"cluster {owner}: {', '.join(ids)}" for owner, ids in found.items()]


def others(found: Sequence[Cluster]) -> list[str]:
    """Return a line for each of the caller's other clusters: what it costs, and what removes it."""
    return [
        Message(
            f"your cluster {one.name} in {one.region} also runs: {plural(len(one.live), 'node')}, "
            f"{dollars(one.hour)} an hour; `cloudddp down -c {q(one.name)} --region {q(one.region)}` removes "
            "it"
        )
        for one in found
    ]


def summary(found: Cluster) -> str:
    """Return one line that identifies a cluster, before it is removed."""
    age = duration((datetime.now(UTC) - found.created).total_seconds()) if found.created else "unknown time"
    known = found.id or f"without an id: {', '.join(node.id for node in found.live)}"
    made = f"{plural(len(found.live), 'node')}, created {age} ago by {found.owner or '-'}"
    return f"cluster {found.name} ({known}) in {found.region}: {made}"
