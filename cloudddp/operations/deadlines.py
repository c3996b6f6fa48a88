"""Messages about a cluster's deadline and its job: warnings before it, what happens to a job that nobody
follows, and a report if the deadline ended the job."""

from __future__ import annotations

import contextlib
import math
import threading
from collections.abc import Collection, Iterator
from datetime import UTC, datetime

from cloudddp.cluster import nodes_end
from cloudddp.cluster.model import Cluster
from cloudddp.cluster.nodes_end import deadline
from cloudddp.config import timing
from cloudddp.config.spec import Config
from cloudddp.errors import Message, q
from cloudddp.formats import dollars, duration, format_time, plural
from cloudddp.job.job_request import NewJob
from cloudddp.job.launch_record import s3_destination_of
from cloudddp.operations.reporter import Reporter
from cloudddp.operations.unsaved_work import unsaved_work

NEAR = 1800.0  # seconds before the deadline from which a launch warns of it
WARNINGS = (30.0, 10.0, 3.0)  # minutes before the deadline


def warn_if_near(reporter: Reporter, cluster: Cluster) -> None:
    """Warn if the nodes will terminate soon, which ends the job."""
    ends = deadline(cluster)
    if ends is not None and (left := _left(ends)) < NEAR:
        when = f"in {duration(left)}" if left > 0 else "now"
        reporter.warn(
            f"the nodes terminate {when}, at {format_time(ends)} (the cluster's deadline), and this job ends "
            "with them; results that are not pulled by then are lost"
        )


@contextlib.contextmanager
def warnings(reporter: Reporter, cluster: Cluster | None, settings: Config) -> Iterator[None]:
    """Warn of the deadline before it, while a job is followed, and name the results that it would delete."""
    done = threading.Event()
    if cluster is not None:
        threading.Thread(target=_warn, args=(reporter, cluster, settings, done), daemon=True).start()
    try:
        yield
    finally:
        done.set()


def _warn(reporter: Reporter, cluster: Cluster, settings: Config, done: threading.Event) -> None:
    minute = timing.current().minute
    previous = _left(deadline(cluster))
    while not done.wait(minute / 12):
        ends = deadline(cluster)  # `extend` may move it meanwhile, also to an earlier time
        left = _left(ends)
        if ends is not None and left > 0 and any(left <= one * minute < previous for one in WARNINGS):
            when = f"in {duration(left)}, at {format_time(ends)} (the cluster's deadline)"
            reporter.warn(Message(f"the nodes terminate {when}; `cloudddp extend --hours H` moves it"))
            for message in unsaved_work(cluster, settings, jobs=False):
                reporter.warn(message)
        previous = left


def _left(ends: datetime | None) -> float:
    """Return the seconds until a deadline; infinity where there is none."""
    return math.inf if ends is None else (ends - datetime.now(UTC)).total_seconds()


def report_unfollowed(reporter: Reporter, cluster: Cluster, settings: Config, job: NewJob) -> None:
    """Report in a line what happens to the nodes of a job that nobody follows, and to its results."""
    kept = "results that are not pulled are lost with the nodes"
    if (place := s3_destination_of(settings, job.id)) is not None:
        kept = f"each node copies its results to {place.url} when the job has ended"
    price, ends = "an unknown amount", deadline(cluster)
    if (hour := cluster.hour) is not None:
        most = dollars(hour * max(_left(ends), 0.0) / 3600) if ends else ""
        price = f"{dollars(hour)} an hour" + (f", at most {most} until their deadline" if ends else "")
    cost = f"{plural(len(cluster.live), 'node')} {'costs' if len(cluster.live) == 1 else 'cost'} {price}"
    reporter.suggest(f"{cost}; {nodes_end.of(cluster).sentence}; {kept}")


def report_not_started(reporter: Reporter, cluster: Cluster | None, job: NewJob) -> None:
    """Report what happens to the nodes when a job was not started, where this job or an earlier one has
    --down. `cluster` None: the nodes were not reached, and know nothing of this job."""
    if cluster is not None and nodes_end.planned(cluster.id) is not None:
        reporter.suggest(
            f"job {job.id} was not started; {nodes_end.of(cluster).sentence}; `cloudddp launch` starts it "
            "again"
        )
    elif job.poweroff is not None:
        reporter.suggest(
            f"job {job.id} was not started, so its --down does not end the nodes: `cloudddp status` shows "
            "when they end, `cloudddp down` ends them now"
        )


def report_copies(reporter: Reporter, settings: Config, job_id: str) -> None:
    """Report where the nodes copy the results of a job that has ended, if they do."""
    if (place := s3_destination_of(settings, job_id)) is not None:
        reporter.suggest(
            f"the nodes copy outputs and logs to {place.url}; `cloudddp jobs` shows how far they are"
        )


def announced_by_aws(cluster: Cluster, settings: Config, at: float) -> bool:
    """Whether a notice to the ranks at that time, since the epoch, was AWS's, and not the deadline's."""
    early = (settings.job.save_minutes + 1) * timing.current().minute
    ends = deadline(cluster)
    return ends is None or ends.timestamp() - at > early


def report_if_passed(
    reporter: Reporter, cluster: Cluster, settings: Config, job_id: str, ended: Collection[int]
) -> None:
    """Report that the deadline ended a job, if it did, and which results are lost."""
    ends = deadline(cluster)
    if not ended or ends is None or ends > datetime.now(UTC):
        return
    copied = ""
    if (place := s3_destination_of(settings, job_id)) is not None:
        copied = f", but for what the nodes have copied to {place.url}: `cloudddp pull --job {q(job_id)}`"
    reporter.suggest(
        f"the deadline of cluster {cluster.name}, {format_time(ends)}, ended job {job_id}; results that were "
        f"not pulled are lost{copied}"
    )
    reporter.suggest("next time: `cloudddp extend --hours H`, and `cloudddp pull` while the job runs")
