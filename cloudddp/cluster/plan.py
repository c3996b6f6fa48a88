"""ClusterSpec + what AWS answered -> Plan: the exact requests, their order, the deadline and the price. Pure.

`up` sends exactly the planned requests; `--dry-run` sends them to an in-process moto and prints them. A value
that comes from an earlier answer is a `Ref`. A node that replaces a lost one is launched as `up` launched the
nodes, but for what a single node needs of its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from cloudddp import __version__
from cloudddp import tags as names
from cloudddp.cluster import node_addresses
from cloudddp.cluster.preconditions import latest_reservation_end
from cloudddp.cluster.prices import Price
from cloudddp.cluster.requests import (
    LaunchContext,
    Ref,
    Request,
    client_token,
    efa_devices,
    needs_elastic_ip,
    placement_group_request,
    run_instances,
    tag_specifications,
)
from cloudddp.cluster.user_data import Identity, user_data
from cloudddp.config.cluster_spec import ClusterSpec
from cloudddp.errors import CloudDDPError, UsageError
from cloudddp.tags import TAG_EXPIRES, TAG_NODE_RANK, iso

# Descriptions of the rules that open SSH: `allow-me` replaces only the first kind.
CALLER_RULE = "cloudddp caller"
CONFIG_RULE = "cloudddp ssh_from"

SHORTEST = timedelta(minutes=10)  # a shorter one would pass while the nodes boot


@dataclass(frozen=True, slots=True)
class Launch:
    """The launch of all nodes in one zone."""

    zone: str
    request: Request


@dataclass(frozen=True, slots=True)
class Plan:
    """`requests` create what the nodes need; then `launches` are tried in order until one succeeds."""

    cluster_id: str
    context: LaunchContext
    requests: tuple[Request, ...]
    launches: tuple[Launch, ...]
    price: Price
    created: datetime
    expires: datetime

    @property
    def elastic_ips(self) -> int:
        """How many Elastic IPs it allocates."""
        return sum(request.step.startswith(node_addresses.STEP) for request in self.requests)

    @property
    def hours(self) -> float:
        return (self.expires - self.created).total_seconds() / 3600

    @property
    def cost(self) -> float:
        """USD if the cluster runs until its deadline."""
        return self.price.hour * self.hours


def key_name(name: str) -> str:
    """Return the name of a cluster's key pair, which is the lock on the cluster's name: see name_lock.py."""
    return f"cloudddp-{name}"


def lifetime(
    spec: ClusterSpec, price: Price, created: datetime | None = None, latest: datetime | None = None
) -> timedelta:
    """Return how long the cluster may live: the least of max_hours, the time that max_cost pays for, and the
    time to `latest` (of a capacity block). Raises UsageError if that is too short for the nodes to boot."""
    hours = spec.max_hours
    if spec.max_cost is not None:
        hours = min(hours, spec.max_cost / price.hour)
    life = timedelta(seconds=int(hours * 3600))
    if created is not None and latest is not None and latest - created < life:
        life = latest - created
        if life < SHORTEST:
            raise UsageError(
                f"the capacity block ends too soon: its nodes have to terminate by {latest:%Y-%m-%d %H:%M} "
                "UTC",
                hint="EC2 terminates them before the end of the block, and they save results before that",
            )
    if life < SHORTEST:
        least = int(price.hour * SHORTEST.total_seconds() / 36 + 1) / 100  # rounded up to a cent
        raise UsageError(
            f"the cluster would terminate {life.total_seconds() / 60:.1f} minutes after its start: "
            f"{spec.nodes} x {spec.instance_type} cost ${price.hour:.2f} an hour",
            hint=f"nodes take minutes to boot; allow at least ${least:.2f} and 0.17 hours",
        )
    return life


def plan(spec: ClusterSpec, context: LaunchContext, identity: Identity, price: Price) -> Plan:
    """Return the requests that create the cluster."""
    created = context.now.replace(microsecond=0)
    latest = latest_reservation_end(context.reservation) if context.reservation is not None else None
    expires = created + lifetime(spec, price, created, latest)
    tags = _tags(spec, context, identity, price, created, expires)
    key = key_name(spec.name)
    data = user_data(identity, created, expires, spec.idle_minutes, spec.ssh_port)
    description = CONFIG_RULE if spec.ssh_from else CALLER_RULE
    requests = (
        # First, because it locks the name: if another cluster has it, EC2 refuses and nothing has been
        # created.
        Request(
            "key-pair",
            "import_key_pair",
            {
                "KeyName": key,
                "PublicKeyMaterial": identity.public_key.encode(),
                "TagSpecifications": tag_specifications(tags, "key-pair"),
            },
        ),
        Request(
            "security-group",
            "create_security_group",
            {
                "GroupName": f"{key}-{identity.cluster_id}",
                "Description": f"cloudddp cluster {spec.name}: all traffic within, SSH from the caller",
                "VpcId": context.subnets[0].vpc_id,
                "TagSpecifications": tag_specifications(tags, "security-group"),
            },
        ),
        _rules(
            "ingress",
            [_self_reference(), *(ssh_rule(b, spec.ssh_port, description) for b in context.ssh_from)],
        ),
        # EFA needs the group itself as destination; 0.0.0.0/0 is not enough.
        _rules("egress", [_self_reference()]),
        *(
            [placement_group_request(spec.name, identity.cluster_id, tags)]
            if context.own_placement_group
            else []
        ),
        # Before the launch: where the account has too few, nothing has been billed.
        *(
            node_addresses.requests(spec.nodes, tags, context.subnets[0].zone, context.region)
            if needs_elastic_ip(spec, context.interfaces)
            else ()
        ),
    )
    launches = tuple(
        Launch(subnet.zone, run_instances(spec, context, subnet, tags, key, data, identity.cluster_id))
        for subnet in context.subnets
    )
    return Plan(identity.cluster_id, context, requests, launches, price, created, expires)


def _tags(
    spec: ClusterSpec,
    context: LaunchContext,
    identity: Identity,
    price: Price,
    created: datetime,
    expires: datetime,
) -> list[dict[str, str]]:
    """Return the tags of everything that the plan creates."""
    return [
        {"Key": key, "Value": value}
        for key, value in {
            names.TAG_CLUSTER: spec.name,
            names.TAG_ID: identity.cluster_id,
            names.TAG_OWNER: context.owner,
            names.TAG_CREATED: iso(created),
            names.TAG_EXPIRES: iso(expires),
            names.TAG_VERSION: __version__,
            names.TAG_NODES: str(spec.nodes),
            names.TAG_GPUS: str(context.info.gpus),
            names.TAG_EFA: str(efa_devices(context.interfaces)),
            names.TAG_PRICE: f"{price.hour / spec.nodes:.4f}",
            **({names.TAG_REQUIRE_EFA: "yes"} if spec.require_efa else {}),
            **({names.TAG_IDLE: f"{spec.idle_minutes:.2f}"} if spec.idle_minutes else {}),
            "Name": f"cloudddp-{spec.name}",
            **spec.tags,  # may replace Name, which is for the user's eyes only; cloudddp:* is refused before
        }.items()
    ]


def _rules(direction: str, permissions: list[dict[str, Any]]) -> Request:
    return Request(
        f"{direction}-rules",
        f"authorize_security_group_{direction}",
        {"GroupId": Ref("security-group", "GroupId"), "IpPermissions": permissions},
    )


def _self_reference() -> dict[str, Any]:
    return {"IpProtocol": "-1", "UserIdGroupPairs": [{"GroupId": Ref("security-group", "GroupId")}]}


def ssh_rule(block: str, port: int, description: str) -> dict[str, Any]:
    """Return the permission that opens SSH to one address block."""
    ranges = (
        {"Ipv6Ranges": [{"CidrIpv6": block, "Description": description}]}
        if ":" in block
        else {"IpRanges": [{"CidrIp": block, "Description": description}]}
    )
    return {"IpProtocol": "tcp", "FromPort": port, "ToPort": port, **ranges}


def require_time(expires: datetime, now: datetime) -> None:
    """Raise CloudDDPError if the deadline is too near for a replacement to boot."""
    if expires - now < SHORTEST:
        raise CloudDDPError(
            f"the deadline of the cluster is at {expires:%Y-%m-%d %H:%M} UTC, too soon to replace a node",
            hint="`cloudddp pull` what you need; then `cloudddp down` and `cloudddp up`",
        )


def plan_replacement(
    launch: Mapping[str, Any],
    cluster_id: str,
    data: str,
    rank: int,
    zone: str,
    attempt: int,
    expires: datetime,
) -> Launch:
    """Return the launch of the node of that rank, in the subnet of the others and with their deadline.
    `launch` is that of `up`; `attempt` distinguishes the launches of one cluster."""
    tags = [_with_tags(one, rank, expires) for one in launch["TagSpecifications"]]
    params = {**launch, "MinCount": 1, "MaxCount": 1, "TagSpecifications": tags, "UserData": data}
    params["ClientToken"] = client_token(cluster_id, attempt, zone, params)
    return Launch(zone, Request("nodes", "run_instances", params))


def _with_tags(specification: Mapping[str, Any], rank: int, expires: datetime) -> dict[str, Any]:
    """Return the tags of `up` with the rank, and with the deadline as it is now."""
    own = {TAG_NODE_RANK: str(rank), TAG_EXPIRES: iso(expires)}
    tags = [tag for tag in specification["Tags"] if tag["Key"] not in own]
    return {**specification, "Tags": [*tags, *({"Key": key, "Value": own[key]} for key in own)]}
