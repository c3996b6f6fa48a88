"""`up`: makes a cluster, step by step as planned, and undoes all of it when it does not come to its end.

Each act is noted in the journal before it is done. What AWS has answered is remembered beside what its tags show,
since AWS may take a while to show what it made. It returns data and raises; it prints nothing but progress.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import Any

from cloudddp import payload, prices, reservation
from cloudddp.aws import discover, inventory
from cloudddp.aws.client import AWS, uninterrupted
from cloudddp.cluster import Cluster, Dial, Say, connect, dial, find, probe
from cloudddp.errors import AWSError, CloudDDPError, Interrupted, Leftovers, NodeError, UsageError
from cloudddp.owners import Ownership
from cloudddp.plan import Identity, Place, Plan, Ref, Request, plan
from cloudddp.prices import Price
from cloudddp.reservation import NameTaken
from cloudddp.spec import ClusterSpec
from cloudddp.ssh import keys
from cloudddp.state import ClusterFolder, ClusterRecord
from cloudddp.tags import iso
from cloudddp.teardown import down, leftovers, undisturbed

SETTLE_SECONDS = 15.0  # what AWS made a moment ago may not be found for so long
# The last answer of several attempts, of which an earlier one may have worked.
UNSURE = (
    "InternalError",
    "InternalFailure",
    "Unavailable",
    "ServiceUnavailable",
    "RequestLimitExceeded",
    "Throttling",
)
NOT_YET = ("InvalidGroup.NotFound", "InvalidKeyPair.NotFound")
LOOK_SECONDS = 15.0  # while SSH is awaited, EC2 is asked so often whether the nodes still live


@dataclass(slots=True)
class Made:
    """What is known to exist, from AWS's own answers: tags of new things may take a while to be found."""

    reserved: bool = False  # the key pair exists, and with it the claim to the name
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
    dial: Dial = dial,
    caller: Callable[[], str] = discover.caller_block,
) -> Up:
    """Make the cluster and return when every node is ready to train; return at once where it is there already.

    `agree` is asked with the plan before anything is made and raises to refuse. On any failure or interrupt
    everything made is removed again, and verified. Raises UsageError, NameTaken, CloudDDPError, Interrupted,
    Leftovers.
    """
    discover.require_known_type(aws, spec.instance_type)
    there = [cluster for cluster in find(aws, spec.name) if cluster.nodes]
    if there:
        return Up(_adopt(aws, _own(aws, spec, there), spec, say, dial), None)
    info = discover.instance_type(aws, spec)
    price = _price(spec, aws.region)
    place = _place(aws, spec, info, caller)
    price = replace(price, disk_gb=max(spec.disk_gb, place.image_disk_gb))
    identity, private_key = _identity()
    timer, service = (payload.text(f"infra/node/cloudddp-deadline.{kind}") for kind in ("timer", "service"))
    agree(plan(spec, place, identity, price, units=(timer, service)), info)
    # Planned again: the answer may have taken an hour, which is not to be taken off the cluster's life.
    the_plan = plan(spec, replace(place, now=datetime.now(UTC)), identity, price, units=(timer, service))
    folder = ClusterFolder(identity.cluster_id)
    folder.create(_record(aws, spec, the_plan), private_key=private_key, host_public=identity.host_public)
    made = Made()
    with folder.held():
        try:
            _carry_out(aws, spec, the_plan, folder, made, say)
            cluster = _wait_running(aws, spec, identity.cluster_id, say)
            _make_ready(aws, cluster, spec, info.gpus, say, dial)
            _check_kept(aws, cluster)
            folder.note("ready", nodes=[node.id for node in cluster.nodes])
        except NameTaken:
            folder.forget()
            raise
        except BaseException as error:
            _undo(aws, spec, identity.cluster_id, made, error, say)
            raise
    return Up(cluster, the_plan)


def _record(aws: AWS, spec: ClusterSpec, the_plan: Plan) -> ClusterRecord:
    created, expires = iso(the_plan.created), iso(the_plan.expires)
    return ClusterRecord(
        the_plan.cluster_id, spec.name, aws.region, aws.endpoint, spec.user, created, expires
    )


def _own(aws: AWS, spec: ClusterSpec, there: list[Cluster]) -> Cluster:
    """Return the one of these live clusters that this computer made and no other `up` is making. Raises NameTaken."""
    whose = Ownership(aws)
    here = [cluster for cluster in there if any(map(whose.made_here, cluster.nodes))]
    if len(here) > 1:
        raise CloudDDPError(
            f"there are {len(here)} clusters named {spec.name!r} in {aws.region}: {', '.join(c.id for c in here)}",
            hint="remove them all with `cloudddp down`, or wait for their deadlines",
        )
    if not here or ClusterFolder(here[0].id).is_held():
        cluster = here[0] if here else max(there, key=lambda c: c.id)  # one without an id comes last
        raise reservation.taken(aws, spec.name, cluster.nodes[0])
    return here[0]


