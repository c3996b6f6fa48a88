"""Clusters as they are: find them by tag, reach their nodes, ask what the nodes see, open SSH to the caller.

What exists is asked of AWS, never of this laptop. up.py makes clusters, teardown.py takes them away.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import UTC, datetime

from cloudddp import bill, host_keys, nodes
from cloudddp.aws import discover, inventory
from cloudddp.aws.client import AWS
from cloudddp.aws.inventory import Instance
from cloudddp.bill import Bill
from cloudddp.errors import CloudDDPError, NodeError
from cloudddp.nodes import Runner
from cloudddp.owners import Ownership
from cloudddp.plan import WHY_CALLER, ssh_rule
from cloudddp.protocol import MAX_MANIFEST, MAX_REPLY, ProbeReply
from cloudddp.spec import ClusterSpec
from cloudddp.ssh.connection import Target
from cloudddp.ssh.fleet import Fleet, Outcome
from cloudddp.state import ClusterFolder

Say = Callable[[str], None]
PROJECT = "project"  # the folder in a node's home that holds the user's files


@dataclass(frozen=True, slots=True)
class Cluster:
    """A cluster as AWS has it now. `nodes` are in node order and live; `gone` have ended and are still shown.

    `id` is '' for instances whose tag holds no cluster's id: they are shown, and `down` ends them, but no job runs
    on them.
    """

    name: str
    id: str
    region: str
    nodes: tuple[Instance, ...]
    gone: tuple[Instance, ...]

    @property
    def created(self) -> datetime | None:
        return bill.usual(i.tags.created or i.launched for i in self._all)

    @property
    def expires(self) -> datetime | None:
        return bill.usual(i.tags.expires for i in self._all)

    @property
    def ended(self) -> datetime | None:
        """When the last of its nodes ended, as far as AWS says."""
        return max((at for i in self.gone if (at := i.ended)), default=None)

    @property
    def past_deadline(self) -> bool:
        """Whether the deadline has passed."""
        return self.expires is not None and self.expires <= datetime.now(UTC)

    @property
    def type(self) -> str:
        return self._all[0].type

    @property
    def owner(self) -> str:
        return ", ".join(sorted({i.tags.owner for i in (self.nodes or self.gone)} - {""}))

    @property
    def _all(self) -> tuple[Instance, ...]:
        return (*self.nodes, *self.gone)

    @property
    def missing(self) -> int:
        """How many of the nodes that it was made with are not there any more."""
        return max((bill.usual(i.tags.nodes for i in self._all) or 0) - len(self.nodes), 0) if self.id else 0

    @property
    def node_hour(self) -> float | None:
        """The price of one node and hour, USD, or None where it is unknown."""
        return bill.usual(i.tags.price for i in self._all)

    @property
    def warnings(self) -> list[str]:
        """What the tags of its live nodes say that cannot be used."""
        return [warning for instance in self.nodes for warning in instance.warnings]

    def cost(self, now: datetime | None = None) -> Bill:
        """Return what its nodes have cost until now, those that have ended included."""
        return bill.so_far(self._all, now or datetime.now(UTC))


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


def get(aws: AWS, name: str, whose: Ownership | None = None) -> Cluster:
    """Return the caller's live cluster of that name. Raises CloudDDPError where there is none, or more than one."""
    whose = whose or Ownership(aws)
    known = find(aws, name)
    live = [cluster for cluster in known if cluster.nodes and cluster.id]
    mine = [cluster for cluster in live if whose.all_mine(cluster.nodes)]
    if not live:
        raise CloudDDPError(
            "; ".join([f"there is no cluster {name!r} in {aws.region}", *_ended(known)]),
            hint="make one: cloudddp up",
        )
    if not mine:
        raise not_yours(name, aws.region, live, whose)
    if len(mine) > 1:
        raise CloudDDPError(
            f"there are {len(mine)} clusters named {name!r} in {aws.region}: "
            + ", ".join(c.id for c in mine),
            hint="remove them all with `cloudddp down`, or wait for their deadlines",
        )
    return mine[0]


def not_yours(name: str, region: str, found: Iterable[Cluster], whose: Ownership) -> CloudDDPError:
    """Return the error that says whose clusters of that name these are, and what to type."""
    listed = ", ".join(f"{c.id or 'without an id'} of {c.owner or 'an unknown owner'}" for c in found)
    return CloudDDPError(
        f"cluster {name!r} in {region} is not yours: {listed}; {whose.caller}",
        hint="add --anyone to act on it anyway, or choose another name with -c",
    )


def _ended(known: Iterable[Cluster]) -> list[str]:
    """Return a sentence on the last cluster of a name if it ended at its deadline and AWS still lists it."""
    past = [cluster for cluster in known if cluster.past_deadline]
    if not past:
        return []
    last = max(past, key=lambda cluster: cluster.expires or datetime.min.replace(tzinfo=UTC))
    return [
        f"the last one of that name reached its deadline, {last.expires:%Y-%m-%d %H:%M} UTC, and results that "
        "were not pulled from it are lost"
    ]


