"""What has ended the nodes of a cluster, as far as this computer knows: AWS says for an hour how instances
ended, and not when one has powered off."""

from __future__ import annotations

import contextlib
from collections.abc import Collection

from cloudddp import local_state
from cloudddp.aws import inventory
from cloudddp.aws.client import AWS
from cloudddp.cluster import nodes_end
from cloudddp.cluster.lookup import NoCluster
from cloudddp.cluster.model import Cluster
from cloudddp.cluster.region_search import Search
from cloudddp.errors import CloudDDPError, Message, q
from cloudddp.formats import duration, region_list
from cloudddp.job import launch_record
from cloudddp.job.launch_record import s3_destination_of
from cloudddp.local_state import ClusterFolder


def no_cluster(error: NoCluster, name: str, asked: AWS, others: Search) -> NoCluster:
    """Return the error with the regions that were asked, how the last cluster of that name ended, what is
    lost, and what its nodes have copied to S3."""
    parts, hint = [error.message], error.hint
    if others.regions:
        parts.append(f"nor in {region_list(sorted(others.regions))}")
    if others.failed:
        parts.append(f"could not be asked: {others.unanswered()}")
    if not error.is_explained:
        parts.append(_explanation(name, asked.endpoint, error.last, [asked.region, *others.regions]))
    record = launch_record.in_s3(local_state.folders_of(name, asked.endpoint), None)
    if record is not None and (place := s3_destination_of(record.config, record.job)) is not None:
        hint = Message(
            f"job {record.job} was told to copy its results to {place.url}: `cloudddp pull --job "
            f"{q(record.job)}` reads them"
        )
    return NoCluster("; ".join(filter(None, parts)), hint=hint, last=error.last)


def _explanation(name: str, endpoint: str, last: Cluster | None, regions: Collection[str]) -> str:
    """Return how the last cluster of a name ended, why as far as it is known, and what is lost; '' if nothing
    is known. `last`: the newest one that AWS lists; `regions`: those that have answered."""
    own = [
        cluster
        for cluster in local_state.known_clusters()
        if (cluster.name, cluster.endpoint) == (name, endpoint)
    ]
    # The newest one that this computer created and no `down` has removed.
    known = max(((one.expires, one.id) for one in own if one.region in regions), default=("", ""))[1]
    cluster_id = last.id if last is not None else known
    if not cluster_id:
        return ""
    codes = {instance.reason_code for instance in last.gone} if last is not None else set()
    by_itself = last is None or inventory.OWN_SHUTDOWN in codes
    how = "no longer has nodes" if last is None else "ended: its nodes powered off by themselves"
    if last is not None and not by_itself:
        when = f" on {last.ended:%Y-%m-%d at %H:%M} UTC" if last.ended else ""
        how = f"was interrupted by AWS{when}" if inventory.SPOT_SHUTDOWN in codes else f"ended{when}"
    reasons = _reasons(cluster_id, last) if by_itself else []
    why = f" ({'; '.join(reasons)})" if reasons else ""
    lost = "; results that were not pulled from them are lost" if by_itself else ""
    return f"the last one, {cluster_id}, {how}{why}{lost}"


def _reasons(cluster_id: str, last: Cluster | None) -> list[str]:
    """Return what this computer knows that lets nodes power off."""
    if (plan := nodes_end.planned(cluster_id)) is not None:
        return [f"--keep of job {plan.job}: they end after {duration(60 * plan.minutes)} without a use"]
    with contextlib.suppress(CloudDDPError, OSError):  # none is known
        record = launch_record.find(ClusterFolder(cluster_id), None)
        if record.config.job.on_stall == "down":
            return [f"job {record.job} was launched with on_stall = down, which ends them after a stall"]
    idle = last.idle_minutes if last is not None else 0.0
    return [f"idle_minutes = {idle:g}: they end without a job and an SSH connection"] if idle else []
