"""Messages about a cluster's deadline and its job: warnings before it, what happens to a job that nobody
follows, and a report if the deadline ended the job."""

from __future__ import annotations

import contextlib
import math
import threading
from collections.abc import Collection, Iterator
from datetime import UTC, datetime

from cloudddp.cluster.extend import deadline
from cloudddp.cluster.model import Cluster
from cloudddp.config import timing
from cloudddp.config.spec import Config
from cloudddp.errors import Message, q
from cloudddp.formats import counted, dollars, duration, moment
from cloudddp.job.job_request import NewJob
from cloudddp.job.launch_record import s3_place_of
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
            f"the nodes terminate {when}, at {moment(ends)} (the cluster's deadline), and this "
            "job ends with them; results that are not pulled by then are lost"
        )


@contextlib.contextmanager
def warnings(reporter: Reporter, cluster: Cluster | None, settings: Config) -> Iterator[None]:
    """Warn of the deadline 30, 10 and 3 minutes before it, while a job is followed, and name the results that
    it would delete. `cluster` None: never."""
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
            when = f"in {duration(left)}, at {moment(ends)} (the cluster's deadline)"
            reporter.warn(Message(f"the nodes terminate {when}; `cloudddp extend --hours H` moves it"))
            for message in unsaved_work(cluster, settings, jobs=False):
                reporter.warn(message)
        previous = left


def _left(ends: datetime | None) -> float:
    """Return the seconds until a deadline; infinity where there is none."""
    return math.inf if ends is None else (ends - datetime.now(UTC)).total_seconds()


def report_leaving(reporter: Reporter, cluster: Cluster, settings: Config, job: NewJob) -> None:
    """Report in a line what happens to the nodes of a job that nobody follows, and to its results."""
    place = s3_place_of(settings, job.id)
    kept = "results that are not pulled are lost with the nodes"
    if place is not None:
        kept = f"each node copies its results to {place.url} when the job has ended"
    if job.poweroff is not None:
        until = f", at {moment(ends)} at the latest" if (ends := deadline(cluster)) else ""
        after = f"{duration(60 * job.poweroff)} after the job" if job.poweroff else "after the job"
        reporter.log(f"the nodes end by themselves {after}{until}; {kept}")
        return
    nodes = counted(len(cluster.live), "node")
    verb = "costs" if len(cluster.live) == 1 else "cost"
    idle = (
        f", or {duration(60 * cluster.idle_minutes)} after they were last used"
        if cluster.idle_minutes
        else ""
    )
    price = "an unknown amount" if cluster.hour is None else f"{dollars(cluster.hour)} an hour"
    reporter.suggest(
        f"{nodes} {verb} {price}{_at_most(cluster)}{idle}; `cloudddp down` ends them now; {kept}"
    )


def _at_most(cluster: Cluster) -> str:
    ends = deadline(cluster)
    if ends is None:
        return ""
    left = max(_left(ends), 0.0)
    total = "" if cluster.hour is None else f", at most {dollars(cluster.hour * left / 3600)}"
    return f"{total} until {moment(ends)}"


def report_not_started(reporter: Reporter, cluster: Cluster | None, job: NewJob, left: float | None) -> None:
    """Report what happens to the nodes when a job was not started. `left`: seconds until they power off, None
    if they do not; `cluster` None: it is not known."""
    if left is not None:
        which = "this" if job.poweroff is not None else "an earlier"
        reporter.suggest(
            f"job {job.id} was not started; the nodes end by themselves in {duration(left)}, since "
            f"{which} job was launched with --down, unless another job is started: `cloudddp launch` "
            "does that, `cloudddp down` ends them now"
        )
    elif job.poweroff is not None:
        hour = cluster.hour if cluster is not None else None
        price = "" if hour is None else f" and cost {dollars(hour)} an hour"
        ends = deadline(cluster) if cluster is not None else None
        until = f" until {moment(ends)}" if ends else ""
        reporter.suggest(
            f"job {job.id} was not started, so its --down does not end the nodes: they stay "
            f"up{until}{price}; `cloudddp down` stops the bill"
        )


def report_copies(reporter: Reporter, settings: Config, job_id: str) -> None:
    """Report where the nodes copy the results of a job that has ended, if they do."""
    place = s3_place_of(settings, job_id)
    if place is not None:
        reporter.suggest(
            f"the nodes copy outputs and logs to {place.url}; `cloudddp jobs` shows how far they are"
        )


def announced_by_aws(cluster: Cluster, settings: Config, moment: float) -> bool:
    """Whether a notice to the ranks at that moment, in seconds since the epoch, was AWS's, and not the
    cluster's deadline."""
    early = (settings.job.save_minutes + 1) * timing.current().minute
    ends = deadline(cluster)
    return ends is None or ends.timestamp() - moment > early


def report_if_passed(
    reporter: Reporter, cluster: Cluster, settings: Config, job_id: str, ended: Collection[int]
) -> None:
    """Report that the deadline ended a job, if it did, and which results are lost."""
    ends = deadline(cluster)
    if not ended or ends is None or ends > datetime.now(UTC):
        return
    place = s3_place_of(settings, job_id)
    copied = ""
    if place is not None:
        copied = f", but for what the nodes have copied to {place.url}: `cloudddp pull --job {q(job_id)}`"
    reporter.suggest(
        f"the deadline of cluster {cluster.name}, {moment(ends)}, ended job {job_id}; results that were "
        f"not pulled are lost{copied}"
    )
    reporter.suggest("next time: `cloudddp extend --hours H`, and `cloudddp pull` while the job runs")
