"""What ends the nodes of a cluster before its deadline, and what has ended them, as far as this computer
knows: the journal of its launches says whether the last job had --down, AWS for an hour how the instances
ended. AWS does not say when an instance has powered off."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from cloudddp import local_state
from cloudddp.aws.client import AWS
from cloudddp.cluster import lookup
from cloudddp.cluster.lookup import NoCluster
from cloudddp.cluster.model import Cluster
from cloudddp.cluster.region_search import Search
from cloudddp.errors import CloudDDPError, Message, q
from cloudddp.formats import duration, region_list
from cloudddp.job import launch_record
from cloudddp.job.launch_record import LaunchRecord, s3_place_of
from cloudddp.local_state import ClusterFolder


@dataclass(frozen=True, slots=True)
class PlannedEnd:
    """The nodes power off `minutes` after `job`, which was launched with --down from this computer."""

    job: str
    minutes: float

    @property
    def text(self) -> str:
        """When they do, for people."""
        return (
            f"{duration(60 * self.minutes)} after the end of job {self.job}, which ends its nodes (--down); "
            "an hour later if its launch was interrupted"
        )


def planned(cluster: Cluster) -> PlannedEnd | None:
    """Return what ends the nodes after the newest job, or None. `jobs` asks the nodes, and also knows
    when."""
    record = _newest(cluster.id)
    if record is None or record.poweroff is None:
        return None
    return PlannedEnd(record.job, record.poweroff)


def no_cluster(error: NoCluster, name: str, asked: AWS, others: Search) -> NoCluster:
    """Return the error with the regions that were asked, how the last cluster of that name ended, what is
    lost, and what its nodes have copied to S3."""
    text = ""
    if "reached its deadline" not in error.message:
        text = _explanation(name, asked.endpoint, error.last, [asked.region, *others.regions])
    message = "; ".join(part for part in (error.message, *_nor_elsewhere(others), text) if part)
    record = copied_job(name, asked.endpoint)
    place = s3_place_of(record.config, record.job) if record is not None else None
    if record is None or place is None:
        return NoCluster(message, hint=error.hint, last=error.last)
    hint = Message(
        f"job {record.job} was told to copy its results to {place.url}: `cloudddp pull --job "
        f"{q(record.job)}` reads them"
    )
    return NoCluster(message, hint=hint, last=error.last)


def copied_job(name: str, endpoint: str, wanted: str | None = None) -> LaunchRecord | None:
    """Return the newest job of a cluster of that name, or the one of the id `wanted`, whose nodes were told
    to copy its results to S3, as far as this computer knows."""
    return launch_record.in_s3(local_state.folders_of(name, endpoint), wanted)


def _nor_elsewhere(others: Search) -> list[str]:
    """Return the other regions without the cluster, and those that could not be asked, as parts of a
    sentence."""
    found = [f"nor in {region_list(sorted(others.regions))}"] if others.regions else []
    return found + ([f"could not be asked: {others.unanswered()}"] if others.failed else [])


def _explanation(name: str, endpoint: str, last: Cluster | None, regions: Collection[str]) -> str:
    """Return how the last cluster of a name ended, why as far as it is known, and what is lost; '' if nothing
    is known. `last`: the newest one that AWS lists; `regions`: those that have answered, none with a live
    one."""
    cluster_id = last.id if last is not None else _not_removed(name, endpoint, regions)
    if not cluster_id:
        return ""
    how = lookup.how_ended(last) if last is not None else "has no nodes any more"
    by_itself = last is None or how == lookup.POWERED_OFF
    reasons = _reasons(last, _newest(cluster_id)) if by_itself else []
    why = f" ({'; '.join(reasons)})" if reasons else ""
    lost = "; results that were not pulled from them are lost" if by_itself else ""
    return f"the last one, {cluster_id}, {how}{why}{lost}"


def _reasons(last: Cluster | None, record: LaunchRecord | None) -> list[str]:
    """Return what this computer knows that lets nodes power off."""
    found = []
    if record is not None and record.poweroff is not None:
        found.append(
            f"job {record.job} was launched with --down, so they end {duration(60 * record.poweroff)} after "
            "it"
        )
    elif record is not None and record.config.job.on_stall == "down":
        found.append(f"job {record.job} was launched with on_stall = down, which ends them after a stall")
    idle = last.idle_minutes if last is not None else 0.0
    if idle and not found:
        found.append(f"idle_minutes = {idle:g}: they end without a job and an SSH connection")
    return found


def _newest(cluster_id: str) -> LaunchRecord | None:
    if not cluster_id or not ClusterFolder(cluster_id).jobs():
        return None
    try:
        return launch_record.find(ClusterFolder(cluster_id), None)
    except (CloudDDPError, OSError):
        return None


def _not_removed(name: str, endpoint: str, regions: Collection[str]) -> str:
    """Return the newest cluster of that name that this computer created there and no `down` has removed, or
    ''."""
    known = [
        (record.expires, record.id)
        for record in local_state.known_clusters()
        if (record.name, record.endpoint) == (name, endpoint) and record.region in regions
    ]
    return max(known, default=("", ""))[1]
