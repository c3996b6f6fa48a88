"""`up`: creates a cluster as planned and waits until it is ready; removes all of it if that does not succeed.

It returns data and raises; it prints nothing but progress.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import UTC, datetime

from cloudddp import payload
from cloudddp.aws import caller as callers
from cloudddp.aws import images, instance_types, networks
from cloudddp.aws.client import AWS
from cloudddp.cluster import name_lock, prices
from cloudddp.cluster.connect import Dial, dial
from cloudddp.cluster.create import CreatedResources
from cloudddp.cluster.inspect import ambiguous, find
from cloudddp.cluster.model import Cluster
from cloudddp.cluster.name_lock import NameTaken
from cloudddp.cluster.ownership import Ownership
from cloudddp.cluster.plan import Plan, plan
from cloudddp.cluster.prices import Price
from cloudddp.cluster.progress import ProgressCallback
from cloudddp.cluster.readiness import check_intact, make_ready, wait_running
from cloudddp.cluster.requests import LaunchContext
from cloudddp.cluster.rollback import roll_back
from cloudddp.cluster.user_data import Identity
from cloudddp.config.spec import ClusterSpec
from cloudddp.errors import CloudDDPError, Command, UsageError
from cloudddp.local_state import ClusterFolder, ClusterRecord
from cloudddp.ssh import keys
from cloudddp.tags import iso


@dataclass(frozen=True, slots=True)
class UpResult:
    """The cluster, ready. `plan` is None if it existed before, so that nothing was changed."""

    cluster: Cluster
    plan: Plan | None


def up(
    aws: AWS,
    spec: ClusterSpec,
    *,
    progress: ProgressCallback,
    confirm: Callable[[Plan, instance_types.TypeInfo], None] = lambda *_: None,
    on_ready: Callable[[Cluster], None] = lambda _: None,
    dial: Dial = dial,
    caller: Callable[[], str] = callers.caller_block,
) -> UpResult:
    """Create the cluster and return when every node is ready to train; check it and return if it already exists.

    `confirm` is called with the plan before anything is created, and raises to refuse. After any error or interrupt
    everything is removed again, and that is verified. `on_ready` is called with the cluster if it was created: from then
    on a caller that is interrupted has to remove it, even if this function does not return. Raises UsageError, NameTaken, CloudDDPError, Interrupted,
    Leftovers.
    """
    instance_types.require_known_type(aws, spec.instance_type)
    existing = [cluster for cluster in find(aws, spec.name) if cluster.live]
    if existing:
        cluster = _check_existing(aws, _created_here(aws, spec, existing), spec, progress, dial)
        return UpResult(cluster, None)
    info = instance_types.describe(aws, spec)
    price = _price(spec, aws.region)
    context = _launch_context(aws, spec, info, caller)
    price = replace(price, disk_gb=max(spec.disk_gb, context.image_disk_gb))
    identity, private_key = _new_identity()
    timer, service = (payload.text(f"infra/node/cloudddp-deadline.{kind}") for kind in ("timer", "service"))
    confirm(plan(spec, context, identity, price, units=(timer, service)), info)
    # Planned again: the user may have taken an hour to answer, and the lifetime of the cluster begins now.
    context = replace(context, now=datetime.now(UTC))
    the_plan = plan(spec, context, identity, price, units=(timer, service))
    folder = ClusterFolder(identity.cluster_id)
    folder.create(_record(aws, spec, the_plan), private_key=private_key, host_public=identity.host_public)
    cluster = _create(aws, spec, the_plan, folder, info.gpus, progress, on_ready, dial)
    return UpResult(cluster, the_plan)


def _create(
    aws: AWS,
    spec: ClusterSpec,
    the_plan: Plan,
    folder: ClusterFolder,
    gpus: int,
    progress: ProgressCallback,
    on_ready: Callable[[Cluster], None],
    dial: Dial,
) -> Cluster:
    """Execute the plan and return the cluster when it is ready, or remove what was created."""
    created = CreatedResources(aws, spec.name, the_plan, folder, progress)
    with folder.being_created():
        try:
            created.create()
            cluster = wait_running(aws, spec, the_plan.cluster_id, progress)
            make_ready(aws, cluster, spec, gpus, progress, dial)
            check_intact(aws, cluster)
            folder.journal("ready", nodes={rank: node.id for rank, node in cluster.nodes.items()})
            on_ready(cluster)  # inside `try`: at every moment this function or the caller removes the cluster
        except NameTaken:
            folder.forget()
            raise
        except BaseException as error:
            roll_back(aws, spec.name, the_plan.cluster_id, created, error, progress)
            raise
    return cluster


def _record(aws: AWS, spec: ClusterSpec, the_plan: Plan) -> ClusterRecord:
    return ClusterRecord(the_plan.cluster_id, spec.name, aws.region, aws.endpoint, iso(the_plan.expires))


def _created_here(aws: AWS, spec: ClusterSpec, existing: list[Cluster]) -> Cluster:
    """Return the live cluster that was created on this computer and that no other `up` is creating.

    Raises NameTaken if there is none.
    """
    ownership = Ownership(aws)
    here = [cluster for cluster in existing if any(map(ownership.created_here, cluster.live))]
    if len(here) > 1:
        raise ambiguous(spec.name, aws.region, here)
    if not here or ClusterFolder(here[0].id).is_being_created():
        cluster = here[0] if here else max(existing, key=lambda c: c.id)  # one with an id, if there is one
        raise name_lock.taken(aws, spec.name, cluster.live[0])
    return here[0]


def _check_existing(
    aws: AWS, cluster: Cluster, spec: ClusterSpec, progress: ProgressCallback, dial: Dial
) -> Cluster:
    """Check that an existing cluster is the requested one, and that it is ready: its `up` may have been killed."""
    nodes = cluster.nodes.values()
    differences = []
    if len(nodes) != spec.nodes:
        differences.append(f"it has {len(nodes)} node{'s' * (len(nodes) != 1)}, {spec.nodes} were requested")
    if cluster.type != spec.instance_type:
        differences.append(f"its nodes are {cluster.type}, {spec.instance_type} was requested")
    if stopped := [node.id for node in nodes if node.state in ("stopping", "stopped")]:
        differences.append(f"stopped: {', '.join(stopped)}")
    if differences:
        raise CloudDDPError(
            f"cluster {cluster.name!r} already exists, but {'; '.join(differences)}. Nothing was changed",
            hint=(Command("down"), " first, or another name with -c"),
        )
    progress(
        f"cluster {cluster.name} already exists; checking whether all of its nodes ({len(nodes)}) are ready"
    )
    if any(node.state != "running" for node in nodes):
        cluster = wait_running(aws, spec, cluster.id, progress)
    make_ready(aws, cluster, spec, 0, progress, dial)
    return cluster


def _price(spec: ClusterSpec, region: str) -> Price:
    known = prices.node_hour(spec.instance_type, region)
    if spec.price is None and known is None:
        raise UsageError(
            f"cloudddp does not know the price of {spec.instance_type} in {region}, and never assumes 0",
            hint="look it up and give it: --price USD (per node and hour), or `price` in cloudddp.toml",
        )
    source = f"on-demand list price of {prices.TABLE_DATE}" if spec.price is None else "as given"
    return Price(spec.price or known or 0.0, spec.nodes, spec.disk_gb, source)


def _launch_context(
    aws: AWS, spec: ClusterSpec, info: instance_types.TypeInfo, caller: Callable[[], str]
) -> LaunchContext:
    image = images.find(aws, spec, info.arch)
    network = networks.choose(aws, spec)
    return LaunchContext(
        image_id=image.id,
        root_device=image.root_device,
        image_disk_gb=image.disk_gb,
        vpc_id=network.vpc_id,
        subnet_id=network.subnet_id,
        zone=network.zone,
        ssh_from=spec.ssh_from or (caller(),),
        owner=callers.owner(aws),
        now=datetime.now(UTC),
    )


def _new_identity() -> tuple[Identity, str]:
    """Return the id and keys of a new cluster, and the private login key, which stays on this computer."""
    login, host = keys.generate(), keys.generate()
    cluster_id = "c-" + secrets.token_hex(5)
    identity = Identity(cluster_id, f"{login.public} cloudddp-{cluster_id}", host.private, host.public)
    return identity, login.private
