"""Removes clusters: everything that carries the tag, instances first, and then checks again.

What AWS lists is removed, also without the journal and other local state; what is still listed afterwards,
or could not be checked, is reported with its price. Nothing here may fail for a reason that is
unrelated to AWS: a full disk or a closed terminal must not keep an instance running.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import TypeVar

from cloudddp import timings
from cloudddp.aws import inventory, removal
from cloudddp.aws.client import AWS
from cloudddp.aws.inventory import Filters, Instance, Resource
from cloudddp.cluster import prices
from cloudddp.cluster.created_ids import NOTHING, KnownIds, identity
from cloudddp.cluster.prices import Cost
from cloudddp.config import timing
from cloudddp.errors import (
    AWSError,
    CloudDDPError,
    CredentialsError,
    Leftovers,
    Message,
    ProgressCallback,
    UsageError,
    renewal_first,
)
from cloudddp.formats import plural
from cloudddp.local_state import ClusterFolder
from cloudddp.tags import Tags

Mine = Callable[[Instance | Resource], bool]
T = TypeVar("T", Instance, Resource)
STILL_REMOVING = "still removing everything; this takes a moment"


@dataclass(frozen=True, slots=True)
class DownReport:
    """What `down` removed, and what remains, which the caller must report."""

    terminated: tuple[Instance, ...]
    deleted: tuple[Resource, ...]
    left: tuple[Instance | Resource, ...]
    others: tuple[Instance | Resource, ...]  # of the same name, but not the caller's
    reasons: tuple[str, ...]
    cost: Cost
    error: CloudDDPError | None = None  # that has ended the removal

    @property
    def nothing(self) -> bool:
        """Whether there was nothing to remove."""
        return not self.terminated and not self.deleted and not self.left


def down(
    aws: AWS,
    filters: Filters,
    *,
    progress: ProgressCallback,
    known: KnownIds = NOTHING,
    mine: Mine = lambda _: True,
) -> DownReport:
    """Remove everything that matches the filters and is `mine`, wait, check again, and report.

    Instances first: a security group in use cannot be deleted, and the instances are the bill. Once the group
    is gone, no RunInstances of an `up` that still runs can succeed; only then the key pair is deleted, which
    locks the name. Passes are repeated until one complete check finds nothing; after a call of unknown
    outcome, until AWS lists what it may have created. `known` exists although a filter by tag may not find it
    yet. Safe to repeat. Raises only if the first check fails; later errors are in the report, and what was
    listed last is then reported as remaining.
    """
    work = _Teardown(aws, filters, mine, progress, known)
    present = work.instances()
    unlisted = [
        Resource("instance", one, Tags(), "(state unknown)")
        for one in sorted({*known.instances} - {instance.id for instance in present})
    ]
    work.left = (*(instance for instance in present if instance.live), *unlisted, *known.resources)
    try:
        unknown = work.terminate(present, unlisted)
        running = any(isinstance(one, Instance) and one.live for one in work.left)
        work.left = (*(one for one in work.left if one not in known.resources), *known.resources)
        if not running:
            work.delete_resources()
        work.left = (*work.left, *unknown)
    except CloudDDPError as error:
        work.reasons.append(error.message)
        work.error = error
    return work.report()


@dataclass(slots=True)
class _Teardown:
    """The state of one teardown: what was listed, what was removed, and what remains."""

    _aws: AWS
    _filters: Filters
    _mine: Mine
    _progress: ProgressCallback
    _known: KnownIds
    _gone: set[str] = field(default_factory=set)  # those of `known` whose deletion AWS has confirmed
    _seen: dict[str, Instance] = field(default_factory=dict)  # as first listed
    _deleted: dict[str, Resource] = field(default_factory=dict)
    _others: dict[str, Instance | Resource] = field(default_factory=dict)
    _terminated_some: bool = False
    left: tuple[Instance | Resource, ...] = ()
    reasons: list[str] = field(default_factory=list)
    error: CloudDDPError | None = None

    def instances(self) -> list[Instance]:
        """Return the instances to remove, as AWS lists them now, terminated ones included."""
        found = self._own(inventory.instances(self._aws, self._filters))
        for instance in found:
            self._seen.setdefault(instance.id, instance)
        return found

    def _resources(self) -> list[Resource]:
        """Return the resources to remove: those that AWS lists, and those that it may not list yet."""
        found = self._own(inventory.resources(self._aws, self._filters))
        listed = self._gone | {identity(one) for one in found}
        return found + [resource for resource in self._known.resources if identity(resource) not in listed]

    @property
    def _settling(self) -> bool:
        """Whether AWS may still not know what was created."""
        return time.monotonic() < self._known.listed_from

    def _own(self, found: list[T]) -> list[T]:
        """Return what is the caller's, and remember the rest for the report."""
        own = []
        for one in found:
            if self._mine(one):
                own.append(one)
            elif isinstance(one, Resource) or one.live:
                self._others[one.id] = one
        return own

    def terminate(self, present: Sequence[Instance], unlisted: Sequence[Resource] = ()) -> list[Resource]:
        """Terminate and wait; `left` do not end. Return those of `unlisted` that AWS does not know."""
        live = [instance for instance in present if instance.live]
        ids = [instance.id for instance in live] + [resource.id for resource in unlisted]
        # Before progress is reported or the journal is written: these may fail, too.
        try:
            unknown = set(removal.terminate(self._aws, ids)) if ids else set()
        except AWSError as error:
            if error.code not in removal.REFUSED:
                raise
            self._wait_after_refusal(error)
            return list(unlisted)
        if ids:
            self._terminated_some = True
            self._progress(f"terminating {plural(len(ids), 'node')}")
            _journal_termination(live)
        if ids or any(instance.state != "terminated" for instance in present):
            remaining = removal.wait_terminated(
                self._aws,
                self.instances,
                progress=lambda count: self._progress(f"waiting for {plural(count, 'node')} to terminate"),
            )
            self.left = tuple(remaining)
        return [resource for resource in unlisted if resource.id in unknown]

    def _wait_after_refusal(self, error: AWSError) -> None:
        """Wait for those instances that AWS has agreed to terminate; the others are left."""
        self.reasons.append(error.message)
        self._terminated_some = True
        removal.wait_terminated(self._aws, lambda: [i for i in self.instances() if not i.live])
        self.left = tuple(instance for instance in self.instances() if instance.state != "terminated")

    def delete_resources(self) -> None:
        """Delete what is not an instance, and repeat while something is in use, still listed, or new. What
        EC2 deletes together with an instance (volumes, interfaces) gets some time to disappear by itself."""
        limits = timing.current()
        began = time.monotonic()
        present = self._resources()
        while present or self._terminated_some or (self._known.uncertain and self._settling):
            errors = self._delete(present)
            settling = self._known.uncertain and self._settling  # before the check
            instances = [i for i in self.instances() if i.state != "terminated"]
            present = self._resources()
            self.left = (*instances, *present)
            patience = limits.in_use if errors or instances else limits.still_listed
            permanent = [error for error in errors if not removal.in_use(error)]
            over = not self.left or permanent or time.monotonic() > began + patience
            if over and not settling:
                # If nothing is left, what was in use has been deleted by EC2 or by another command.
                reasons = [self._with_users(error, present) for error in (errors if self.left else permanent)]
                self.reasons += dict.fromkeys(reasons)
                return
            if instances:  # an `up` that runs at the same time has started them
                self.terminate(instances)
                continue
            if errors:
                self._progress("waiting until they are no longer in use")
            with timings.span("wait: resources are no longer in use"):
                time.sleep(removal.POLL_SECONDS)

    def _with_users(self, error: AWSError, present: Sequence[Resource]) -> str:
        """Return the message of an error, with what uses the security groups that are left."""
        if error.code != "DependencyViolation":
            return error.message
        groups = [one.id for one in present if one.kind == "security group"]
        return "; ".join(
            filter(None, [error.message, *(removal.users(self._aws, group) for group in groups)])
        )

    def _delete(self, present: Sequence[Resource]) -> list[AWSError]:
        """Try once to delete these, the key pair last and only if nothing else is left; return the errors."""
        errors: list[AWSError] = []
        for kind in inventory.KINDS:
            if kind == "key pair" and (errors or (self._known.uncertain and self._settling)):
                break
            for resource in (one for one in present if one.kind == kind):
                if resource.id not in self._deleted:
                    self._progress(f"deleting {resource.kind} {resource.id}")
                self._deleted[resource.id] = resource
                new = self._settling and identity(resource) in map(identity, self._known.resources)
                if (error := removal.delete(self._aws, resource, new=new)) is not None:
                    errors.append(error)
                else:
                    self._gone.add(identity(resource))
        return errors

    def report(self) -> DownReport:
        """Return what was removed and what is left, and remove the keys of clusters that are gone."""
        left = {one.id for one in self.left}
        seen_live = [instance for instance in self._seen.values() if instance.live]
        if not left and not self.reasons:
            _record_costs(self._seen.values())
            ids = {one.tags.cluster_id for one in self._seen.values()}
            forget(self._aws, (ids | {one.tags.cluster_id for one in self._deleted.values()}) - {""})
        return DownReport(
            terminated=tuple(instance for instance in seen_live if instance.id not in left),
            deleted=tuple(resource for resource in self._deleted.values() if resource.id not in left),
            left=self.left,
            others=tuple(self._others.values()),
            reasons=tuple(self.reasons),
            cost=_cost(self._seen.values()),
            error=self.error,
        )


