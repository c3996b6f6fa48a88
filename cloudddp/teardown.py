"""Taking clusters away: everything that carries the tag, instances first, then a second look.

Nothing here trusts the journal or this laptop's memory: what AWS shows is removed, and what is still shown
afterwards, or could not be looked at any more, is reported with its price. Nothing here may fail for a reason that
has nothing to do with AWS: a full disk or a terminal that went away must not keep an instance running.
"""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from types import FrameType
from typing import TypeVar

from cloudddp import bill
from cloudddp.aws import inventory
from cloudddp.aws.client import AWS
from cloudddp.aws.inventory import Instance, Thing, Where
from cloudddp.bill import Bill
from cloudddp.errors import AWSError, CloudDDPError, Leftovers, UsageError
from cloudddp.state import ClusterFolder
from cloudddp.tags import Tags

Say = Callable[[str], None]
Mine = Callable[[Instance | Thing], bool]
T = TypeVar("T", Instance, Thing)
IN_USE_SECONDS = 300.0  # how long to wait for what uses a group to let go of it
LOOK_AGAIN_SECONDS = 30.0  # how long what was deleted may still be listed (eventual consistency)
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@contextlib.contextmanager
def undisturbed(say: Say) -> Iterator[None]:
    """Hold off Ctrl-C, SIGTERM and SIGHUP: a teardown takes a minute, its absence costs dollars an hour."""

    def go_on(_: int, __: FrameType | None) -> None:
        say("still taking everything down; it takes a moment")

    try:
        before = {number: signal.signal(number, go_on) for number in SIGNALS}
    except ValueError:  # not in the main thread, where signals do not arrive
        yield
        return
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@dataclass(frozen=True, slots=True)
class Down:
    """What `down` removed, and what is left in spite of it (which the caller must not keep quiet about)."""

    terminated: tuple[Instance, ...]
    deleted: tuple[Thing, ...]
    left: tuple[Instance | Thing, ...]
    others: tuple[Instance | Thing, ...]  # of the same name, but not to be removed
    reasons: tuple[str, ...]
    cost: Bill

    @property
    def nothing(self) -> bool:
        return not self.terminated and not self.deleted and not self.left


def down(aws: AWS, where: Where, *, say: Say, known: Sequence[str] = (), mine: Mine = lambda _: True) -> Down:
    """Remove everything that carries the cluster's tag and is `mine`, wait, look again, and report.

    Instances first: a security group that is in use cannot be deleted, and the instances are the bill. Once the group
    is gone, no RunInstances of an `up` that is still at work can succeed; only then does the key pair go, which
    reserves the name. Passes are repeated until one full look finds nothing. `known` are instances that exist for
    sure, though their tags may not be found yet. Safe to repeat. Raises only where the first look fails; what goes
    wrong later is in the report, with what was last seen counted as left.
    """
    work = _Teardown(aws, where, mine, say)
    present = work.instances()
    unseen = [
        Thing("instance", one, Tags(), "(state unknown)")
        for one in sorted({*known} - {instance.id for instance in present})
    ]
    work.left = (*(instance for instance in present if instance.live), *unseen)
    try:
        refused = work.end_instances(present, unseen)
        if not any(isinstance(one, Instance) and one.live for one in work.left):
            work.remove_things()
        work.left = (*work.left, *refused)
    except CloudDDPError as error:
        work.reasons.append(error.message)
    return work.report()


