"""The verbs on clusters: find (status, ls), connect, up. They return data and raise; they print nothing but progress.

What exists is asked of AWS by tag, never of this laptop. `up` notes each act in the journal before it acts, and
undoes all of it when it does not come to its end, whatever the reason.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from cloudddp import nodes, payload, prices
from cloudddp.aws import discover, inventory
from cloudddp.aws.client import AWS, uninterrupted
from cloudddp.aws.inventory import Instance
from cloudddp.errors import AWSError, CloudDDPError, Interrupted, Leftovers, NodeError, UsageError
from cloudddp.nodes import Runner
from cloudddp.plan import Identity, Place, Plan, Ref, iso, moment, plan, ssh_rule
from cloudddp.prices import Price
from cloudddp.spec import ClusterSpec
from cloudddp.ssh import keys
from cloudddp.ssh.connection import Target
from cloudddp.ssh.fleet import Fleet
from cloudddp.state import ClusterFolder, ClusterRecord
from cloudddp.teardown import down, leftovers, undisturbed

Say = Callable[[str], None]
SETTLE_SECONDS = 15.0  # what AWS made a moment ago may not be found for so long
NOT_YET = ("InvalidGroup.NotFound", "InvalidKeyPair.NotFound")
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

    def node_hour(self) -> float | None:
        """Return the price of one node and hour, USD, or None where it is unknown."""
        return prices.node_hour(self.type, self.region)

    def cost(self, now: datetime | None = None) -> float | None:
        """Return what the nodes have cost until now, USD, at the on-demand price; None where it is unknown."""
        price, start = self.node_hour(), self.created
        if price is None or start is None:
            return None
        hours = prices.billed_hours(((now or datetime.now(UTC)) - start).total_seconds())
        return price * len(self.nodes) * hours


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


def get(aws: AWS, name: str) -> Cluster:
    """Return the live cluster of that name. Raises CloudDDPError where there is none, or more than one."""
    live = [cluster for cluster in find(aws, name) if cluster.nodes]
    if not live:
        raise CloudDDPError(
            f"there is no cluster {name!r} in {aws.region}", hint=f"make one: cloudddp -c {name} up"
        )
    if len(live) > 1:
        raise CloudDDPError(
            f"there are {len(live)} clusters named {name!r} in {aws.region}: "
            + ", ".join(c.id for c in live),
            hint=f"remove them all with `cloudddp -c {name} down`, or wait for their deadlines",
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


Connect = Callable[[Cluster, ClusterSpec, float], Runner]


def connect(cluster: Cluster, spec: ClusterSpec, within: float = 0.0) -> Runner:
    """Return open SSH connections to every node; with `within`, wait so many seconds for booting ones."""
    fleet = Fleet(targets(cluster, spec))
    try:
        fleet.connect(within=within)
    except BaseException:
        fleet.close()
        raise
    return fleet


# -- up ----------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Made:
    """What is known to exist, from AWS's own answers: tags of new things may take a while to be found."""

    instances: list[str] = field(default_factory=list)
    uncertain: bool = False  # RunInstances was sent, and whether it worked is not known


@dataclass(frozen=True, slots=True)
class Up:
    """What `up` did: the cluster, ready; `plan` is None where it was there already and nothing was changed."""

    cluster: Cluster
    plan: Plan | None


def up(
    aws: AWS,
    spec: ClusterSpec,
    *,
    say: Say,
    agree: Callable[[Plan, discover.TypeInfo], None] = lambda *_: None,
    connect: Connect = connect,
    caller: Callable[[], str] = discover.caller_block,
) -> Up:
    """Make the cluster and return when every node is ready to train; return at once where it is there already.

    `agree` is asked with the plan before anything is made and raises to refuse. On any failure or interrupt
    everything made is removed again, and verified. Raises UsageError, CloudDDPError, Interrupted, Leftovers.
    """
    discover.require_known_type(aws, spec.instance_type)
    there = [cluster for cluster in find(aws, spec.name) if cluster.nodes]
    if there:
        return Up(_adopt(get(aws, spec.name) if len(there) > 1 else there[0], spec, say, connect), None)
    info = discover.instance_type(aws, spec)
    price = _price(spec, aws.region)
    place = _place(aws, spec, info, caller)
    identity, private_key = _identity()
    units = tuple(payload.text(f"infra/node/cloudddp-deadline.{kind}") for kind in ("timer", "service"))
    the_plan = plan(spec, place, identity, price, units=(units[0], units[1]))
    agree(the_plan, info)
    folder = ClusterFolder(identity.cluster_id)
    record = ClusterRecord(
        identity.cluster_id,
        spec.name,
        aws.region,
        aws.endpoint,
        spec.user,
        iso(the_plan.created),
        iso(the_plan.expires),
    )
    folder.create(record, private_key=private_key, host_public=identity.host_public)
    made = Made()
    try:
        _carry_out(aws, the_plan, folder, made, say)
        cluster = _wait_running(aws, spec, identity.cluster_id, say)
        _make_ready(cluster, spec, 0 if spec.allow_cpu else info.gpus, say, connect)
    except BaseException as error:
        _undo(aws, identity.cluster_id, made, error, say)
        raise
    folder.note("ready", nodes=[node.id for node in cluster.nodes])
    return Up(cluster, the_plan)


