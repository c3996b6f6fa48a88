"""Decodes AWS's answers: the only way from an answer to values that the rest of cloudddp uses.

An answer comes from AWS, or from whatever AWS_ENDPOINT_URL names, through any proxy in between. botocore
checks neither that a field exists nor how long it is, so each call has a record of the fields that it needs.
Text that is only shown is shortened where it is read; a value that is used (an id, a number, an address
block) has to be in its limits.
"""

from __future__ import annotations

import threading
from typing import Annotated, Any, TypeVar

import msgspec

from cloudddp.errors import AWSError
from cloudddp.text import one_line

T = TypeVar("T")

Id = Annotated[str, msgspec.Meta(min_length=1, max_length=256, pattern=r"^[ -~]+\Z")]
"""An id or a name that a later call sends; safe to print."""

Address = Annotated[str, msgspec.Meta(pattern=r"^(((25[0-5]|2[0-4]\d|1?\d?\d)(\.(?!\Z)|\Z)){4})?\Z")]
"""An IPv4 address, or '' where there is none."""

Count = Annotated[int, msgspec.Meta(ge=0, le=10_000_000)]

_SHOWN = 200  # characters of the decoder's message, which can quote a value
# msgspec is not safe while it first reads the fields of a record: see agent/decode.py.
_lock = threading.Lock()


class Record(msgspec.Struct, frozen=True, rename="pascal"):
    """A part of an answer; `vpc_id` is AWS's VpcId. Other fields are ignored."""


class Tagged(Record, frozen=True, kw_only=True):
    """A part of an answer that has tags, which tags.decode reads."""

    tags: tuple[dict[str, str], ...] = ()


def decode(answer: object, kind: type[T], call: str, region: str) -> T:
    """Return a part of an answer as `kind`. `call` is for the message, for example ec2:DescribeVpcs.

    Raises AWSError if a required field is missing, or a value is of another type or not in its limits.
    """
    try:
        with _lock:
            return msgspec.convert(answer, kind)
    except (ValueError, TypeError, RecursionError) as error:  # msgspec's own errors are ValueErrors
        raise malformed(call, region, str(error)) from None


def malformed(call: str, region: str, reason: str) -> AWSError:
    """Return the error for an answer that cannot be used."""
    return AWSError(
        f"AWS's answer to {call} in {region} is not valid: {one_line(reason, _SHOWN)}",
        hint="repeat the command; if AWS_ENDPOINT_URL or a proxy is set, check what answers there",
    )


class _Launched(Record, frozen=True):
    instance_id: Id
    ami_launch_index: Count = 0


class _RunInstances(Record, frozen=True):
    instances: list[_Launched]


class _CreateSecurityGroup(Record, frozen=True):
    group_id: Id


_CREATING: dict[str, type[Any]] = {
    "run_instances": _RunInstances,
    "create_security_group": _CreateSecurityGroup,
}


def check_creating(answer: object, method: str, call: str, region: str) -> None:
    """Raise AWSError if the answer to a creating call does not name what was created."""
    if (kind := _CREATING.get(method)) is not None:
        decode(answer, kind, call, region)
