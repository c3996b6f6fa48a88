"""`up`: creates a cluster as planned and waits until it is ready; removes all of it if that does not succeed.

It returns data and raises; it prints nothing but progress.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from cloudddp import signals
from cloudddp.aws import instance_types, inventory, quotas
from cloudddp.aws.client import AWS
from cloudddp.aws.instance_types import TypeInfo
from cloudddp.cluster import name_lock, preconditions, prices
from cloudddp.cluster.capacity_retry import create_in_first_available
from cloudddp.cluster.connect import OVER_SSH, Reach, check_route_settings, remembered
from cloudddp.cluster.create import CreatedResources
from cloudddp.cluster.launch_errors import LaunchAttempt, NotLaunched
from cloudddp.cluster.lookup import Ownership, ambiguous
from cloudddp.cluster.model import Cluster
from cloudddp.cluster.offers import Offer, Offers
from cloudddp.cluster.plan import Plan
from cloudddp.cluster.region_search import in_regions
from cloudddp.cluster.teardown import STILL_REMOVING, down, leftovers
from cloudddp.cluster.user_data import new_identity
from cloudddp.cluster.wait_ready import check_intact, make_ready, wait_running
from cloudddp.config import timing
from cloudddp.config.cluster_spec import ClusterSpec, Placement
from cloudddp.errors import (
    AWSError,
    CloudDDPError,
    ConnectError,
    Excluded,
    Interrupted,
    Leftovers,
    Message,
    NodeError,
    ProgressCallback,
    UsageError,
    ignore_progress,
    renewal_first,
)
from cloudddp.formats import plural
from cloudddp.local_state import ClusterFolder, ClusterRecord
from cloudddp.tags import iso


@dataclass(frozen=True, slots=True)
class UpResult:
    """The cluster, ready. `plan` is None if it existed before, so that nothing was changed."""

    cluster: Cluster
    plan: Plan | None


def check_settings(clouds: Sequence[AWS], spec: ClusterSpec) -> None:
    """Raise UsageError for an unknown instance type, and for settings that exclude each other. No call."""
    check_route_settings(spec)
    instance_types.require_known_types(clouds[0], spec)
    preconditions.check_settings(spec, [aws.region for aws in clouds])


@dataclass(frozen=True, slots=True)
class Callbacks:
    """What `up` calls. `on_others`: with the caller's other clusters in the regions that were asked.
    `confirm`: with a plan per region that can run the cluster, before anything is created; it raises to
    refuse. `on_ready`: with the cluster if it was created: from then on a caller that is interrupted has to
    remove it, even if `up` does not return."""

    progress: ProgressCallback
    confirm: Callable[[Sequence[Plan], TypeInfo], None] = lambda *_: None
    on_others: Callable[[Sequence[Cluster]], None] = lambda _: None
    on_ready: Callable[[Cluster], None] = lambda _: None


def up(
    clouds: Sequence[AWS],
    spec: ClusterSpec,
    call: Callbacks,
    *,
    searched_regions: Sequence[AWS] = (),
    project: str = "",
    reach: Reach = OVER_SSH,
) -> UpResult:
    """Create the cluster and return when every node is ready to train; check it and return if it already
    exists.

    `project` is recorded. `clouds` are the regions to try, in order; `searched_regions`, those in which the
    cluster may exist, if they are more. After any error or interrupt everything is removed again, and that is
    verified. Raises UsageError, NameTaken, CloudDDPError, Interrupted, Leftovers.
    """
    check_settings(clouds, spec)
    looked = in_regions(searched_regions or clouds, spec.name, call.progress)
    call.on_others(looked.others(spec.name))
    for aws, existing in looked.of(spec.name).items():
        cluster = _check_existing(aws, _created_here(aws, spec, existing), spec, call.progress, reach)
        return UpResult(cluster, None)
    if spec.proxy_jump is not None:
        seconds = timing.current().connect
        call.progress(f"logging in to the jump host {spec.proxy_jump}, for up to {seconds:.0f} s")
    reach.check_route(spec)
    offers = Offers([aws for aws in clouds if aws.region in looked.regions], spec, reach.ssh_sources)
    found, excluded = offers.look()
    for one in excluded:
        if one.what:
            call.progress(Excluded(f"left out: {one.what} in {one.region}: {one.reason}"))
    call.confirm([offer.plan(offer.spec, new_identity()[0]) for offer in found], found[0].info)
    market = "prefer" if spec.spot == "prefer" else ""
    create = partial(_create, project=project, market=market, call=call, reach=reach)
    try:
        return UpResult(*create_in_first_available(offers.look, spec, create, call.progress))
    except AWSError as error:
        if error.code not in quotas.EXCEEDED:
            raise
        aws, info = found[0].aws, found[0].info
        vcpus, spot = spec.nodes * info.vcpus, bool(found[0].spec.spot)
        raise quotas.explained(aws, error, info.name, vcpus, spot=spot) from None


def _create(
    offer: Offer, spec: ClusterSpec, *, project: str, market: str, call: Callbacks, reach: Reach
) -> tuple[Cluster, Plan]:
    """Plan, for a lifetime that begins now (the user may have taken an hour to answer), execute the plan and
    return the cluster when it is ready, or remove what was created. Raises NotLaunched as _roll_back does."""
    identity, private_key = new_identity()
    plan = offer.plan(spec, identity)
    aws, folder, progress = offer.aws, ClusterFolder(identity.cluster_id), call.progress
    record = _record(aws, spec, plan, project, market)
    created = CreatedResources(aws, spec.name, folder, progress, plan.launches, plan.requests)
    with folder.being_created():
        try:
            # Inside: `down` takes a record without this mark for that of a killed `up`.
            folder.create(record, private_key=private_key, host_public=identity.host_public)
            created.create()
            cluster = wait_running(aws, spec, identity.cluster_id, progress)
            make_ready(aws, cluster, spec, progress, reach.dial)
            check_intact(aws, cluster)
            folder.check_present()
            folder.journal("ready", nodes={rank: node.id for rank, node in cluster.nodes.items()})
            call.on_ready(cluster)  # in `try`: at every moment this function or the caller can remove it
        except BaseException as error:
            patient = spec.wait_capacity != "0"
            reported = _roll_back(created, error, plan.price.hour, patient=patient)
            if reported is error:
                raise
            raise reported from None
    return cluster, plan


def _roll_back(
    created: CreatedResources, error: BaseException, usd_per_hour: float, *, patient: bool
) -> BaseException:
    """Remove everything that a failed `up` has created, and return the error to raise, with what a launch
    that was accepted has cost at most. `patient`: while waiting for capacity, one call that AWS did not
    answer is a failed attempt, and the removal is repeated for some minutes."""
    interrupted = isinstance(error, KeyboardInterrupt)
    transient = isinstance(error, AWSError) and error.transient
    signalled: list[bool] = []
    gone = remain = None
    if isinstance(error, (OSError, CloudDDPError)) and not created.ids.known.nothing:
        gone = created.folder.missing()  # before the keys are removed

    def notice() -> None:
        signalled.append(True)
        created.progress(STILL_REMOVING)

    with signals.protected(notice):
        elsewhere = not interrupted and created.holds_name and _removed_elsewhere(created)
        again = patient and not interrupted
        if not created.ids.known.nothing:
            remain = _remove(created, interrupted, lambda: again and not signalled)
        if remain is None:
            with contextlib.suppress(OSError, UsageError):  # the error that ended `up` matters more
                created.folder.forget()
    if remain is not None:
        return (
            remain
            if gone is None
            else Leftovers(f"{gone} no longer exists; {remain.message}", hint=remain.hint)
        )
    followed = isinstance(error, NotLaunched) or (patient and transient)
    if interrupted or (signalled and followed):  # by another attempt
        return Interrupted("interrupted; nothing was left running")
    if elsewhere:
        return CloudDDPError(
            f"cluster {created.name!r} ({created.folder.id}) was removed by another command while it was "
            "being created; nothing of it is left",
            hint="create it again: `cloudddp up`",
        )
    if gone is not None:
        return CloudDDPError(
            f"{gone} was removed while the cluster was being created; everything that was created has been "
            "removed",
            hint="set CLOUDDDP_HOME to a folder that stays, if this one may go again; then repeat `cloudddp "
            "up`",
        )
    if created.launched is None:
        return error
    usd = usd_per_hour * prices.billed_hours(time.monotonic() - created.launched)
    return _after_launch(created, error, usd, retried=patient and transient)


def _after_launch(
    created: CreatedResources, error: BaseException, usd: float, *, retried: bool
) -> BaseException:
    """Return the error for a launch that was accepted, has cost so much, and has been removed."""
    if retried and isinstance(error, AWSError):
        error = NotLaunched(LaunchAttempt(created.aws.region, created.zone, error), accepted=True)
    if isinstance(error, NotLaunched):
        error.usd = usd
    if isinstance(error, ConnectError):  # no command can look at the node any more
        hint = error.hint
        if error.may_be_booting or error.other_node is not None:
            hint = Message(
                "for an image that boots more slowly, set a larger ready_minutes in cloudddp.toml; else the "
                "node has failed, and `cloudddp up` starts others"
            )
        return NodeError(f"{error.message}; every node was removed", hint=hint)
    return error


def _remove(created: CreatedResources, interrupted: bool, patient: Callable[[], bool]) -> Leftovers | None:
    """Remove what exists. Return the error if something may remain."""
    limits, known, progress = timing.current(), created.ids.known, created.progress
    filters = inventory.with_id(created.folder.id)
    until = time.monotonic() + limits.refresh_interval
    if known.uncertain:
        progress(
            f"waiting {limits.settle:g} s while removing, in case AWS has created something without "
            "confirming it"
        )
    progress(f"{'interrupted' if interrupted else 'failed'}: removing everything")
    while True:
        failure: Exception | None
        try:
            report = down(created.aws, filters, known=known, progress=ignore_progress)
            failure = report.error
            remain = leftovers(report) if report.left or report.reasons else None
        except Exception as error:  # a bug, too, must not hide that nodes may be running
            failure = error
            remain = Leftovers(
                f"{_what_may_exist(created)}: {error}",
                hint=renewal_first(error, "repeat `cloudddp down` until it reports that nothing is left"),
            )
        if not getattr(failure, "transient", False) or not patient() or time.monotonic() > until:
            return remain
        progress("AWS does not answer; removing everything again in a moment")
        time.sleep(limits.capacity_first)


def _what_may_exist(created: CreatedResources) -> str:
    known, cluster_id = created.ids.known, created.folder.id
    nodes = [f"instance {instance}" for instance in known.instances]
    listed = ", ".join(nodes + [f"{resource.kind} {resource.id}" for resource in known.resources])
    if nodes or created.ids.may_have("nodes"):
        return f"cluster {cluster_id} may still be running{f' ({listed})' if listed else ''}"
    addresses = sum(resource.kind == "Elastic IP" for resource in known.resources)
    price = f", costing ${addresses * prices.PUBLIC_IPV4_HOUR:.3f} an hour" if addresses else ""
    more = " and what the last call may have created" if known.uncertain else ""
    return f"no node was requested, but of cluster {cluster_id} remain {listed or 'resources'}{more}{price}"


def _removed_elsewhere(created: CreatedResources) -> bool:
    """Return whether another command has terminated these nodes, or has released the name."""
    try:
        found = inventory.instances(created.aws, inventory.with_id(created.folder.id))
        terminated = any(
            i.state in inventory.GOING and i.reason_code == inventory.USER_SHUTDOWN for i in found
        )
        return terminated or name_lock.lost(created.aws, created.name, created.folder.id)
    except Exception:  # nothing may prevent the removal
        return False


def _record(aws: AWS, spec: ClusterSpec, plan: Plan, project: str, market: str) -> ClusterRecord:
    return ClusterRecord(
        plan.cluster_id,
        spec.name,
        aws.region,
        aws.endpoint,
        iso(plan.expires),
        user=spec.user or plan.context.image.user,
        connect=spec.connect or "",
        proxy_jump=spec.proxy_jump or "",
        proxy_command=spec.proxy_command or "",
        project=project,
        created=iso(plan.created),
        nodes=spec.nodes,
        node_hour=plan.price.hour / spec.nodes,
        spot=market,
    )


def _created_here(aws: AWS, spec: Placement, existing: list[Cluster]) -> Cluster:
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
    aws: AWS, cluster: Cluster, spec: ClusterSpec, progress: ProgressCallback, reach: Reach
) -> Cluster:
    """Check that an existing cluster is the requested one, and ready: its `up` may have been killed."""
    nodes = cluster.nodes.values()
    differences = []
    if len(nodes) != spec.nodes:
        differences.append(f"it has {plural(len(nodes), 'node')}, {spec.nodes} were requested")
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
    spec = remembered(spec, ClusterFolder(cluster.id).record())
    cluster = wait_running(aws, spec, cluster.id, progress)
    make_ready(aws, cluster, spec, progress, reach.dial)
    return cluster
