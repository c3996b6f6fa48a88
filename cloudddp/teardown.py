"""Taking clusters away: everything that carries the tag, instances first, then a second look.

Nothing here trusts the journal or this laptop's memory: what AWS shows is removed, and what is still shown
afterwards is reported with its price. It returns data and prints nothing but progress.
"""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime

from cloudddp import prices
from cloudddp.aws import inventory
from cloudddp.aws.client import AWS
from cloudddp.aws.inventory import Instance, Thing, Where
from cloudddp.errors import AWSError, Leftovers
from cloudddp.plan import moment
from cloudddp.state import ClusterFolder

Say = Callable[[str], None]


@contextlib.contextmanager
def undisturbed(say: Say) -> Iterator[None]:
    """A teardown is the one thing that must not be interrupted: it takes seconds, its absence costs dollars."""
    try:
        before = signal.signal(
            signal.SIGINT, lambda *_: say("still taking everything down; it takes a moment")
        )
    except ValueError:  # not in the main thread
        yield
        return
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


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


def down(aws: AWS, where: Where, *, say: Say) -> Down:
    """Remove everything that carries the cluster's tag, wait, look again, and report.

    Instances first: a security group that is in use cannot be deleted, and the instances are the bill. Safe to
    repeat.
    """
    present = inventory.instances(aws, where)
    live = [instance for instance in present if instance.live]
    cost = _cost_until_now(live, aws.region)
    reasons: list[str] = []
    if live:
        say(f"terminating {len(live)} node{'s' * (len(live) != 1)}")
        for one in {instance.cluster_id for instance in live}:
            ClusterFolder(one).note("terminate", ids=[i.id for i in live if i.cluster_id == one])
        try:
            inventory.terminate(aws, [instance.id for instance in live])
        except AWSError as error:
            reasons.append(error.message)
    waiting = any(instance.state != "terminated" for instance in present)
    if waiting and not reasons:
        inventory.wait_terminated(aws, where, progress=lambda left: say(f"waiting for {left} to end"))
    # Nodes that could not be ended still use the rest: taking it from under them would only hide them.
    deleted = [] if reasons else _delete_things(aws, where, say, reasons)
    still = [i for i in inventory.instances(aws, where) if i.state != "terminated"]
    left: tuple[Instance | Thing, ...] = tuple(still)
    if live or deleted or still:
        left += tuple(inventory.things(aws, where))
    gone_ids = {thing.id for thing in left if isinstance(thing, Thing)}
    if not left:
        for one in {i.cluster_id for i in present if i.cluster_id}:
            ClusterFolder(one).note("gone")
            ClusterFolder(one).forget()
    return Down(
        tuple(i for i in live if i.id not in {s.id for s in still}),
        tuple(thing for thing in deleted if thing.id not in gone_ids),
        left,
        tuple(reasons),
        cost,
    )


def _delete_things(aws: AWS, where: Where, say: Say, reasons: list[str]) -> list[Thing]:
    order = ("network interface", "volume", "security group", "key pair")
    found = sorted(inventory.things(aws, where), key=lambda thing: order.index(thing.kind))
    for thing in found:
        say(f"deleting {thing.kind} {thing.id}")
        error = inventory.delete(aws, thing)
        if error is not None:
            reasons.append(error.message)
    return found


def _cost_until_now(live: list[Instance], region: str) -> float | None:
    total = 0.0
    for instance in live:
        price, start = prices.node_hour(instance.type, region), moment(instance.created)
        if price is None or start is None:
            return None
        total += price * prices.billed_hours((datetime.now(UTC) - start).total_seconds())
    return total


def leftovers(report: Down, region: str) -> Leftovers:
    """Return the error that lists what is left, with ids and dollars an hour."""
    lines, total, unknown = [], 0.0, False
    for thing in report.left:
        if isinstance(thing, Thing):
            lines.append(f"  {thing.kind} {thing.id} {thing.detail}")
            continue
        price = prices.node_hour(thing.type, region)
        total, unknown = total + (price or 0.0), unknown or price is None
        lines.append(
            f"  instance {thing.id} ({thing.state}) {thing.type} "
            + (f"${price:.2f}/h" if price else "price unknown")
        )
    bill = f"${total:.2f} an hour" + (" and more, of unknown price" if unknown else "")
    why = "".join(f"\n  because: {reason}" for reason in report.reasons)
    return Leftovers(
        f"{len(report.left)} things are left, costing {bill}:\n" + "\n".join(lines) + why,
        hint="repeat `cloudddp down`; if it fails again, delete these ids in the AWS console",
    )
