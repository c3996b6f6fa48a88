"""Removing a cluster of the caller: what AWS lists and what this computer has recorded.

Nothing here imports what runs jobs: the command that ends a bill must not fail for a reason of theirs.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from cloudddp import local_state, signals
from cloudddp.aws import inventory
from cloudddp.aws.client import AWS
from cloudddp.cluster import created_ids, teardown
from cloudddp.cluster.created_ids import KnownIds
from cloudddp.cluster.teardown import DownReport
from cloudddp.errors import CloudDDPError, ProgressCallback
from cloudddp.local_state import ClusterRecord
from cloudddp.operations.reporter import Reporter
from cloudddp.operations.session import Session


def take_down(session: Session[Reporter], aws: AWS) -> DownReport:
    """Remove the caller's cluster of the configured name in this region. Raises Leftovers if that fails."""
    name = session.settings.cluster.name
    with _finishing(session) as progress:
        report = teardown.down(
            aws,
            inventory.named(name),
            progress=progress,
            mine=session.account.ownership(aws).mine,
            known=created_ids.combined(_own_journals(aws, name)),
        )
    _check(report)
    # What AWS no longer lists, or never did.
    teardown.forget(aws, {record.id for record in _records(aws, name)})
    return report


def take_down_id(session: Session[Reporter], aws: AWS, cluster_id: str) -> DownReport:
    """Remove the cluster with this id. Raises Leftovers if that fails."""
    with _finishing(session) as progress:
        report = teardown.down(aws, inventory.with_id(cluster_id), progress=progress)
    _check(report)
    return report


@contextlib.contextmanager
def _finishing(session: Session[Reporter]) -> Iterator[ProgressCallback]:
    """Yield where progress is reported; Ctrl-C meanwhile says that the removal goes on."""
    with session.console.progress() as progress, signals.protected(lambda: progress(teardown.STILL_REMOVING)):
        yield progress


def _check(report: DownReport) -> None:
    if report.left or report.reasons:
        raise teardown.leftovers(report)


def _records(aws: AWS, name: str) -> list[ClusterRecord]:
    """Return what this computer has created under that name in the region."""
    where = (name, aws.region, aws.endpoint)
    return [
        cluster
        for cluster in local_state.known_clusters()
        if (cluster.name, cluster.region, cluster.endpoint) == where
    ]


def _own_journals(aws: AWS, name: str) -> Iterator[KnownIds]:
    """Yield what this computer knows about clusters of that name, unless an `up` is creating them."""
    for record in _records(aws, name):
        with contextlib.suppress(OSError, CloudDDPError):  # an unreadable journal counts as empty
            folder = local_state.ClusterFolder(record.id)
            if not folder.is_being_created():
                yield created_ids.from_journal(folder)
