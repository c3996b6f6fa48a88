"""Removes everything that a failed `up` has created."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from pathlib import Path

from cloudddp import signals
from cloudddp.aws import inventory
from cloudddp.cluster import name_lock, prices
from cloudddp.cluster.create import CreatedResources
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
    UsageError,
    ignore_progress,
    renewal_first,
)


def roll_back(created: CreatedResources, error: BaseException, *, patient: bool) -> None:
    """Remove everything that a failed `up` has created. `patient`: repeat that for some minutes while AWS
    does not answer.

    Raises Leftovers, Interrupted, or CloudDDPError if another command removed the cluster; if it returns, the
    caller re-raises the original error.
    """
    interrupted = isinstance(error, KeyboardInterrupt)
    signalled: list[bool] = []

    def notice() -> None:
        signalled.append(True)
        created.progress(STILL_REMOVING)

    with signals.protected(notice):
        elsewhere = not interrupted and created.holds_name and _removed_elsewhere(created)
        again = patient and not interrupted
        report = None
        if not created.known.nothing:
            report = _remove(created, interrupted, lambda: again and not signalled)
        remains = report is not None and (report.left or report.reasons)
        if not remains:
            with contextlib.suppress(OSError, UsageError):  # the error that ended `up` matters more
                created.folder.forget()
    if report is not None and remains:
        raise leftovers(report) from None
    followed = isinstance(error, NotLaunched) or (patient and getattr(error, "transient", False))
    if interrupted or (signalled and followed):  # by another attempt
        raise Interrupted("interrupted; nothing was left running") from None
    if elsewhere:
        raise CloudDDPError(
            f"cluster {created.name!r} ({created.folder.id}) was removed by another command while it was "
            "being created; nothing of it is left",
            hint="create it again: `cloudddp up`",
        ) from None


def _remove(created: CreatedResources, interrupted: bool, patient: Callable[[], bool]) -> DownReport:
    """Remove what exists. Raises Leftovers if AWS does not even list it."""
    limits, known, progress = timing.current(), created.known, created.progress
    filters = inventory.with_id(created.folder.id)
    until = time.monotonic() + limits.look_again
    if known.uncertain:
        progress(
            f"waiting {limits.settle:g} s while removing, in case AWS has created something without "
            "confirming it"
        )
    progress(f"{'interrupted' if interrupted else 'failed'}: removing everything")
    while True:
        try:
            report = down(created.aws, filters, known=known, progress=ignore_progress)
            if not getattr(report.error, "transient", False) or not patient() or time.monotonic() > until:
                return report
        except Exception as error:  # a bug, too, must not hide that nodes may be running
            transient = getattr(error, "transient", False)
            if not transient or not patient() or time.monotonic() > until:
                raise Leftovers(
                    f"{_what_may_exist(created)}: {error}",
                    hint=renewal_first(error, "repeat `cloudddp down` until it reports that nothing is left"),
                ) from None
        progress("AWS does not answer; removing everything again in a moment")
        time.sleep(limits.capacity_first)


def _what_may_exist(created: CreatedResources) -> str:
    known, cluster_id = created.known, created.folder.id
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
    return NodeError(f"{error.message}; every node was removed", hint=hint)


def after_loss_of_state(gone: Path) -> CloudDDPError:
    """Return the error of an `up` whose state folder, or a key in it, has gone, and which has removed what it
    had created."""
    return CloudDDPError(
        f"{gone} has gone while the cluster was being created; everything that was created has been removed",
        hint="set CLOUDDDP_HOME to a folder that stays, if this one may go again; then repeat `cloudddp up`",
    )


def _removed_elsewhere(created: CreatedResources) -> bool:
    """Return whether another command has called TerminateInstances for these nodes, or has released the
    name."""
    try:
        found = inventory.instances(created.aws, inventory.with_id(created.folder.id))
        terminated = any(
            i.state in inventory.GOING and i.reason_code == inventory.USER_SHUTDOWN for i in found
        )
        return terminated or name_lock.lost(created.aws, created.name, created.folder.id)
    except Exception:  # nothing may prevent the removal
        return False
