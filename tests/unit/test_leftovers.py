"""The error that lists what a removal has left."""

from __future__ import annotations

from dataclasses import replace

import pytest
from support.instances import inventory_instance

from cloudddp.aws.inventory import Instance, Resource
from cloudddp.cluster.prices import Cost
from cloudddp.cluster.teardown import DownReport, leftovers
from cloudddp.tags import Tags

NODE = inventory_instance("i-1", Tags(price=1.5))
GROUP = Resource("security group", "sg-1", Tags(), "cloudddp-demo")
EMPTY = DownReport((), (), (), (), (), Cost(0))

LISTS = {
    "one node": (
        (NODE,),
        (),
        "1 resource may remain, costing $1.50 an hour:\n  instance i-1 (running) g5.xlarge $1.50/h",
    ),
    "two": (
        (NODE, replace(NODE, id="i-2")),
        (),
        "2 resources may remain, costing $3.00 an hour:\n  instance i-1 (running) g5.xlarge $1.50/h\n"
        "  instance i-2 (running) g5.xlarge $1.50/h",
    ),
    "shutting down": (
        (replace(NODE, state="shutting-down"),),
        (),
        "1 resource may remain, costing $0.00 an hour:\n  instance i-1 (shutting-down) g5.xlarge $0.00/h",
    ),
    "unknown price": (
        (replace(NODE, tags=Tags()), NODE),
        (),
        "2 resources may remain, costing $1.50 an hour and more, of unknown price:\n"
        "  instance i-1 (running) g5.xlarge price unknown\n  instance i-1 (running) g5.xlarge $1.50/h",
    ),
    "unknown instance": (
        (Resource("instance", "i-9", Tags(), "(state unknown)"), GROUP),
        ("ExpiredToken",),
        "2 resources may remain, costing $0.00 an hour and more, of unknown price:\n"
        "  instance i-9 (state unknown)\n  security group sg-1 cloudddp-demo\n  because: ExpiredToken",
    ),
    "a group": (
        (GROUP, NODE),
        (),
        "2 resources may remain, costing $1.50 an hour:\n  security group sg-1 cloudddp-demo\n"
        "  instance i-1 (running) g5.xlarge $1.50/h",
    ),
    "an Elastic IP": (
        (Resource("Elastic IP", "eipalloc-1", Tags(), "198.51.100.4"),),
        (),
        "1 resource may remain, costing $0.01 an hour:\n  Elastic IP eipalloc-1 198.51.100.4",
    ),
    "only reasons": (
        (),
        ("one", "two"),
        "it is not certain that everything was removed, costing $0.00 an hour:\n\n  because: one\n  because: "
        "two",
    ),
}


@pytest.mark.parametrize(("left", "reasons", "message"), LISTS.values(), ids=LISTS)
def test_leftovers_are_listed_with_their_price(
    left: tuple[Instance | Resource, ...], reasons: tuple[str, ...], message: str
) -> None:
    assert leftovers(replace(EMPTY, left=left, reasons=reasons)).message == message
