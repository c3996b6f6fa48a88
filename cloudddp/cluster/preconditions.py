"""Whether AWS would allow a cluster, found out before anything is created: permissions, and the capacity
reservation of the settings, with the deadline that a capacity block sets.

EC2 answers a dry run of RunInstances with DryRunOperation if the caller has every permission of the launch,
among them iam:PassRole for an instance profile, and with UnauthorizedOperation if a policy of the caller or
of the organization denies it (API Reference, RunInstances, DryRun).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime, timedelta
from typing import Any

import msgspec

from cloudddp.aws import reservations
from cloudddp.aws.answers import THROTTLED
from cloudddp.aws.client import AWS
from cloudddp.aws.reservations import Reservation
from cloudddp.cluster.launch_errors import Next, next_step
from cloudddp.cluster.requests import Ref, Request
from cloudddp.config.cluster_spec import ClusterSpec, Machine, Placement
from cloudddp.errors import AWSError, CloudDDPError, Message, UsageError

# Not in the dry run: what `up` has yet to create, and what no permission depends on.
_OMITTED = ("KeyName", "UserData", "ClientToken", "GroupName")
# "Permissions for users" in "Requirements for Amazon EBS encryption" (Amazon EBS User Guide).
_KMS_ACTIONS = (
    "kms:CreateGrant, kms:Decrypt, kms:DescribeKey, kms:GenerateDataKeyWithoutPlaintext and kms:ReEncrypt*"
)
# Client.InternalError: "typically indicates that the root volume is encrypted and that you do not have
# permissions to access the KMS key for decryption" (Amazon EC2 User Guide, "Troubleshoot instance launch
# issues").
_KEY_CODES = ("Client.InternalError", "Client.InvalidKMSKey.")


def check_settings(spec: ClusterSpec, regions: Iterable[str]) -> None:
    """Raise UsageError for settings that exclude each other, and for a KMS key, given as ARN, of another
    region: EBS uses keys of its own region. Calls nothing."""
    if spec.require_efa and not spec.efa:
        raise UsageError(
            "EFA is required and switched off",
            hint="omit --no-efa (efa = false in cloudddp.toml), or --require-efa",
        )
    if spec.reservation and spec.spot:
        raise UsageError(
            f"spot instances cannot use the capacity reservation {spec.reservation}",
            hint="omit --spot, or --reservation",
        )
    key = spec.kms_key or ""
    key_region = key.split(":")[3] if key.startswith("arn:") else ""
    for region in regions:
        if key_region and key_region != region:
            raise UsageError(
                f"cluster.kms_key is a key in {key_region}, and the cluster would be in {region}: EBS cannot "
                "use it there",
                hint=f"give a key in {region}, or --region {key_region}",
            )


def require_launch(aws: AWS, spec: Machine, launch: Request) -> None:
    """Raise AWSError if AWS would refuse a launch, given as planned. One call, which creates nothing."""
    try:
        aws.dry_run("ec2", launch.method, **dry_run_parameters(launch.params))
    except AWSError as error:
        # Capacity is decided by the launch itself, in each zone, which also waits where AWS throttles.
        if next_step(error.code) is Next.ZONE or error.code in THROTTLED or is_about_default_group(error):
            return
        hint = hint_of_denial(spec, error)
        raise AWSError(f"{error.message}; nothing was created", hint=hint, code=error.code) from None


def hint_of_denial(spec: Machine, error: AWSError) -> str:
    """Return what to do about a launch that AWS refuses in a dry run."""
    if spec.instance_profile and "iam:PassRole" in error.message:
        return (
            f"ask for iam:PassRole on the role of instance profile {spec.instance_profile} (for "
            "ec2.amazonaws.com), or remove instance_profile"
        )
    return error.hint


def dry_run_parameters(params: Mapping[str, Any]) -> dict[str, Any]:
    """Return the parameters of a launch without those that refer to what does not exist yet. Policies refer
    to all others: tags, encryption, the metadata service, the instance profile."""

    def existing(value: Any) -> Any:
        if isinstance(value, list):
            return [existing(item) for item in value]
        return dry_run_parameters(value) if isinstance(value, Mapping) else value

    def has_ref(value: Any) -> bool:
        return any(isinstance(one, Ref) for one in (value if isinstance(value, list) else [value]))

    return {key: existing(one) for key, one in params.items() if key not in _OMITTED and not has_ref(one)}


def is_about_default_group(error: AWSError) -> bool:
    """Return whether the denial is about a security group.

    The dry run has that of the VPC by default, and a policy may allow only groups with the cluster's tags.
    """
    return error.code == "UnauthorizedOperation" and bool(
        re.search(r"arn:aws[a-z-]*:ec2:[^ ]*:security-group/", error.message)
    )


def hint_of_end(spec: Machine, reason_code: str, reason: str) -> str:
    """Return what to do about nodes that EC2 has ended instead of running them, or ''."""
    if not reason_code.startswith(_KEY_CODES) and not reason.startswith(_KEY_CODES):
        return ""
    which = (
        f"KMS key {spec.kms_key}" if spec.kms_key else "the account's KMS key for EBS, or that of the image,"
    )
    return Message(f"EC2 could not use {which} in this region: {key_hint('it')}; then `cloudddp up` again")


def key_hint(key: str) -> str:
    """Return what to check about a KMS key that EC2 cannot use."""
    own = f"check that {key} exists in this region, is enabled and symmetric, and that its policy and yours"
    return f"{own} allow {_KMS_ACTIONS}"


TIME_TO_SAVE = timedelta(minutes=10)
"""The nodes' own deadline is this much earlier: powering off lets ranks save a snapshot, and EC2's
termination may not. EC2 gives the same time: its warning comes 40 minutes before the end of the block."""


def find_reservation(aws: AWS, spec: Placement) -> Reservation | None:
    """Return the reservation of the settings, checked except for its platform; None where they name none.

    Raises UsageError for settings that do not match it, CloudDDPError if it has no room. It has no placement
    group where that is of another account: names are for a group's owner only (EC2 User Guide, "Shared
    placement groups"), and EC2 finds the group through the reservation. One AWS call, two where it has too
    few instances available or a group.
    """
    if spec.reservation is None:
        return None
    found = reservations.find(aws, spec.reservation)
    name = reservation_title(found)
    if found.instance_type != spec.instance_type:
        raise UsageError(
            f"{name} is for {found.instance_type}, and {spec.instance_type} was requested",
            hint=f"give --instance-type {found.instance_type}",
        )
    if spec.zones and found.zone not in spec.zones:
        raise UsageError(
            f"{name} is in zone {found.zone}, not in {' or '.join(spec.zones)}",
            hint=f"give --zones {found.zone}",
        )
    if found.interruptible:
        raise UsageError(
            f"{name} is interruptible: its instances need a market type that cloudddp does not support",
            hint="use --spot, or another --reservation",
        )
    if found.tenancy != "default":
        raise UsageError(
            f"{name} has tenancy {found.tenancy}, and nodes are launched with tenancy default",
            hint="use a reservation with tenancy default",
        )
    check_state(found)
    _check_room(aws, found, spec)
    group = found.placement_group_arn
    if group and f":{aws.call('sts', 'get_caller_identity').get('Account')}:" not in group:
        return msgspec.structs.replace(found, placement_group_arn="")
    return found


def reservation_title(found: Reservation) -> str:
    return f"capacity {'block' if found.block else 'reservation'} {found.id}"


def latest_reservation_end(found: Reservation) -> datetime | None:
    """Return until when the nodes may live; None: instances continue after an on-demand one ends."""
    return found.end - found.ends_before - TIME_TO_SAVE if found.block and found.end else None


def check_state(found: Reservation) -> None:
    """Raise CloudDDPError unless the reservation is active."""
    if found.state == "active":
        return
    when = f"; it starts at {found.start.astimezone(UTC):%Y-%m-%d %H:%M} UTC" if found.start else ""
    name = reservation_title(found)
    raise CloudDDPError(
        f"{name} is {found.state}, not active{when if found.state == 'scheduled' else ''}",
        hint="repeat the command when it is active"
        if found.state in ("scheduled", "pending", "payment-pending", "assessing", "delayed")
        else "give another --reservation, or omit it for on-demand capacity",
    )


def _check_room(aws: AWS, found: Reservation, spec: Placement) -> None:
    """Raise CloudDDPError if the reservation has too few instances available: not for those that have ended,
    which are available again after some minutes of clean-up, for which the launch waits."""
    if found.available >= spec.nodes:
        return
    name = reservation_title(found)
    if found.total < spec.nodes:
        raise UsageError(
            f"{name} is for {found.total} instance{'s' * (found.total != 1)}, and {spec.nodes} were "
            "requested",
            hint=f"give --nodes {found.total}, or enlarge the reservation",
        )
    running = reservations.used(aws, found.id)
    if found.total - running < spec.nodes:
        raise CloudDDPError(
            f"{name} has {found.available} of {found.total} instances available, and {spec.nodes} "
            "were requested",
            hint=f"terminate instances that use it ({running} in this account), or give fewer --nodes",
        )
