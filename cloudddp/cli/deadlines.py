"""Messages about a cluster's deadline and its job: a warning before it, and a report if it ended the job."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from cloudddp.cli.common import Session
from cloudddp.cli.say import duration, note, toml

if TYPE_CHECKING:
    from cloudddp.cluster import Cluster
    from cloudddp.spec import Config

NEAR = 1800.0  # seconds before the deadline from which a launch warns of it


def warn(cluster: Cluster) -> None:
    """Warn if the nodes will terminate soon, which ends the job."""
    if cluster.expires is None:
        return
    left = (cluster.expires - datetime.now(UTC)).total_seconds()
    if left < NEAR:
        when = f"in {duration(left)}" if left > 0 else "now"
        note(
            f"warning: the nodes terminate {when}, at {_moment(cluster)} (the cluster's deadline), and this job ends "
            "with them; results that are not pulled by then are lost"
        )


def fates(session: Session, settings: Config, cluster: Cluster) -> Callable[[], Mapping[int, str]]:
    """Return a function that asks AWS which nodes have ended. Any thread may call it."""

    def ask() -> Mapping[int, str]:
        from cloudddp import cluster as clusters

        return clusters.fates(session.aws(settings), cluster, range(len(cluster.nodes)))

    return ask


def report_ended(cluster: Cluster, settings: Config, job_id: str, ended: Collection[int]) -> None:
    """Report that the deadline ended a job, if it did, and which results are lost."""
    if not ended or not cluster.past_deadline:
        return
    note(
        f"the deadline of cluster {cluster.name}, {_moment(cluster)}, ended job {job_id}; results in "
        f"{toml(settings.job.outputs)} that nobody had pulled are lost"
    )
    note("next time: cloudddp up --max-hours HOURS, and cloudddp pull while the job runs")


def _moment(cluster: Cluster) -> str:
    return f"{cluster.expires:%Y-%m-%d %H:%M} UTC"