def _adopt(cluster: Cluster, spec: ClusterSpec, say: Say, connect: Connect) -> Cluster:
    """Check that a cluster which is there already is the one that was asked for, and answers."""
    differs = []
    if len(cluster.nodes) != spec.nodes:
        differs.append(
            f"it has {len(cluster.nodes)} node{'s' * (len(cluster.nodes) != 1)}, {spec.nodes} were asked for"
        )
    if cluster.type != spec.instance_type:
        differs.append(f"its nodes are {cluster.type}, {spec.instance_type} was asked for")
    if stopped := [node.id for node in cluster.nodes if node.state in ("stopping", "stopped")]:
        differs.append(f"stopped: {', '.join(stopped)}")
    if differs:
        raise CloudDDPError(
            f"cluster {cluster.name!r} is there already, but {'; '.join(differs)}. Nothing was changed",
            hint=f"`cloudddp -c {cluster.name} down` first, or another name with -c",
        )
    say(f"cluster {cluster.name} is there already; checking that its {len(cluster.nodes)} nodes are ready")
    _make_ready(cluster, spec, 0, say, connect)  # an earlier `up` may have been killed before it could check
    return cluster


def _price(spec: ClusterSpec, region: str) -> Price:
    known = prices.node_hour(spec.instance_type, region)
    if spec.price is None and known is None:
        raise UsageError(
            f"the price of {spec.instance_type} in {region} is not known to cloudddp, and it is never taken as 0",
            hint="look it up and give it: --price USD (per node and hour), or `price` in cloudddp.toml",
        )
    source = f"on-demand list price of {prices.TABLE_DATE}" if spec.price is None else "as given"
    return Price(spec.price or known or 0.0, spec.nodes, spec.disk_gb, source)


def _place(aws: AWS, spec: ClusterSpec, info: discover.TypeInfo, caller: Callable[[], str]) -> Place:
    image = discover.image(aws, spec, info.arch)
    network = discover.network(aws, spec)
    return Place(
        image_id=image.id,
        root_device=image.root_device,
        image_disk_gb=image.disk_gb,
        vpc_id=network.vpc_id,
        subnet_id=network.subnet_id,
        zone=network.zone,
        ssh_from=spec.ssh_from or (caller(),),
        owner=discover.owner(aws),
        now=datetime.now(UTC),
    )


def _identity() -> tuple[Identity, str]:
    """Return new keys of a new cluster, and the private login key, which stays on this laptop."""
    login, host = keys.generate(), keys.generate()
    cluster_id = "c-" + secrets.token_hex(5)
    return Identity(
        cluster_id, f"{login.public} cloudddp-{cluster_id}", host.private, host.public
    ), login.private


def _carry_out(aws: AWS, the_plan: Plan, folder: ClusterFolder, made: Made, say: Say) -> None:
    answers: dict[str, Any] = {}
    words = {"key-pair": "key pair", "security-group": "security group", "nodes": "nodes"}
    for request in the_plan.requests:
        if request.step in words:
            say(f"making the {words[request.step]}")
        params = _filled(request.params, answers)
        folder.note(request.step, method=request.method, client_token=request.params.get("ClientToken"))
        with uninterrupted(lambda: say("finishing the call in flight, then taking everything down")):
            made.uncertain = request.step == "nodes"
            answers[request.step] = _settled(aws, request.method, params, made)
            made.uncertain = False
            if request.step == "nodes":
                made.instances = [item["InstanceId"] for item in answers["nodes"]["Instances"]]
                folder.note("made", instances=made.instances)


def _settled(aws: AWS, method: str, params: dict[str, Any], made: Made) -> Any:
    """Make a call, again where AWS does not see yet what it answered a moment ago (eventual consistency)."""
    deadline = time.monotonic() + SETTLE_SECONDS
    while True:
        try:
            return aws.call("ec2", method, **params)
        except AWSError as error:
            if error.code:
                made.uncertain = False  # AWS answered, and said no
            if error.code not in NOT_YET or time.monotonic() > deadline:
                raise
        time.sleep(0.5)


