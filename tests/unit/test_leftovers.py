"""What the calls of an `up` may have created, and the error that lists what a removal has left."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from support.instances import inventory_instance

from cloudddp.aws.inventory import Instance, Resource
from cloudddp.cluster.created_ids import CreatedIds
from cloudddp.cluster.prices import Cost
from cloudddp.cluster.requests import Request
from cloudddp.cluster.teardown import DownReport, leftovers
from cloudddp.errors import AWSError, CredentialsError, UsageError
from cloudddp.tags import Tags

NODE = inventory_instance("i-1", Tags(price=1.5))
GROUP = Resource("security group", "sg-1", Tags(), "cloudddp-demo")
EMPTY = DownReport((), (), (), (), (), Cost(0))

ONE = "  instance i-1 (running) g5.xlarge"
REMAINS = "1 resource may remain, costing"
REMAIN = "2 resources may remain, costing"
LISTS = {
    "one node": ((NODE,), (), f"{REMAINS} $1.50 an hour:\n{ONE} $1.50/h"),
    "two": (
        (NODE, replace(NODE, id="i-2")),
        (),
        f"{REMAIN} $3.00 an hour:\n{ONE} $1.50/h\n  instance i-2 (running) g5.xlarge $1.50/h",
    ),
    "shutting down": (
        (replace(NODE, state="shutting-down"),),
        (),
        f"{REMAINS} $0.00 an hour:\n  instance i-1 (shutting-down) g5.xlarge $0.00/h",
    ),
    "unknown price": (
        (replace(NODE, tags=Tags()), NODE),
        (),
        f"{REMAIN} $1.50 an hour and more, of unknown price:\n{ONE} price unknown\n{ONE} $1.50/h",
    ),
    "unknown instance": (
        (Resource("instance", "i-9", Tags(), "(state unknown)"), GROUP),
        ("ExpiredToken",),
        f"{REMAIN} $0.00 an hour and more, of unknown price:\n"
        "  instance i-9 (state unknown)\n  security group sg-1 cloudddp-demo\n  because: ExpiredToken",
    ),
    "a group": (
        (GROUP, NODE),
        (),
        f"{REMAIN} $1.50 an hour:\n  security group sg-1 cloudddp-demo\n{ONE} $1.50/h",
    ),
    "an Elastic IP": (
        (Resource("Elastic IP", "eipalloc-1", Tags(), "198.51.100.4"),),
        (),
        f"{REMAINS} $0.01 an hour:\n  Elastic IP eipalloc-1 198.51.100.4",
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


# -- what a rollback has to remove, by how each call ended ---------------------------------------------------


KEY = Request("key-pair", "import_key_pair", {"KeyName": "cloudddp-demo"})
NEW_GROUP = Request("security-group", "create_security_group", {"GroupName": "cloudddp-demo-c"})
RULES = Request("ingress-rules", "authorize_security_group_ingress", {})
ADDRESS = Request("address-0", "allocate_address", {})
NODES = Request("nodes", "run_instances", {})


def failure(code: str = "", *, retries: int = 0, unsent: bool = False) -> AWSError:
    error = AWSError("refused", code=code)
    error.retries, error.unsent = retries, unsent
    return error


@pytest.mark.parametrize(
    ("request_", "error", "uncertain"),
    [
        pytest.param(NEW_GROUP, failure("VpcIdNotSpecified"), False, id="refused"),
        pytest.param(NEW_GROUP, failure("InternalError"), True, id="AWS failed, maybe after the effect"),
        pytest.param(NODES, failure("RequestLimitExceeded"), True, id="throttled after attempts"),
        pytest.param(NODES, failure(), True, id="no answer"),
        pytest.param(NODES, failure(unsent=True), True, id="no connection"),
        pytest.param(KEY, failure(unsent=True), False, id="no connection, for a key pair"),
        pytest.param(KEY, failure(), True, id="no answer, for a key pair"),
        pytest.param(ADDRESS, failure("AddressLimitExceeded"), False, id="address refused"),
        pytest.param(ADDRESS, failure("AddressLimitExceeded", retries=1), True, id="address, after a retry"),
        pytest.param(NODES, CredentialsError("no credentials", renew="log in"), False, id="no credentials"),
        pytest.param(NODES, UsageError("a bad parameter"), False, id="not sent"),
        pytest.param(NODES, KeyError("a bug"), True, id="another exception"),
    ],
)
def test_failed_call_may_have_created_something(request_: Request, error: Exception, uncertain: bool) -> None:
    created = CreatedIds()
    with pytest.raises(type(error)), created.calling(request_):
        raise error
    assert created.known.uncertain is uncertain
    assert created.known.nothing is not uncertain
    assert created.may_have(request_.step) is uncertain


@pytest.mark.parametrize(
    ("request_", "answer", "found"),
    [
        pytest.param(KEY, {"KeyPairId": "key-1"}, [("key pair", "key-1", "cloudddp-demo")], id="key pair"),
        pytest.param(
            NEW_GROUP,
            {"GroupId": "sg-1"},
            [("security group", "sg-1", "cloudddp-demo-c")],
            id="security group",
        ),
        pytest.param(
            ADDRESS,
            {"AllocationId": "e-1", "PublicIp": "192.0.2.1"},
            [("Elastic IP", "e-1", "192.0.2.1")],
            id="Elastic IP",
        ),
        pytest.param(RULES, {}, [], id="rules"),
    ],
)
def test_answered_call_has_created_what_it_names(
    request_: Request, answer: dict[str, Any], found: list[tuple[str, str, str]]
) -> None:
    created = CreatedIds()
    with created.calling(request_):
        pass
    kept = created.answered(request_, answer)
    expected = [Resource(kind, id_, Tags(), detail) for kind, id_, detail in found]
    assert (created.known.resources, [kept]) == (tuple(expected), expected or [None])
    assert not created.known.uncertain


def test_instances_are_kept() -> None:
    created = CreatedIds()
    with created.calling(NODES):
        assert created.may_have("nodes")
    created.answered(NODES, {"Instances": [{"InstanceId": "i-1"}, {"InstanceId": "i-2"}]})
    assert created.known.instances == ("i-1", "i-2")
    assert not created.may_have("nodes")


def test_address_of_a_repeated_call_may_exist_twice() -> None:
    created = CreatedIds()
    with created.calling(ADDRESS):
        pass
    created.answered(ADDRESS, {"AllocationId": "e-1", "ResponseMetadata": {"RetryAttempts": 1}})
    assert [one.id for one in created.known.resources] == ["e-1"]
    assert created.known.uncertain
