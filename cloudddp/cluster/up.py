"""`up`: creates a cluster as planned and waits until it is ready; removes all of it if that does not succeed.

It returns data and raises; it prints nothing but progress.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from cloudddp.aws import instance_types, quotas
from cloudddp.aws.client import AWS
from cloudddp.aws.instance_types import TypeInfo
from cloudddp.cluster import connect, name_lock, node_addresses
from cloudddp.cluster.capacity_retry import create_in_any
from cloudddp.cluster.connect import Dial, dial
from cloudddp.cluster.create import CreatedResources
from cloudddp.cluster.launch_errors import Next, NotLaunched, attempt, next_step
from cloudddp.cluster.lookup import Ownership, ambiguous
from cloudddp.cluster.model import Cluster
from cloudddp.cluster.name_lock import NameTaken
from cloudddp.cluster.offers import Offer, Offers
from cloudddp.cluster.plan import Plan
from cloudddp.cluster.preconditions import check_reservation_settings, require_key_region
from cloudddp.cluster.prices import billed_hours
from cloudddp.cluster.region_search import in_regions
from cloudddp.cluster.requests import check_efa_settings
from cloudddp.cluster.rollback import after_loss_of_state, after_removal, roll_back
from cloudddp.cluster.user_data import new_identity
from cloudddp.cluster.wait_ready import check_intact, make_ready, wait_running
from cloudddp.config import timing
from cloudddp.config.spec import ClusterSpec, connection_mode
from cloudddp.errors import AWSError, CloudDDPError, ConnectError, Leftovers, ProgressCallback
from cloudddp.formats import counted
from cloudddp.local_state import ClusterFolder, ClusterRecord
from cloudddp.tags import iso


@dataclass(frozen=True, slots=True)
class UpResult:
    """The cluster, ready. `plan` is None if it existed before, so that nothing was changed."""

    cluster: Cluster
    plan: Plan | None


def check_settings(clouds: Sequence[AWS], spec: ClusterSpec) -> None:
    """Raise UsageError for an unknown instance type, and for settings that exclude each other. Makes no call.

    `clouds`: the regions.
    """
    connect.check_route_settings(spec)
    instance_types.require_known_types(clouds[0], spec)
    check_reservation_settings(spec)
    check_efa_settings(spec)
    for aws in clouds:
        require_key_region(spec, aws.region)


def up(
    clouds: Sequence[AWS],
    spec: ClusterSpec,
    *,
    progress: ProgressCallback,
    confirm: Callable[[Sequence[Plan], TypeInfo], None] = lambda *_: None,
    on_ready: Callable[[Cluster], None] = lambda _: None,
    looked_in: Sequence[AWS] = (),
    project: str = "",
    on_others: Callable[[Sequence[Cluster]], None] = lambda _: None,
    dial: Dial = dial,
    check_route: Callable[[ClusterSpec], None] = connect.check_route,
    ssh_sources: Callable[[AWS, ClusterSpec], tuple[str, ...]] = connect.ssh_sources,
) -> UpResult:
    """Create the cluster and return when every node is ready to train; check it and return if it already
    exists.

    `project` is recorded. `clouds` are the regions to try, in order; `looked_in`, those in which the cluster
    may exist, if they are more. `on_others` is called with the caller's other clusters there. `confirm` is
    called with a plan per region that can run the cluster, before anything is created, and raises to refuse.
    After any error or interrupt everything is removed again, and that is verified. `on_ready` is called with
    the cluster if it was created: from then on a caller that is interrupted has to remove it, even if this
    function does not return. Raises UsageError, NameTaken, CloudDDPError, Interrupted, Leftovers.
    """
    check_settings(clouds, spec)
    looked = in_regions(looked_in or clouds, spec.name, progress)
    on_others(looked.others(spec.name))
    for aws, existing in looked.of(spec.name).items():
        cluster = _check_existing(aws, _created_here(aws, spec, existing), spec, progress, dial)
        return UpResult(cluster, None)
    if spec.proxy_jump is not None:
        progress(f"logging in to the jump host {spec.proxy_jump}, for up to {timing.current().connect:.0f} s")
    check_route(spec)
    offers = Offers([aws for aws in clouds if aws.region in looked.regions], spec, ssh_sources)
    found, excluded = offers.look()
    for one in excluded:
        if one.what:
            progress(f"left out: {one.what} in {one.region}: {one.reason}")
    confirm([offer.plan(offer.spec, new_identity()[0]) for offer in found], found[0].info)
    market = "prefer" if spec.spot == "prefer" else ""
    create = partial(_create, project=project, market=market, progress=progress, on_ready=on_ready, dial=dial)
    try:
        return UpResult(*create_in_any(offers.look, spec, create, progress))
    except AWSError as error:
        if error.code not in quotas.EXCEEDED:
            raise
        aws, info = found[0].aws, found[0].info
        vcpus, spot = spec.nodes * info.vcpus, bool(found[0].spec.spot)
        raise quotas.explained(aws, error, info.name, vcpus, spot=spot) from None


def _create(
    offer: Offer,
    spec: ClusterSpec,
    *,
    project: str,
    market: str,
    progress: ProgressCallback,
    on_ready: Callable[[Cluster], None],
    dial: Dial,
) -> tuple[Cluster, Plan]:
    """Plan, for a lifetime that begins now (the user may have taken an hour to answer), write the local
    state, execute the plan and return the cluster when it is ready, or remove what was created.

    Raises NotLaunched if other zones may have the capacity that was short here.
    """
    identity, private_key = new_identity()
    the_plan = offer.plan(spec, identity)
    aws, folder, gone = offer.aws, ClusterFolder(identity.cluster_id), None
    record = _record(aws, spec, the_plan, project, market)
    created = CreatedResources(aws, spec.name, folder, progress, the_plan.launches, the_plan.requests)
    with folder.being_created():
        try:
            # Inside: `down` takes a record without this mark for that of a killed `up`.
            folder.create(record, private_key=private_key, host_public=identity.host_public)
            created.create()
            cluster = _wait_running(offer, spec, the_plan, created, progress)
            make_ready(aws, cluster, spec, progress, dial)
            check_intact(aws, cluster)
            folder.check_present()
            folder.journal("ready", nodes={rank: node.id for rank, node in cluster.nodes.items()})
            on_ready(cluster)  # inside `try`: at every moment this function or the caller removes the cluster
        except NameTaken:
            folder.forget()
            raise
        except BaseException as error:
            if isinstance(error, (OSError, CloudDDPError)) and not created.known.nothing:
                gone = folder.missing()  # before the keys are removed
            try:
                roll_back(created, error, patient=spec.wait_capacity != "0")
            except Leftovers as left:
                raise (
                    left if gone is None else Leftovers(f"{gone} has gone; {left.message}", hint=left.hint)
                ) from None
            if gone is not None:
                raise after_loss_of_state(gone) from None
            if created.launched is None:
                raise
            usd = the_plan.price.hour * billed_hours(time.monotonic() - created.launched)
            raise _accepted(error, aws.region, created.zone, spec, usd) from None
    return cluster, the_plan


def _accepted(error: BaseException, region: str, zone: str, spec: ClusterSpec, usd: float) -> BaseException:
    """Return the error of a launch that was accepted and removed again, with what it has cost at most.

    While waiting for capacity, one call that AWS did not answer is a failed attempt.
    """
    if isinstance(error, AWSError) and error.transient and spec.wait_capacity != "0":
        error = NotLaunched([attempt(region, zone, error)], error, accepted=True)
    if isinstance(error, NotLaunched):
        error.usd = usd
    return after_removal(error) if isinstance(error, ConnectError) else error


def _wait_running(
    offer: Offer, spec: ClusterSpec, the_plan: Plan, created: CreatedResources, progress: ProgressCallback
) -> Cluster:
    """Wait until every node runs and has its addresses.

    Raises NotLaunched if EC2 accepted the launch and lacks the capacity after all.
    """
    aws, gpus = offer.aws, offer.info.gpus
    try:
        cluster = wait_running(
            aws, spec, the_plan.cluster_id, gpus, progress, addressed=not the_plan.elastic_ips
        )
    except AWSError as error:
        if next_step(error.code) is not Next.ZONE:
            raise
        zones = [launch.zone for launch in the_plan.launches]
        remaining = zones[zones.index(created.zone) + 1 :]
        failed = [attempt(aws.region, created.zone, error)]
        raise NotLaunched(failed, error, remaining, accepted=True) from None
    if the_plan.elastic_ips:
        node_addresses.associate(aws, cluster, progress)
        cluster = wait_running(aws, spec, the_plan.cluster_id, gpus, progress)
    return cluster


def _record(aws: AWS, spec: ClusterSpec, the_plan: Plan, project: str, market: str) -> ClusterRecord:
    return ClusterRecord(
        the_plan.cluster_id,
        spec.name,
        aws.region,
        aws.endpoint,
        iso(the_plan.expires),
        user=spec.user or the_plan.context.image.user,
        connect=spec.connect or "",
        proxy_jump=spec.proxy_jump or "",
        proxy_command=spec.proxy_command or "",
        project=project,
        created=iso(the_plan.created),
        nodes=spec.nodes,
        node_hour=the_plan.price.hour / spec.nodes,
        spot=market,
    )


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
    """Check that an existing cluster is the requested one, and that it is ready: its `up` may have been
    killed."""
    nodes = cluster.nodes.values()
    differences = []
    if len(nodes) != spec.nodes:
        differences.append(f"it has {counted(len(nodes), 'node')}, {spec.nodes} were requested")
    if cluster.type not in spec.types:
        differences.append(f"its nodes are {cluster.type}, {' or '.join(spec.types)} was requested")
    if differences:
        raise CloudDDPError(
            f"cluster {cluster.name!r} already exists, but {'; '.join(differences)}. Nothing was changed",
            hint="`cloudddp down` first, or another name with -c",
        )
    for rank, node in cluster.nodes.items():
        if node.state != "pending":
            cluster.require_running(rank)
    progress(
        f"cluster {cluster.name} already exists; checking whether all of its nodes ({len(nodes)}) are ready"
    )
    spec = connect.remembered(spec, ClusterFolder(cluster.id).record())
    if any(node.state != "running" for node in nodes):
        cluster = wait_running(aws, spec, cluster.id, cluster.gpus, progress, addressed=False)
    if connection_mode(spec) == "public" and node_addresses.missing(aws, cluster):
        node_addresses.associate(aws, cluster, progress)
        cluster = wait_running(aws, spec, cluster.id, cluster.gpus, progress)
    make_ready(aws, cluster, spec, progress, dial)
    return cluster
