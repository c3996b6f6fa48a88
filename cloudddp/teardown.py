"""Taking clusters away: everything that carries the tag, instances first, then a second look.

Nothing here trusts the journal or this laptop's memory: what AWS shows is removed, and what is still shown
afterwards, or could not be looked at any more, is reported with its price. Nothing here may fail for a reason that
has nothing to do with AWS: a full disk or a terminal that went away must not keep an instance running.
"""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from types import FrameType

from cloudddp import prices
from cloudddp.aws import inventory
from cloudddp.aws.client import AWS
from cloudddp.aws.inventory import Instance, Thing, Where
from cloudddp.errors import CloudDDPError, Leftovers
from cloudddp.plan import moment
from cloudddp.state import ClusterFolder

Say = Callable[[str], None]
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
    reasons: tuple[str, ...]
    cost: float | None

    @property
    def nothing(self) -> bool:
        return not self.terminated and not self.deleted and not self.left


def down(aws: AWS, where: Where, *, say: Say, known: Sequence[str] = ()) -> Down:
    """Remove everything that carries the cluster's tag, wait, look again, and report.

    Instances first: a security group that is in use cannot be deleted, and the instances are the bill. `known` are
    instances that exist for sure, though their tags may not be found yet. Safe to repeat. Raises only where the
    first look fails; what goes wrong later is in the report, with what was last seen counted as left.
    """
    present = inventory.instances(aws, where)
    live = [instance for instance in present if instance.live]
    unseen = [
        Thing("instance", one, "", "(state unknown)") for one in sorted({*known} - {i.id for i in present})
    ]
    ids = [*(instance.id for instance in live), *(thing.id for thing in unseen)]
    reasons: list[str] = []
    found: list[Thing] = []
    left: tuple[Instance | Thing, ...] = (*live, *unseen)
    try:
        # Before a word is said or a sum is made: these may fail, too.
        refused = set(inventory.terminate(aws, ids)) if ids else set()
        if ids:
            say(f"terminating {len(ids)} node{'s' * (len(ids) != 1)}")
            _note(live)
        if ids or any(instance.state != "terminated" for instance in present):
            inventory.wait_terminated(aws, where, progress=lambda n: say(f"waiting for {n} to end"))
        # Nodes that could not be ended still use the rest: taking it from under them would only hide them.
        still = [i for i in inventory.instances(aws, where) if i.state != "terminated"]
        left = (*still, *(thing for thing in unseen if thing.id in refused))
        if not any(i.live for i in still):
            found, reasons = _delete_things(aws, where, say)
            last = _last_look(aws, where, hopeless=bool(reasons)) if ids or found or left else ()
            left = (*last, *(thing for thing in unseen if thing.id in refused))
    except CloudDDPError as error:
        reasons.append(error.message)
    cost = _cost_until_now(live)
    left_ids = {thing.id for thing in left}
    if not left and not reasons:
        _forget({i.cluster_id for i in present if i.cluster_id})
    return Down(
        tuple(i for i in live if i.id not in left_ids),
        tuple(thing for thing in found if thing.id not in left_ids),
        left,
        tuple(reasons),
        cost,
    )


def _note(live: Sequence[Instance]) -> None:
    for one in {instance.cluster_id for instance in live}:
        with contextlib.suppress(OSError):  # the journal helps; it must not stand in the way
            ClusterFolder(one).note("terminate", ids=[i.id for i in live if i.cluster_id == one])


def _forget(cluster_ids: set[str]) -> None:
    for one in cluster_ids:
        with contextlib.suppress(OSError):
            ClusterFolder(one).note("gone")
            ClusterFolder(one).forget()


def _delete_things(aws: AWS, where: Where, say: Say) -> tuple[list[Thing], list[str]]:
    """Delete what is not an instance, again and again while something is still in use. Return (all seen, why not).

    What goes with its instance (volumes, interfaces) gets a moment to go by itself.
    """
    order = ("network interface", "volume", "security group", "key pair")
    seen: dict[str, Thing] = {}
    deadline = time.monotonic() + IN_USE_SECONDS
    while True:
        present = sorted(inventory.things(aws, where), key=lambda thing: order.index(thing.kind))
        errors = []
        for thing in present:
            if thing.id not in seen:
                say(f"deleting {thing.kind} {thing.id}")
            seen[thing.id] = thing
            if (error := inventory.delete(aws, thing)) is not None:
                errors.append(error)
        if not any(inventory.in_use(error) for error in errors) or time.monotonic() > deadline:
            return list(seen.values()), [error.message for error in errors]
        say("waiting until nothing uses them any more")
        time.sleep(inventory.POLL_SECONDS)
        if late := [i.id for i in inventory.instances(aws, where) if i.live]:  # what uses them, seen only now
            inventory.terminate(aws, late)


def _last_look(aws: AWS, where: Where, *, hopeless: bool) -> tuple[Instance | Thing, ...]:
    """Return what is still there, looking again for a while: AWS may list for seconds what it has deleted."""
    deadline = time.monotonic() + LOOK_AGAIN_SECONDS
    while True:
        left: list[Instance | Thing] = [i for i in inventory.instances(aws, where) if i.state != "terminated"]
        left += inventory.things(aws, where)
        if not left or hopeless or time.monotonic() > deadline:
            return tuple(left)
        time.sleep(inventory.POLL_SECONDS)


def _cost_until_now(live: list[Instance]) -> float | None:
    total = 0.0
    for instance in live:
        start = moment(instance.created)
        if instance.price is None or start is None:
            return None
        total += instance.price * prices.billed_hours((datetime.now(UTC) - start).total_seconds())
    return total


def leftovers(report: Down) -> Leftovers:
    """Return the error that lists what is left, with ids and dollars an hour."""
    lines, total, unknown = [], 0.0, False
    for thing in report.left:
        if isinstance(thing, Thing):
            unknown = unknown or thing.kind == "instance"
            lines.append(f"  {thing.kind} {thing.id} {thing.detail}".rstrip())
            continue
        price = thing.price if thing.live else 0.0  # on its way out: not billed any more
        total, unknown = total + (price or 0.0), unknown or price is None
        words = "price unknown" if price is None else f"${price:.2f}/h"
        lines.append(f"  instance {thing.id} ({thing.state}) {thing.type} {words}")
    bill = f"${total:.2f} an hour" + (" and more, of unknown price" if unknown else "")
    why = "".join(f"\n  because: {reason}" for reason in report.reasons)
    count = len(report.left)
    what = (
        f"{count} thing{'s' * (count != 1)} may be left"
        if count
        else "it is not certain that nothing is left"
    )
    return Leftovers(
        f"{what}, costing {bill}:\n" + "\n".join(lines) + why,
        hint="repeat `cloudddp down`; if it fails again, delete these ids in the AWS console",
    )