def _adopt(aws: AWS, cluster: Cluster, spec: ClusterSpec, say: Say, dial: Dial) -> Cluster:
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
            hint="`cloudddp down` first, or another name with -c",
        )
    say(f"cluster {cluster.name} is there already; checking that its {len(cluster.nodes)} nodes are ready")
    # Checked again: an earlier `up` may have been killed before it could.
    if any(node.state != "running" for node in cluster.nodes):
        cluster = _wait_running(aws, spec, cluster.id, say)
    _make_ready(aws, cluster, spec, 0, say, dial)
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


def _carry_out(
    aws: AWS, spec: ClusterSpec, the_plan: Plan, folder: ClusterFolder, made: Made, say: Say
) -> None:
    answers: dict[str, Any] = {}
    words = {"key-pair": "key pair", "security-group": "security group", "nodes": "nodes"}
    for request in the_plan.requests:
        if request.step in words:
            say(f"making the {words[request.step]}")
        folder.note(request.step, method=request.method, client_token=request.params.get("ClientToken"))
        if request.step == "key-pair":
            _reserve(aws, spec, the_plan.cluster_id, request, made, say)
            continue
        params = _filled(request.params, answers)
        with uninterrupted(lambda: say("finishing the call in flight, then taking everything down")):
            made.uncertain = request.step == "nodes"
            answers[request.step] = _settled(aws, spec, the_plan.cluster_id, request.method, params, made)
            made.uncertain = False
            if request.step == "nodes":
                made.instances = [item["InstanceId"] for item in answers["nodes"]["Instances"]]
                folder.note("made", instances=made.instances)


def _reserve(aws: AWS, spec: ClusterSpec, cluster_id: str, request: Request, made: Made, say: Say) -> None:
    """Make the key pair, and with it the claim to the name. Raises NameTaken where another cluster has it.

    What an `up` that was killed on this computer has left is removed first.
    """
    deadline = time.monotonic() + SETTLE_SECONDS
    while True:
        with uninterrupted(lambda: say("finishing the call in flight, then taking everything down")):
            try:
                aws.call("ec2", request.method, **request.params)
                made.reserved = True
                return
            except AWSError as error:
                if error.code != reservation.DUPLICATE:
                    raise
        holder = reservation.holder(aws, spec.name)
        if holder is not None and holder.cluster_id == cluster_id:
            made.reserved = True  # botocore has repeated a call whose answer was lost
            return
        if holder is not None:
            if not reservation.abandoned(aws, holder):
                raise reservation.taken(aws, spec.name, holder)
            say(f"removing what is left of cluster {holder.cluster_id}, which had this name")
            report = down(aws, inventory.with_id(holder.cluster_id), say=lambda _: None)
            if report.left or report.reasons:
                raise leftovers(report)
        elif time.monotonic() > deadline:  # EC2 refuses the name, and does not list who has it
            raise NameTaken(
                f"the name {spec.name!r} is taken in {aws.region}, by a key pair that AWS does not list yet; "
                "nothing was made",
                hint="repeat `cloudddp up`, or choose another name with -c",
            )
        time.sleep(0.5)


def _settled(
    aws: AWS, spec: ClusterSpec, cluster_id: str, method: str, params: dict[str, Any], made: Made
) -> Any:
    """Make a call, again where AWS does not see yet what it answered a moment ago (eventual consistency).

    A Duplicate is our own: the group's name holds the cluster's id, so botocore has repeated a call whose answer was
    lost. If something is not found and the reservation is gone too, another command is taking the cluster down.
    """
    deadline = time.monotonic() + SETTLE_SECONDS
    while True:
        try:
            return aws.call("ec2", method, **params)
        except AWSError as error:
            if error.code and error.code not in UNSURE:
                made.uncertain = False  # AWS answered, and said no
            if error.code == "InvalidPermission.Duplicate":
                return {}
            if error.code == "InvalidGroup.Duplicate":
                named = [{"Name": "group-name", "Values": [params["GroupName"]]}]
                return inventory.groups(aws, named)[0]
            if error.code not in NOT_YET or time.monotonic() > deadline:
                raise
            if reservation.lost(aws, spec.name, cluster_id):
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
        running = [i for i in found if i.state == "running" and i.private_ip and i.public_ip]
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


