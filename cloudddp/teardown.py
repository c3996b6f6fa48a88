"""Taking clusters away: everything that carries the tag, instances first, then a second look.

Nothing here trusts the journal or this laptop's memory: what AWS shows is removed, and what is still shown
afterwards is reported with its price. It returns data and prints nothing but progress.
"""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Callable, Iterator, Sequence
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
IN_USE_SECONDS = 300.0  # how long to wait for what uses a group to let go of it


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


def down(aws: AWS, where: Where, *, say: Say, known: Sequence[str] = ()) -> Down:
    """Remove everything that carries the cluster's tag, wait, look again, and report.

    Instances first: a security group that is in use cannot be deleted, and the instances are the bill. `known` are
    instances that exist for sure, though their tags may not be found yet. Safe to repeat.
    """
    present = inventory.instances(aws, where)
    live = [instance for instance in present if instance.live]
    cost = _cost_until_now(live, aws.region)
    reasons = _terminate(aws, live, sorted({*known} - {i.id for i in present}), say)
    if not reasons and (known or any(instance.state != "terminated" for instance in present)):
        inventory.wait_terminated(aws, where, progress=lambda left: say(f"waiting for {left} to end"))
    # Nodes that could not be ended still use the rest: taking it from under them would only hide them.
    found, errors = ([], []) if reasons else _delete_things(aws, where, say)
    left: tuple[Instance | Thing, ...] = tuple(
        i for i in inventory.instances(aws, where) if i.state != "terminated"
    )
    if live or found or left:
        left += tuple(inventory.things(aws, where))
    left_ids = {thing.id for thing in left}
    if not left:
        for one in {i.cluster_id for i in present if i.cluster_id}:
            ClusterFolder(one).note("gone")
            ClusterFolder(one).forget()
    return Down(
        tuple(i for i in live if i.id not in left_ids),
        tuple(thing for thing in found if thing.id not in left_ids),
        left,
        (*reasons, *errors),
        cost,
    )


def _terminate(aws: AWS, live: Sequence[Instance], unseen: Sequence[str], say: Say) -> list[str]:
    """Ask for the end of the nodes; return why not, where AWS refused."""
    ids = [*(instance.id for instance in live), *unseen]
    if not ids:
        return []
    say(f"terminating {len(ids)} node{'s' * (len(ids) != 1)}")
    for one in {instance.cluster_id for instance in live}:
        ClusterFolder(one).note("terminate", ids=[i.id for i in live if i.cluster_id == one])
    try:
        inventory.terminate(aws, ids)
    except AWSError as error:
        return [error.message]
    return []


def _delete_things(aws: AWS, where: Where, say: Say) -> tuple[list[Thing], list[str]]:
    """Delete what is not an instance, again and again while something is still in use. Return (all seen, why not)."""
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