def _filled(value: Any, answers: Mapping[str, Any]) -> Any:
    """Return parameters with every Ref replaced by what AWS answered."""
    if isinstance(value, Ref):
        return answers[value.step][value.key]
    if isinstance(value, Mapping):
        return {key: _filled(item, answers) for key, item in value.items()}
    if isinstance(value, list):
        return [_filled(item, answers) for item in value]
    return value


def _wait_running(aws: AWS, spec: ClusterSpec, cluster_id: str, say: Say) -> Cluster:
    """Poll until every node runs and has its addresses. One call a poll, whatever the number of nodes."""
    deadline = time.monotonic() + spec.ready_minutes * 60
    said, pause = -1, 0.2
    while True:
        found = inventory.instances(aws, inventory.with_id(cluster_id))
        running = [i for i in found if i.state == "running" and i.private_ip]
        if lost := [i for i in found if i.state in (*inventory.GOING, "stopping", "stopped")]:
            raise CloudDDPError(
                f"{len(lost)} of {spec.nodes} nodes ended while starting: {lost[0].id}: {lost[0].reason or lost[0].state}"
            )
        if len(running) == spec.nodes:
            return Cluster(spec.name, cluster_id, aws.region, tuple(running), ())
        if time.monotonic() > deadline:
            raise CloudDDPError(
                f"{spec.nodes - len(running)} of {spec.nodes} nodes do not run after {spec.ready_minutes:g} minutes"
            )
        if len(running) != said:
            said = len(running)
            say(f"{said} of {spec.nodes} nodes running")
        time.sleep(pause)
        pause = min(pause * 1.5, inventory.POLL_SECONDS)


def _make_ready(cluster: Cluster, spec: ClusterSpec, gpus: int, say: Say, connect: Connect) -> None:
    """Reach every node, and check what a job and the bill depend on: interface, GPUs, the armed deadline."""
    say("waiting for SSH on every node")
    runner = connect(cluster, spec, spec.ready_minutes * 60)
    try:
        found = probe(runner, cluster, wait_boot=spec.ready_minutes * 60)
    finally:
        runner.close()
    for rank, answer in found.items():
        if answer["timer"].get("ActiveState") != "active" or not answer["timer"].get(
            "NextElapseUSecRealtime"
        ):
            raise NodeError(
                f"node {rank} ({cluster.nodes[rank].id}): its deadline is not armed, so it could outlive this laptop",
                hint="does the image run cloud-init and systemd? Deep Learning AMIs do",
            )
        if answer["gpus"] < gpus:
            raise NodeError(
                f"node {rank} ({cluster.nodes[rank].id}) shows {answer['gpus']} of {gpus} GPUs (nvidia-smi -L)",
                hint="repeat `cloudddp up`, which starts other machines; is the image right for the type?",
            )


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


def _undo(aws: AWS, cluster_id: str, made: Made, error: BaseException, say: Say) -> None:
    """Take down what an `up` that failed has made. Raises Leftovers or Interrupted; else the caller re-raises."""
    interrupted = isinstance(error, KeyboardInterrupt)
    say("interrupted: taking everything down" if interrupted else "failed: taking everything down")
    with undisturbed(say):
        try:
            if made.uncertain:
                say(f"waiting {SETTLE_SECONDS:g} s, in case AWS made nodes without telling")
                time.sleep(SETTLE_SECONDS)
            report = down(aws, inventory.with_id(cluster_id), known=made.instances, say=lambda _: None)
        except CloudDDPError as second:
            raise Leftovers(
                f"cluster {cluster_id} may be left running{_named(made)}: {second.message}",
                hint="repeat `cloudddp down` until it says that nothing is left",
            ) from None
    if report.left:
        raise leftovers(report, aws.region) from None
    ClusterFolder(cluster_id).forget()
    if interrupted:
        raise Interrupted("interrupted; nothing was left running") from None


def _named(made: Made) -> str:
    return f" ({', '.join(made.instances)})" if made.instances else ""


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
            new = [ssh_rule(block, spec.ssh_port)]
            aws.call("ec2", "authorize_security_group_ingress", GroupId=group["GroupId"], IpPermissions=new)
        if old := [ssh_rule(one, spec.ssh_port) for one in blocks if one != block]:
            aws.call("ec2", "revoke_security_group_ingress", GroupId=group["GroupId"], IpPermissions=old)
    return block
