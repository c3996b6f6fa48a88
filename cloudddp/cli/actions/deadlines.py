"""Messages about a cluster's deadline and its job: a warning before it, and a report if it ended the job."""

from __future__ import annotations

from collections.abc import Collection
from datetime import UTC, datetime

from cloudddp.cli.console import Console
from cloudddp.cli.formats import duration, moment, toml
from cloudddp.cluster.model import Cluster
from cloudddp.config.spec import Config
from cloudddp.errors import Command

NEAR = 1800.0  # seconds before the deadline from which a launch warns of it


def warn_if_near(console: Console, cluster: Cluster) -> None:
    """Warn if the nodes will terminate soon, which ends the job."""
    if cluster.expires is None:
        return
    left = (cluster.expires - datetime.now(UTC)).total_seconds()
    if left < NEAR:
        when = f"in {duration(left)}" if left > 0 else "now"
        console.warn(
            f"the nodes terminate {when}, at {moment(cluster.expires)} (the cluster's deadline), and this job ends "
            "with them; results that are not pulled by then are lost"
        )


def report_if_passed(
    console: Console, cluster: Cluster, settings: Config, job_id: str, ended: Collection[int]
) -> None:
    """Report that the deadline ended a job, if it did, and which results are lost."""
    if not ended or not cluster.past_deadline or cluster.expires is None:
        return
    console.log(
        f"the deadline of cluster {cluster.name}, {moment(cluster.expires)}, ended job {job_id}; results in "
        f"{toml(settings.job.outputs)} that were not pulled are lost"
    )
    console.log(
        "next time: ", Command("up", "--max-hours", "HOURS"), ", and ", Command("pull"), " while the job runs"
    )