def _journal_termination(live: Sequence[Instance]) -> None:
    for one in {instance.tags.cluster_id for instance in live} - {""}:
        # The journal is optional; it must not stop the teardown.
        with contextlib.suppress(OSError, UsageError):
            if (folder := ClusterFolder(one)).exists:
                folder.journal("terminate", ids=[i.id for i in live if i.tags.cluster_id == one])


def forget(aws: AWS, cluster_ids: set[str]) -> None:
    """Remove this computer's keys of clusters that are gone. An id may come from the tag of any removed
    resource, so the cluster is checked: of this region, without a live node, and not being created."""
    for one in cluster_ids:
        with contextlib.suppress(OSError, CloudDDPError):
            folder = ClusterFolder(one)
            record = folder.record()
            if record is None or record.region != aws.region or folder.is_being_created():
                continue
            if any(instance.live for instance in inventory.instances(aws, inventory.with_id(one))):
                continue
            folder.journal("gone")
            folder.forget()


def _by_cluster(seen: Iterable[Instance]) -> dict[str, list[Instance]]:
    clusters: dict[str, list[Instance]] = {}
    for instance in seen:
        clusters.setdefault(instance.tags.cluster_id, []).append(instance)
    return clusters


def _record_costs(seen: Iterable[Instance]) -> None:
    """Record what the clusters have cost, for `cost`: AWS forgets their instances, one after another."""
    for one, members in _by_cluster(seen).items():
        with contextlib.suppress(OSError, CloudDDPError, ValueError):  # as for the termination
            folder, cost = ClusterFolder(one), prices.cost_so_far(members, datetime.now(UTC))
            if (record := folder.record()) is not None and record.usd is None:
                folder.update(usd=cost.usd, usd_is_at_most=cost.at_most)


