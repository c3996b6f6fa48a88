"""Removes everything that a failed `up` has created."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from pathlib import Path

from cloudddp import signals
from cloudddp.aws import inventory
from cloudddp.aws.client import AWS
from cloudddp.cluster import name_lock, prices
from cloudddp.cluster.create import CreatedResources
from cloudddp.cluster.created_ids import Known
from cloudddp.cluster.launch_errors import NotLaunched
from cloudddp.cluster.teardown import STILL_REMOVING, DownReport, down, leftovers
from cloudddp.config import timing
from cloudddp.errors import (
    CloudDDPError,
    ConnectError,
    Interrupted,
    Leftovers,
    Message,
    NodeError,
    ProgressCallback,
    UsageError,
    ignore_progress,
    renewal_first,
)
from cloudddp.local_state import ClusterFolder


def roll_back(
    aws: AWS,
    name: str,
    cluster_id: str,
    created: CreatedResources,
    error: BaseException,
    progress: ProgressCallback,
    *,
    patient: bool = False,
) -> None:
    """Remove everything that a failed `up` has created. `patient`: repeat that for some minutes while AWS
    does not answer.

    Raises Leftovers, Interrupted, or CloudDDPError if another command removed the cluster; if it returns, the
    caller re-raises the original error.
    """
    interrupted = isinstance(error, KeyboardInterrupt)
    signalled: list[bool] = []

    def notice() -> None:
        signalled.append(True)
        progress(STILL_REMOVING)

    with signals.protected(notice):
        elsewhere = not interrupted and created.holds_name and _removed_elsewhere(aws, name, cluster_id)
        known = created.known
        again = patient and not interrupted
        report = (
            None
            if known.nothing
            else _remove(aws, cluster_id, created, interrupted, progress, lambda: again and not signalled)
        )
        remains = report is not None and (report.left or report.reasons)
        if not remains:
            with contextlib.suppress(OSError, UsageError):  # the error that ended `up` matters more
                ClusterFolder(cluster_id).forget()
    if report is not None and remains:
        raise leftovers(report) from None
    followed = isinstance(error, NotLaunched) or (patient and getattr(error, "transient", False))
    if interrupted or (signalled and followed):  # by another attempt
        raise Interrupted("interrupted; nothing was left running") from None
    if elsewhere:
        raise CloudDDPError(
            f"cluster {name!r} ({cluster_id}) was removed by another command while it was being created; "
            "nothing of it is left",
            hint="create it again: `cloudddp up`",
        ) from None


def _remove(
    aws: AWS,
    cluster_id: str,
    created: CreatedResources,
    interrupted: bool,
    progress: ProgressCallback,
    patient: Callable[[], bool],
) -> DownReport:
    """Remove what exists. Raises Leftovers if AWS does not even list it."""
    limits, known = timing.current(), created.known
    until = time.monotonic() + limits.look_again
    if known.uncertain:
        progress(
            f"waiting {limits.settle:g} s while removing, in case AWS has created something without "
            "confirming it"
        )
    progress(f"{'interrupted' if interrupted else 'failed'}: removing everything")
    while True:
        try:
            report = down(aws, inventory.with_id(cluster_id), known=known, progress=ignore_progress)
            if not report.transient or not patient() or time.monotonic() > until:
                return report
        except Exception as error:  # a bug, too, must not hide that nodes may be running
            transient = getattr(error, "transient", False)
            if not transient or not patient() or time.monotonic() > until:
                raise Leftovers(
                    f"{_what_may_exist(cluster_id, created, known)}: {error}",
                    hint=renewal_first(error, "repeat `cloudddp down` until it reports that nothing is left"),
                ) from None
        progress("AWS does not answer; removing everything again in a moment")
        time.sleep(limits.capacity_first)


def _what_may_exist(cluster_id: str, created: CreatedResources, known: Known) -> str:
    listed = known.description()
    if created.requested_nodes:
        return f"cluster {cluster_id} may still be running{f' ({listed})' if listed else ''}"
    addresses = sum(one.kind == "Elastic IP" for one in known.resources)
    price = f", costing ${addresses * prices.PUBLIC_IPV4_HOUR:.3f} an hour" if addresses else ""
    more = " and what the last call may have created" if known.uncertain else ""
    return f"no node was requested, but of cluster {cluster_id} remain {listed or 'resources'}{more}{price}"


def after_removal(error: ConnectError) -> NodeError:
    """Return the error for a node that did not answer in time and was removed: no command can look at it any
    more."""
    hint = error.hint
    if "`cloudddp status`" in hint or "`cloudddp down`" in hint:
        hint = Message(
            "for an image that boots more slowly, set a larger ready_minutes in cloudddp.toml; else the "
            "node has failed, and `cloudddp up` starts others"
        )
    return NodeError(f"{error.message}; every node was removed", hint=hint, reason=error.reason)


def after_loss_of_state(gone: Path) -> CloudDDPError:
    """Return the error of an `up` whose state folder, or a key in it, has gone, and which has removed what it
    had created."""
    return CloudDDPError(
        f"{gone} has gone while the cluster was being created; everything that was created has been removed",
        hint="set CLOUDDDP_HOME to a folder that stays, if this one may go again; then repeat `cloudddp up`",
    )


def _removed_elsewhere(aws: AWS, name: str, cluster_id: str) -> bool:
    """Return whether another command has called TerminateInstances for these nodes, or has released the
    name."""
    try:
        found = inventory.instances(aws, inventory.with_id(cluster_id))
        terminated = any(
            i.state in inventory.GOING and i.reason_code == inventory.USER_SHUTDOWN for i in found
        )
        return terminated or name_lock.lost(aws, name, cluster_id)
    except Exception:  # nothing may prevent the removal
        return False