def _make_ready(aws: AWS, cluster: Cluster, spec: ClusterSpec, gpus: int, say: Say, dial: Dial) -> None:
    """Reach every node, give it a host key of its own, and check what a job and the bill depend on: interface, GPUs,
    the armed deadline."""
    say("waiting for SSH on every node")
    began = time.monotonic()
    patience = spec.ready_minutes * 60
    runner = connect(cluster, spec, patience, _still_there(aws, cluster), say=say, dial=dial)
    try:
        left = max(patience - (time.monotonic() - began), 30.0)
        found = probe(runner, cluster, wait_boot=left, await_gpus=gpus)
    finally:
        runner.close()
    for rank, answer in found.items():
        if not answer.deadline_armed:
            raise NodeError(
                f"node {rank} ({cluster.nodes[rank].id}): its deadline is not armed, so it could outlive this laptop",
                hint="does the image run cloud-init and systemd? Deep Learning AMIs do",
            )
        if answer.gpus < gpus and not spec.allow_cpu:
            raise NodeError(
                f"node {rank} ({cluster.nodes[rank].id}) shows {answer.gpus} of {gpus} GPUs (nvidia-smi -L)",
                hint="repeat `cloudddp up`, which starts other machines; is the image right for the type?",
            )


def _check_kept(aws: AWS, cluster: Cluster) -> None:
    """Raise where another command has begun to take the cluster down: what is reported as ready must be whole.

    The nodes are looked at before the reservation, since `down` ends the nodes first: a `down` that begins after this
    look takes away a cluster that was ready.
    """
    now = {i.id: i for i in inventory.instances(aws, inventory.with_id(cluster.id))}
    for rank, node in enumerate(cluster.nodes):
        found = now.get(node.id)
        if found is None or found.state != "running":
            why = "is not there any more" if found is None else f"is {found.state}: {found.reason}"
            raise NodeError(f"node {rank} ({node.id}) {why}")
    if reservation.lost(aws, cluster.name, cluster.id):
        raise NodeError(f"cluster {cluster.name!r} no longer holds its name")


def _still_there(aws: AWS, cluster: Cluster) -> Callable[[], None]:
    """Return a check that raises when a node has ended meanwhile: no use in waiting for it, while others bill."""
    asked = time.monotonic()

    def check() -> None:
        nonlocal asked
        if time.monotonic() - asked < LOOK_SECONDS:
            return
        asked = time.monotonic()
        found = {i.id: i for i in inventory.instances(aws, inventory.with_id(cluster.id))}
        for rank, node in enumerate(cluster.nodes):
            now = found.get(node.id)
            if now is not None and not now.live:
                raise NodeError(f"node {rank} ({node.id}) ended while booting: {now.reason or now.state}")

    return check


def _undo(aws: AWS, spec: ClusterSpec, cluster_id: str, made: Made, error: BaseException, say: Say) -> None:
    """Take down what an `up` that failed has made. Raises Leftovers, Interrupted, or CloudDDPError where another
    command took the cluster down; else the caller re-raises.
    """
    interrupted = isinstance(error, KeyboardInterrupt)
    with undisturbed(say):
        elsewhere = not interrupted and made.reserved and _taken_down(aws, spec, cluster_id)
        try:
            if made.uncertain:
                say(f"waiting {SETTLE_SECONDS:g} s, in case AWS made nodes without telling")
                time.sleep(SETTLE_SECONDS)
            say("interrupted: taking everything down" if interrupted else "failed: taking everything down")
            report = down(aws, inventory.with_id(cluster_id), known=made.instances, say=lambda _: None)
        except Exception as second:  # whatever it is: the user must hear of the nodes, not of a bug
            raise Leftovers(
                f"cluster {cluster_id} may be left running{_named(made)}: {second}",
                hint="repeat `cloudddp down` until it says that nothing is left",
            ) from None
    if report.left or report.reasons:
        raise leftovers(report) from None
    ClusterFolder(cluster_id).forget()
    if interrupted:
        raise Interrupted("interrupted; nothing was left running") from None
    if elsewhere:
        raise CloudDDPError(
            f"cluster {spec.name!r} ({cluster_id}) was taken down by another command while it was being made; "
            "nothing of it is left",
            hint="make it again: cloudddp up",
        ) from None


def _taken_down(aws: AWS, spec: ClusterSpec, cluster_id: str) -> bool:
    """Return whether somebody has asked EC2 to end these nodes, or has released the name."""
    try:
        found = inventory.instances(aws, inventory.with_id(cluster_id))
        asked = any(i.state in inventory.GOING and i.reason_code == inventory.USER_SHUTDOWN for i in found)
        return asked or reservation.lost(aws, spec.name, cluster_id)
    except Exception:  # whatever it is: nothing may keep the nodes from being ended
        return False


def _named(made: Made) -> str:
    return f" ({', '.join(made.instances)})" if made.instances else ""
