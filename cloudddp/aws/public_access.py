"""VPC Block Public Access: a setting of an account and region that keeps the internet from its subnets,
whatever their routes are. Read-only."""

from __future__ import annotations

from dataclasses import dataclass

from cloudddp.aws import denials
from cloudddp.aws.answers import Record
from cloudddp.aws.client import AWS
from cloudddp.errors import AWSError

# Both block connections from outside; block-ingress leaves NAT gateways a way out.
_BLOCKING = ("block-bidirectional", "block-ingress")
_UNKNOWN_CALL = ("InvalidAction", "UnsupportedOperation")  # of a partition or an endpoint without the feature
# The other exclusion, allow-egress, is for connections from inside.
_OPEN = "allow-bidirectional"
_NOT_IN_FORCE = ("create-in-progress", "create-failed", "delete-complete", "disable-complete")


class _Options(Record, frozen=True):
    internet_gateway_block_mode: str = "off"
    exclusions_allowed: str = "allowed"


class _Answer(Record, frozen=True):
    vpc_block_public_access_options: _Options


class _Exclusion(Record, frozen=True):
    resource_arn: str = ""
    internet_gateway_exclusion_mode: str = ""
    state: str = ""


@dataclass(frozen=True, slots=True)
class Block:
    """What blocks SSH from public addresses in a region. `excluded`: the ids of the VPCs and subnets that it
    leaves open."""

    mode: str
    exclusions_allowed: bool  # the organization may forbid them
    excluded: frozenset[str]


def block(aws: AWS) -> Block | None:
    """Return what the account blocks; None if it blocks nothing, or does not let the caller know. One AWS
    call, or two.

    Raises AWSError.
    """
    try:
        answer = aws.read("ec2", "describe_vpc_block_public_access_options", _Answer)
        options = answer.vpc_block_public_access_options
        if options.internet_gateway_block_mode not in _BLOCKING:
            return None
        exclusions = aws.listed(
            "ec2",
            "describe_vpc_block_public_access_exclusions",
            "VpcBlockPublicAccessExclusions",
            _Exclusion,
        )
    except AWSError as error:
        if error.code in (*denials.CODES, *_UNKNOWN_CALL):
            return None
        raise
    return Block(
        options.internet_gateway_block_mode,
        options.exclusions_allowed != "not-allowed",
        frozenset(
            one.resource_arn.rpartition("/")[2]
            for one in exclusions
            if one.internet_gateway_exclusion_mode == _OPEN and one.state not in _NOT_IN_FORCE
        ),
    )
