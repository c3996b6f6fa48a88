"""Messages about a cluster's deadline and its job: warnings before it, what happens to a job that nobody
follows, and a report if the deadline ended the job."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Collection, Iterator
from datetime import UTC, datetime, timedelta

from cloudddp.cli.actions.unsaved_work import unsaved_work
from cloudddp.cli.console import Console
from cloudddp.cli.formats import counted, dollars, duration, moment
from cloudddp.cluster.model import Cluster
from cloudddp.config import timing
from cloudddp.config.spec import Config
from cloudddp.errors import Command
from cloudddp.job.job_request import NewJob
from cloudddp.job.launch_record import s3_place_of

NEAR = 1800.0  # seconds before the deadline from which a launch warns of it
WARNINGS = (30.0, 10.0, 3.0)  # minutes before the deadline


def warn_if_near(console: Console, cluster: Cluster) -> None:
    """Warn if the nodes will terminate soon, which ends the job."""
    if cluster.expires is None:
        return
    left = (cluster.expires - datetime.now(UTC)).total_seconds()
    if left < NEAR:
        when = f"in {duration(left)}" if left > 0 else "now"
        console.warn(
            f"the nodes terminate {when}, at {moment(cluster.expires)} (the cluster's deadline), and this "
            "job ends with them; results that are not pulled by then are lost"
        )


@contextlib.contextmanager
def warnings(console: Console, cluster: Cluster | None, settings: Config) -> Iterator[None]:
    """Warn of the deadline 30, 10 and 3 minutes before it, while a job is followed, and name the results that
    it would delete. `cluster` None: never."""
    timers = [] if cluster is None else _timers(console, cluster, settings)
    for timer in timers:
        timer.daemon = True
        timer.start()
    try:
        yield
    finally:
        for timer in timers:
            timer.cancel()


def _timers(console: Console, cluster: Cluster, settings: Config) -> list[threading.Timer]:
    if cluster.expires is None:
        return []
    left = (cluster.expires - datetime.now(UTC)).total_seconds()
    before = [minutes * timing.current().minute for minutes in WARNINGS]
    text = f", at {moment(cluster.expires)} (the cluster's deadline)"

    def warn(seconds: float) -> None:
        console.warn(f"the nodes terminate in {duration(seconds)}{text}")
        for message in unsaved_work(cluster, settings, jobs=False):
            console.warn(*message)

    return [threading.Timer(left - seconds, warn, [seconds]) for seconds in before if 0 < seconds < left]


def report_leaving(console: Console, cluster: Cluster, settings: Config, job: NewJob) -> None:
    """Report what happens to the nodes of a job that nobody follows, and what they cost."""
    poweroff, place = job.poweroff, s3_place_of(settings, job.id)
    if place is not None:
        console.log(
            f"when the job has ended, each node copies its outputs and logs to {place.url}, also before "
            "the deadline and after a spot notice; a node that powers off waits for that, at most "
            f"{duration(timing.current().copy)}"
        )
    if poweroff is not None:
        console.log(
            f"the nodes end by themselves {duration(60 * poweroff)} after the job; until then ",
            Command("pull"),
            " copies its results. Then ",
            Command("down"),
            " removes what is left, which costs nothing",
        )
    if cluster.expires is None:
        return
    left = max((cluster.expires - datetime.now(UTC)).total_seconds(), 0.0)
    nodes = counted(len(cluster.live), "node")
    if poweroff is None and cluster.hour is not None:
        console.log(
            f"{nodes} cost{'s' * (len(cluster.live) == 1)} {dollars(cluster.hour)} an hour; until the "
            f"deadline at {moment(cluster.expires)} that is at most {dollars(cluster.hour * left / 3600)}; ",
            Command("down"),
            " ends them now",
        )
    early = settings.job.save_minutes
    saved = cluster.expires - timedelta(minutes=early)
    saving = (
        f"at {moment(saved)} the ranks are told to save (job.save_minutes = {early:g}); " if early else ""
    )
    pulled = "pulled" if place is None else "pulled or copied"
    console.log(f"{saving}results that are not {pulled} by {moment(cluster.expires)} are lost with the nodes")


def report_not_started(console: Console, cluster: Cluster | None, job: NewJob, left: float | None) -> None:
    """Report what happens to the nodes when a job was not started. `left`: seconds until they power off, None
    if they do not; `cluster` None: it is not known."""
    if left is not None:
        console.log(
            f"job {job.id} was not started; the nodes end by themselves in {duration(left)}, since "
            + ("this" if job.poweroff is not None else "an earlier")
            + " job was launched with --down, unless another job is started: ",
            Command("launch"),
            " does that, ",
            Command("down"),
            " ends them now",
        )
    elif job.poweroff is not None:
        hour = cluster.hour if cluster is not None else None
        price = "" if hour is None else f" and cost {dollars(hour)} an hour"
        until = f" until {moment(cluster.expires)}" if cluster is not None and cluster.expires else ""
        console.log(
            f"job {job.id} was not started, so its --down does not end the nodes: they stay "
            f"up{until}{price}; ",
            Command("down"),
            " stops the bill",
        )


def report_copies(console: Console, settings: Config, job_id: str) -> None:
    """Report where the nodes copy the results of a job that has ended, if they do."""
    place = s3_place_of(settings, job_id)
    if place is not None:
        console.log(
            f"the nodes copy outputs and logs to {place.url}; ", Command("jobs"), " shows how far they are"
        )


def announced_by_aws(cluster: Cluster, settings: Config, moment: float) -> bool:
    """Whether a notice to the ranks at that moment, in seconds since the epoch, was AWS's, and not the
    cluster's deadline."""
    early = (settings.job.save_minutes + 1) * timing.current().minute
    return cluster.expires is None or cluster.expires.timestamp() - moment > early


def report_if_passed(
    console: Console, cluster: Cluster, settings: Config, job_id: str, ended: Collection[int]
) -> None:
    """Report that the deadline ended a job, if it did, and which results are lost."""
    if not ended or not cluster.past_deadline or cluster.expires is None:
        return
    place = s3_place_of(settings, job_id)
    console.log(
        f"the deadline of cluster {cluster.name}, {moment(cluster.expires)}, ended job {job_id}; results "
        "that were not pulled are lost"
        + ("" if place is None else f", but for what the nodes have copied to {place.url}: "),
        *([Command("pull", "--job", job_id)] if place is not None else []),
    )
    console.log(
        "next time: ", Command("up", "--max-hours", "HOURS"), ", and ", Command("pull"), " while the job runs"
    )