class _Teardown:
    """One teardown: what it has seen, what it has done, and what is left as far as it knows."""

    def __init__(self, aws: AWS, where: Where, mine: Mine, say: Say) -> None:
        self._aws, self._where, self._mine, self._say = aws, where, mine, say
        self._seen: dict[str, Instance] = {}  # as first seen
        self._found: dict[str, Thing] = {}
        self._others: dict[str, Instance | Thing] = {}
        self._ended_some = False
        self.left: tuple[Instance | Thing, ...] = ()
        self.reasons: list[str] = []

    def instances(self) -> list[Instance]:
        """Return the instances that are to go, as AWS shows them now, terminated ones included."""
        found = self._sift(inventory.instances(self._aws, self._where))
        for instance in found:
            self._seen.setdefault(instance.id, instance)
        return found

    def _things(self) -> list[Thing]:
        return self._sift(inventory.things(self._aws, self._where))

    def _sift(self, found: list[T]) -> list[T]:
        kept = []
        for one in found:
            if self._mine(one):
                kept.append(one)
            elif isinstance(one, Thing) or one.live:
                self._others[one.id] = one
        return kept

    def end_instances(self, present: Sequence[Instance], unseen: Sequence[Thing] = ()) -> list[Thing]:
        """Terminate and wait. Return those of `unseen` that AWS never knew; `left` are those that do not end."""
        live = [instance for instance in present if instance.live]
        ids = [instance.id for instance in live] + [thing.id for thing in unseen]
        # Before progress is printed or the journal is written: these may fail, too.
        try:
            refused = set(inventory.terminate(self._aws, ids)) if ids else set()
        except AWSError as error:
            if error.code not in inventory.REFUSED:
                raise
            self.reasons.append(error.message)
            self._ended_some = True
            self.left = tuple(inventory.wait_terminated(self._aws, self._accepted))
            self.left = tuple(instance for instance in self.instances() if instance.state != "terminated")
            return list(unseen)
        if ids:
            self._ended_some = True
            self._say(f"terminating {len(ids)} node{'s' * (len(ids) != 1)}")
            _note(live)
        if ids or any(instance.state != "terminated" for instance in present):
            waiting = "waiting for {} to end".format
            self.left = tuple(
                inventory.wait_terminated(self._aws, self.instances, progress=lambda n: self._say(waiting(n)))
            )
        return [thing for thing in unseen if thing.id in refused]

    def _accepted(self) -> list[Instance]:
        """Return the instances that AWS has begun to end, of those that are to go."""
        return [instance for instance in self.instances() if not instance.live]

    def remove_things(self) -> None:
        """Delete what is not an instance, again and again while something is in use, still listed, or new.

        What goes with its instance (volumes, interfaces) gets a moment to go by itself.
        """
        began = time.monotonic()
        present = self._things()
        while present or self._ended_some:
            errors = self._delete(present)
            instances = [i for i in self.instances() if i.state != "terminated"]
            present = self._things()
            self.left = (*instances, *present)
            patience = IN_USE_SECONDS if errors or instances else LOOK_AGAIN_SECONDS
            hopeless = [error for error in errors if not inventory.in_use(error)]
            if not self.left or hopeless or time.monotonic() > began + patience:
                # What was in use and is gone now went by itself, or by another command.
                self.reasons += [error.message for error in (errors if self.left else hopeless)]
                return
            if instances:  # an `up` at the same time has started them since
                self.end_instances(instances)
                continue
            if errors:
                self._say("waiting until nothing uses them any more")
            time.sleep(inventory.POLL_SECONDS)

    def _delete(self, things: Sequence[Thing]) -> list[AWSError]:
        """Try once to delete these, the key pair last and only when nothing else is left; return what failed."""
        errors: list[AWSError] = []
        for kind in ("network interface", "volume", "security group", "key pair"):
            if kind == "key pair" and errors:
                break
            for thing in (one for one in things if one.kind == kind):
                if thing.id not in self._found:
                    self._say(f"deleting {thing.kind} {thing.id}")
                self._found[thing.id] = thing
                if (error := inventory.delete(self._aws, thing)) is not None:
                    errors.append(error)
        return errors

    def report(self) -> Down:
        left = {one.id for one in self.left}
        ended = [instance for instance in self._seen.values() if instance.live]
        if not left and not self.reasons:
            seen = {one.cluster_id for one in self._seen.values()}
            _forget(self._aws, (seen | {one.cluster_id for one in self._found.values()}) - {""})
        return Down(
            terminated=tuple(instance for instance in ended if instance.id not in left),
            deleted=tuple(thing for thing in self._found.values() if thing.id not in left),
            left=self.left,
            others=tuple(self._others.values()),
            reasons=tuple(self.reasons),
            cost=_cost(self._seen.values()),
        )


def _note(live: Sequence[Instance]) -> None:
    for one in {instance.cluster_id for instance in live} - {""}:
        with contextlib.suppress(OSError, UsageError):  # the journal helps; it must not stand in the way
            if (folder := ClusterFolder(one)).exists:
                folder.note("terminate", ids=[i.id for i in live if i.cluster_id == one])


def _forget(aws: AWS, cluster_ids: set[str]) -> None:
    """Remove this laptop's keys of clusters that are gone. An id may come from the tag of anything that was removed,
    so the cluster itself is looked at: it must be of this region, without a live node, and not be made right now."""
    for one in cluster_ids:
        with contextlib.suppress(OSError, CloudDDPError):
            folder = ClusterFolder(one)
            record = folder.record()
            if record is None or record.region != aws.region or folder.is_held():
                continue
            if any(node.live for node in inventory.instances(aws, inventory.with_id(one))):
                continue
            folder.note("gone")
            folder.forget()


def _cost(seen: Iterable[Instance]) -> Bill:
    """Return what those clusters have cost of which a node was live; the others ended before."""
    clusters: dict[str, list[Instance]] = {}
    for instance in seen:
        clusters.setdefault(instance.cluster_id, []).append(instance)
    now = datetime.now(UTC)
    return bill.total(
        bill.so_far(members, now) for members in clusters.values() if any(member.live for member in members)
    )


def leftovers(report: Down) -> Leftovers:
    """Return the error that lists what is left, with ids and dollars an hour."""
    lines, total, unknown = [], 0.0, False
    for thing in report.left:
        if isinstance(thing, Thing):
            unknown = unknown or thing.kind == "instance"
            lines.append(f"  {thing.kind} {thing.id} {thing.detail}".rstrip())
            continue
        price = thing.tags.price if thing.live else 0.0  # on its way out: not billed any more
        total, unknown = total + (price or 0.0), unknown or price is None
        words = "price unknown" if price is None else f"${price:.2f}/h"
        lines.append(f"  instance {thing.id} ({thing.state}) {thing.type} {words}")
    rate = f"${total:.2f} an hour" + (" and more, of unknown price" if unknown else "")
    why = "".join(f"\n  because: {reason}" for reason in report.reasons)
    count = len(report.left)
    what = (
        f"{count} thing{'s' * (count != 1)} may be left"
        if count
        else "it is not certain that nothing is left"
    )
    return Leftovers(
        f"{what}, costing {rate}:\n" + "\n".join(lines) + why,
        hint="repeat `cloudddp down`; if it fails again, delete these ids in the AWS console",
    )