def _cost(seen: Iterable[Instance]) -> Cost:
    """Return what those clusters have cost that had a live instance; the others had ended before."""
    now = datetime.now(UTC)
    return prices.total_cost(
        prices.cost_so_far(members, now)
        for members in _by_cluster(seen).values()
        if any(member.live for member in members)
    )


def leftovers(report: DownReport) -> Leftovers:
    """Return the error that lists what is left, with ids and dollars an hour."""
    lines, total, unknown = [], 0.0, False
    for one in report.left:
        if isinstance(one, Resource):
            unknown = unknown or one.kind == "instance"
            total += prices.PUBLIC_IPV4_HOUR if one.kind == "Elastic IP" else 0.0
            lines.append(f"  {one.kind} {one.id} {one.detail}".rstrip())
            continue
        price = one.tags.price if one.live else 0.0  # shutting down: no longer billed
        total, unknown = total + (price or 0.0), unknown or price is None
        shown = "price unknown" if price is None else f"${price:.2f}/h"
        until = f", until its deadline at {one.tags.expires:%Y-%m-%d %H:%M} UTC" if one.tags.expires else ""
        lines.append(f"  instance {one.id} ({one.state}) {one.type} {shown}{until}")
    rate = f"${total:.2f} an hour" + (" and more, of unknown price" if unknown else "")
    because = "".join(f"\n  because: {reason}" for reason in report.reasons)
    count = len(report.left)
    what = (
        f"{plural(count, 'resource')} may remain"
        if count
        else "it is not certain that everything was removed"
    )
    text = f"{what}, costing {rate}:\n" + "\n".join(lines) + because
    if isinstance(report.error, CredentialsError):
        return Leftovers(text, hint=renewal_first(report.error, Message("`cloudddp down`")))
    return Leftovers(
        text, hint="repeat `cloudddp down`; if it fails again, delete these ids in the AWS console"
    )
