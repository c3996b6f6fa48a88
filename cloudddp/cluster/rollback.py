"""Removes everything that a failed `up` has created."""

from __future__ import annotations

import time

from cloudddp import signals
from cloudddp.aws import inventory
from cloudddp.aws.client import AWS
from cloudddp.cluster import name_lock
from cloudddp.cluster.capacity import NotLaunched
from cloudddp.cluster.create import CreatedResources
from cloudddp.cluster.progress import ProgressCallback, ignore
from cloudddp.cluster.teardown import STILL_REMOVING, down, leftovers
from cloudddp.config import timing
from cloudddp.errors import CloudDDPError, Command, Interrupted, Leftovers, renewal_first
from cloudddp.local_state import ClusterFolder


def roll_back(
    aws: AWS,
    name: str,
    cluster_id: str,
    created: CreatedResources,
    error: BaseException,
    progress: ProgressCallback,
) -> None:
    """Remove everything that a failed `up` has created.

    Raises Leftovers, Interrupted, or CloudDDPError if another command removed the cluster; if it returns, the caller
    re-raises the original error.
    """
    interrupted = isinstance(error, KeyboardInterrupt)
    signalled: list[bool] = []

    def notice() -> None:
        signalled.append(True)
        progress(STILL_REMOVING)

    with signals.protected(notice):
        elsewhere = not interrupted and created.holds_name and _removed_elsewhere(aws, name, cluster_id)
        try:
            if created.uncertain:
                seconds = timing.current().settle
                progress(f"waiting {seconds:g} s, in case AWS has started nodes without confirming it")
                time.sleep(seconds)
            progress(f"{'interrupted' if interrupted else 'failed'}: removing everything")
            found = inventory.with_id(cluster_id)
            report = down(aws, found, known=created.instances, progress=ignore)
        except Exception as second:  # a bug, too, must not hide that nodes may be running
            listed = f" ({', '.join(created.instances)})" if created.instances else ""
            raise Leftovers(
                f"cluster {cluster_id} may still be running{listed}: {second}",
                hint=renewal_first(
                    second, "repeat ", Command("down"), " until it reports that nothing is left"
                ),
            ) from None
    if report.left or report.reasons:
        raise leftovers(report) from None
    ClusterFolder(cluster_id).forget()
    if interrupted or (
        signalled and isinstance(error, NotLaunched)
    ):  # which would be followed by another attempt
        raise Interrupted("interrupted; nothing was left running") from None
    if elsewhere:
        raise CloudDDPError(
            f"cluster {name!r} ({cluster_id}) was removed by another command while it was being created; nothing of "
            "it is left",
            hint=("create it again: ", Command("up")),
        ) from None


def _removed_elsewhere(aws: AWS, name: str, cluster_id: str) -> bool:
    """Return whether another command has called TerminateInstances for these nodes, or has released the name."""
    try:
        found = inventory.instances(aws, inventory.with_id(cluster_id))
        terminated = any(
            i.state in inventory.GOING and i.reason_code == inventory.USER_SHUTDOWN for i in found
        )
        return terminated or name_lock.lost(aws, name, cluster_id)
    except Exception:  # nothing may prevent the removal
        return False
