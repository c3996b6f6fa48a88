"""Clusters as they are: find them by tag, reach their nodes, ask what the nodes see, open SSH to the caller.

What exists is asked of AWS, never of this laptop. up.py makes clusters, teardown.py takes them away.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from cloudddp import nodes, prices
from cloudddp.aws import discover, inventory
from cloudddp.aws.client import AWS
from cloudddp.aws.inventory import Instance
from cloudddp.errors import CloudDDPError, NodeError
from cloudddp.nodes import Runner
from cloudddp.plan import WHY_CALLER, moment, ssh_rule
from cloudddp.spec import ClusterSpec
from cloudddp.ssh.connection import Target
from cloudddp.ssh.fleet import Fleet
from cloudddp.state import ClusterFolder

Say = Callable[[str], None]
PROJECT = "project"  # the folder in a node's home that holds the user's files


@dataclass(frozen=True, slots=True)
class Cluster:
    """A cluster as AWS has it now. `nodes` are in node order and live; `gone` have ended and are still shown."""

    name: str
    id: str
    region: str
    nodes: tuple[Instance, ...]
    gone: tuple[Instance, ...]

    @property
    def created(self) -> datetime | None:
        return moment(self._any.created)

    @property
    def expires(self) -> datetime | None:
        return moment(self._any.expires)

    @property
    def type(self) -> str:
        return self._any.type

    @property
    def owner(self) -> str:
        return self._any.owner

    @property
    def _any(self) -> Instance:
        return (*self.nodes, *self.gone)[0]

    @property
    def missing(self) -> int:
        """How many of the nodes that it was made with are not there any more."""
        return max((self._any.wanted or 0) - len(self.nodes), 0)

    @property
    def node_hour(self) -> float | None:
        """The price of one node and hour, USD, or None where it is unknown."""
        return self._any.price

    def cost(self, now: datetime | None = None) -> float | None:
        """Return what the nodes have cost until now, USD, at the on-demand price; None where it is unknown."""
        start = self.created
        if self.node_hour is None or start is None:
            return None
        hours = prices.billed_hours(((now or datetime.now(UTC)) - start).total_seconds())
        return self.node_hour * len(self.nodes) * hours


# -- looking -----------------------------------------------------------------------------------------------


def find(aws: AWS, name: str | None = None) -> list[Cluster]:
    """Return the clusters of that name (or all) which have nodes, live ones first. One AWS call."""
    grouped: dict[tuple[str, str], list[Instance]] = {}
    for instance in inventory.instances(aws, inventory.named(name)):
        grouped.setdefault((instance.cluster, instance.cluster_id), []).append(instance)
    clusters = [
        Cluster(
            cluster_name,
            cluster_id,
            aws.region,
            tuple(i for i in members if i.live),
            tuple(i for i in members if not i.live),
        )
        for (cluster_name, cluster_id), members in grouped.items()
    ]
    return sorted(clusters, key=lambda c: (c.name, not c.nodes, c.id))


def fates(aws: AWS, cluster: Cluster, ranks: Iterable[int]) -> dict[int, str]:
    """Return, by node rank, what AWS says of those instances of a cluster that have ended. One AWS call."""
    now = {instance.id: instance for instance in inventory.instances(aws, inventory.with_id(cluster.id))}
    found = {}
    for rank in ranks:
        before = cluster.nodes[rank]
        after = now.get(before.id)
        if after is None:
            found[rank] = f"that {before.id} does not exist any more"
        elif not after.live:
            found[rank] = f"that {after.id} is {after.state}: {after.reason or 'no reason given'}"
    return found


def get(aws: AWS, name: str) -> Cluster:
    """Return the live cluster of that name. Raises CloudDDPError where there is none, or more than one."""
    live = [cluster for cluster in find(aws, name) if cluster.nodes]
    if not live:
        raise CloudDDPError(f"there is no cluster {name!r} in {aws.region}", hint="make one: cloudddp up")
    if len(live) > 1:
        raise CloudDDPError(
            f"there are {len(live)} clusters named {name!r} in {aws.region}: "
            + ", ".join(c.id for c in live),
            hint="remove them all with `cloudddp down`, or wait for their deadlines",
        )
    return live[0]


def targets(cluster: Cluster, spec: ClusterSpec) -> dict[int, Target]:
    """Return where each node answers SSH, by node rank. Raises where this laptop has no key."""
    private_key, host_key = ClusterFolder(cluster.id).keys()
    return {
        rank: Target(
            label=f"node {rank} ({instance.id})",
            host=instance.public_ip or instance.private_ip,
            port=spec.ssh_port,
            user=spec.user,
            private_key=private_key,
            host_key=host_key,
        )
        for rank, instance in enumerate(cluster.nodes)
    }


Connect = Callable[[Cluster, ClusterSpec, float, Callable[[], None]], Runner]


def connect(
    cluster: Cluster, spec: ClusterSpec, within: float = 0.0, meanwhile: Callable[[], None] = lambda: None
) -> Runner:
    """Return open SSH connections to every node; with `within`, wait so many seconds for booting ones."""
    fleet = Fleet(targets(cluster, spec))
    try:
        fleet.connect(within=within, meanwhile=meanwhile)
    except BaseException:
        fleet.close()
        raise
    return fleet


def connect_some(cluster: Cluster, spec: ClusterSpec) -> tuple[Runner, dict[int, Exception]]:
    """Return connections to the nodes that answer, and why the others do not. Raises where none answers."""
    fleet = Fleet(targets(cluster, spec))
    try:
        return fleet, fleet.connect(partly=True)
    except BaseException:
        fleet.close()
        raise


# -- the nodes' own view -------------------------------------------------------------------------------------


def probe(
    runner: Runner, cluster: Cluster, *, manifest: str = "", python: str = "", wait_boot: float = 0.0
) -> dict[int, dict[str, Any]]:
    """Ship the agent and return what it sees on each node. Raises NodeError where no interface has the address."""
    answers: dict[int, dict[str, Any]] = nodes.call_all(
        runner,
        "probe",
        lambda rank: [
            f"--project={PROJECT}",
            f"--private-ip={cluster.nodes[rank].private_ip}",
            f"--python={python}",
            f"--manifest={manifest}",
            f"--wait-boot={wait_boot:g}",
        ],
        ship=True,
        timeout=60.0 + wait_boot,
    )
    for rank, answer in answers.items():
        if not answer["interface"]:
            node = cluster.nodes[rank]
            raise NodeError(
                f"node {rank} ({node.id}): no interface carries its private address {node.private_ip}"
            )
    return answers


# -- allow-me ----------------------------------------------------------------------------------------------


def allow_caller(aws: AWS, spec: ClusterSpec, caller: Callable[[], str] = discover.caller_block) -> str:
    """Open SSH to the address this computer has now, and close it to the ones before; return the block."""
    block = caller()
    groups = inventory.groups(aws, inventory.named(spec.name))
    if not groups:
        raise CloudDDPError(
            f"there is no cluster {spec.name!r} in {aws.region}", hint="make one: cloudddp up"
        )
    for group in groups:
        blocks = inventory.open_blocks(group, spec.ssh_port)
        if block not in blocks:  # open the new one first: nobody is locked out in between
            new = [ssh_rule(block, spec.ssh_port, WHY_CALLER)]
            aws.call("ec2", "authorize_security_group_ingress", GroupId=group["GroupId"], IpPermissions=new)
        old = [one for one, why in blocks.items() if one != block and why == WHY_CALLER]
        if old:
            rules = [ssh_rule(one, spec.ssh_port, WHY_CALLER) for one in old]
            aws.call("ec2", "revoke_security_group_ingress", GroupId=group["GroupId"], IpPermissions=rules)
    return block