def targets(cluster: Cluster, spec: ClusterSpec) -> dict[int, Target]:
    """Return where each node answers SSH, by node rank. Raises where this laptop has no key."""
    folder = ClusterFolder(cluster.id)
    private_key = folder.login_key()
    known = host_keys.read(folder)
    return {
        rank: Target(
            label=f"node {rank} ({instance.id})",
            host=instance.public_ip or instance.private_ip,
            port=spec.ssh_port,
            user=spec.user,
            private_key=private_key,
            host_keys=known.accepted(instance.id),
        )
        for rank, instance in enumerate(cluster.nodes)
    }


Dial = Callable[[Cluster, ClusterSpec, float, Callable[[], None]], Runner]


def dial(cluster: Cluster, spec: ClusterSpec, within: float, meanwhile: Callable[[], None]) -> Fleet:
    """Return open SSH connections to every node. Nodes may still have the host key of their user data."""
    fleet = Fleet(targets(cluster, spec))
    try:
        fleet.connect(within=within, meanwhile=meanwhile)
    except BaseException:
        fleet.close()
        raise
    return fleet


def connect(
    cluster: Cluster,
    spec: ClusterSpec,
    within: float = 0.0,
    meanwhile: Callable[[], None] = lambda: None,
    *,
    say: Say = lambda _: None,
    dial: Dial = dial,
) -> Runner:
    """Return open SSH connections to every node; with `within`, wait so many seconds for booting ones.

    Each node then has a host key of its own: a replacement that was interrupted is finished first.
    """
    folder, instances = _host_key_owners(cluster)
    with host_keys.one_at_a_time(folder, instances, say):
        runner = dial(cluster, spec, within, meanwhile)
        try:
            host_keys.finish(runner, folder, instances, whole=not cluster.missing, partly=False, say=say)
        except BaseException:
            runner.close()
            raise
    return runner


def connect_some(
    cluster: Cluster, spec: ClusterSpec, *, say: Say = lambda _: None
) -> tuple[Runner, dict[int, Exception]]:
    """As `connect`, to the nodes that answer; and why the others do not. Raises where none answers."""
    folder, instances = _host_key_owners(cluster)
    with host_keys.one_at_a_time(folder, instances, say):
        fleet = Fleet(targets(cluster, spec))
        try:
            silent = fleet.connect(partly=True)
            whole = not cluster.missing
            failed = host_keys.finish(fleet, folder, instances, whole=whole, partly=True, say=say)
            fleet.leave_out(failed)
            if not fleet.targets:
                Outcome(errors=failed).all()
        except BaseException:
            fleet.close()
            raise
    return fleet, {**silent, **failed}


def finish_host_keys(cluster: Cluster, spec: ClusterSpec, *, say: Say) -> None:
    """Finish a replacement of host keys that was interrupted, for a caller that makes its own connections."""
    if host_keys.unfinished(*_host_key_owners(cluster)):
        connect(cluster, spec, say=say).close()


def _host_key_owners(cluster: Cluster) -> tuple[ClusterFolder, dict[int, str]]:
    folder = ClusterFolder(cluster.id)
    folder.login_key()
    return folder, {rank: instance.id for rank, instance in enumerate(cluster.nodes)}


# -- the nodes' own view -------------------------------------------------------------------------------------


def probe(
    runner: Runner,
    cluster: Cluster,
    *,
    manifest: str = "",
    python: str = "",
    wait_boot: float = 0.0,
    await_gpus: int = 0,
) -> dict[int, ProbeReply]:
    """Ship the agent and return what it sees on each node. Raises NodeError where no interface has the address.

    `wait_boot` is how many seconds the boot may take; after it, the node gets a minute to show `await_gpus` GPUs.
    """
    answers = nodes.call_all(
        runner,
        "probe",
        lambda rank: [
            f"--project={PROJECT}",
            f"--private-ip={cluster.nodes[rank].private_ip}",
            f"--python={python}",
            f"--manifest={manifest}",
            f"--wait-boot={wait_boot:g}",
            f"--await-gpus={await_gpus}",
        ],
        answer=ProbeReply,
        ship=True,
        timeout=60.0 + wait_boot + (60.0 if await_gpus else 0.0),
        limit=MAX_MANIFEST if manifest else MAX_REPLY,
    )
    for rank, answer in answers.items():
        if not answer.interface:
            node = cluster.nodes[rank]
            raise NodeError(
                f"node {rank} ({node.id}): no interface carries its private address {node.private_ip}"
            )
    return answers


# -- allow-me ----------------------------------------------------------------------------------------------


def allow_caller(
    aws: AWS,
    spec: ClusterSpec,
    caller: Callable[[], str] = discover.caller_block,
    whose: Ownership | None = None,
) -> str:
    """Open SSH to the address this computer has now, and close it to the ones before; return the block."""
    whose = whose or Ownership(aws)
    found = inventory.groups(aws, inventory.named(spec.name))
    if not found:
        raise CloudDDPError(
            f"there is no cluster {spec.name!r} in {aws.region}", hint="make one: cloudddp up"
        )
    groups = [group for group in found if whose.mine(inventory.thing("security group", group))]
    if not groups:
        owners = {
            inventory.thing("security group", group).tags.owner or "an unknown owner" for group in found
        }
        raise CloudDDPError(
            f"cluster {spec.name!r} in {aws.region} is not yours: its security group is of "
            f"{', '.join(sorted(owners))}; {whose.caller}",
            hint="add --anyone to act on it anyway, or choose another name with -c",
        )
    block = caller()
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
