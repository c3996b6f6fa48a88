"""`doctor`: checks whether `up` would work with these settings, without creating anything.

Each check asks the same functions as `up`, so that both give the same reasons.
"""

from __future__ import annotations

import email.utils
import os
import re
import shutil
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, date, datetime, timedelta
from typing import Any, Literal, TypeVar

from cloudddp.aws import caller as callers
from cloudddp.aws import denials, images, instance_types, quotas
from cloudddp.aws.answers import action
from cloudddp.aws.client import AWS
from cloudddp.aws.images import Image, key_problem
from cloudddp.aws.instance_types import TypeInfo
from cloudddp.aws.networks import Subnet
from cloudddp.aws.reservations import Reservation
from cloudddp.cluster import offers, region_search
from cloudddp.cluster.connect import check_route, is_direct, ssh_sources
from cloudddp.cluster.offers import Offer
from cloudddp.cluster.plan import Plan
from cloudddp.cluster.preconditions import (
    check_reservation_platform,
    dry_run_parameters,
    find_reservation,
    hint_of_denial,
    is_about_default_group,
    key_hint,
    reservation_title,
)
from cloudddp.cluster.prices import Price
from cloudddp.cluster.requests import Ref, Request, choose_interfaces, needs_elastic_ip
from cloudddp.cluster.user_data import new_identity
from cloudddp.config.spec import ClusterSpec, connection_mode
from cloudddp.errors import AWSError, CloudDDPError
from cloudddp.files import state_home
from cloudddp.text import one_line, reason_of

Status = Literal["pass", "note", "warn", "fail"]
T = TypeVar("T")

_SKEW_WARN, _SKEW_FAIL = 30.0, 240.0  # seconds; AWS refuses requests that are more than 300 s off
_DISK_FAIL, _DISK_WARN = 100 << 20, 1 << 30  # free bytes for keys, journals and results
_PRICE_AGE = 180  # days
_CONNECT_SECONDS = 5.0
_OF_REGION = ("instance type", "image", "network", "price", "quota", "permissions")
# An SSH server of AWS (CodeCommit, which not every region has), and the variable that names another one.
_SSH_SERVER, SSH_VARIABLE = "git-codecommit.us-east-1.amazonaws.com:22", "CLOUDDDP_CHECKSSH"


@dataclass(frozen=True, slots=True)
class Check:
    """The result of one check. `fix` says what to type or change next; `region` is '' for what no region
    determines."""

    name: str
    status: Status
    detail: str
    fix: str = ""
    region: str = ""
    candidate: str = ""  # type and market, where there are several


class ChecksFailed(CloudDDPError):
    """`up` would not work; `checks` are all of them."""

    def __init__(self, message: str, checks: Sequence[Check]) -> None:
        super().__init__(message)
        self.checks = checks


def examine(clouds: list[AWS], spec: ClusterSpec) -> Iterator[Check]:
    """Yield the checks of settings that up.check_settings accepts, those of this computer first.

    Makes read-only calls, and creating ones as DryRun.
    """
    yield from _this_computer()
    names = {aws.region: f"{aws.region}: " if len(clouds) > 1 else "" for aws in clouds}
    refused = region_search.not_enabled(region_search.ask(clouds), clouds[0])
    for region, problem in refused.items():
        yield replace(_failed(f"{names[region]}region", problem), region=region)
    clouds = [aws for aws in clouds if aws.region not in refused]
    if not clouds:
        yield _not_checked("identity", "clock", "SSH", *_OF_REGION)
        return
    try:
        identity = clouds[0].call("sts", "get_caller_identity")
    except CloudDDPError as error:
        wrong_clock = isinstance(error, AWSError) and error.code == "ClockSkew"
        yield _failed("clock" if wrong_clock else "identity", error)
        yield _not_checked(*(["identity"] if wrong_clock else ["clock"]), "SSH", *_OF_REGION)
        return
    owner = callers.owner_of(identity)
    yield Check("identity", "pass", f"{owner} in account {one_line(str(identity.get('Account', '')), 20)}")
    yield from _credentials(clouds[0], spec)
    yield _clock(identity)
    ssh_from, address = _caller(clouds[0], spec)
    yield address
    yield _outgoing_ssh() if is_direct(spec) else _route(spec)
    for aws in clouds:
        seen: list[Check] = []  # of this region: what does not depend on the type is shown once
        for one in spec.candidates:
            label = f"{one.label}: " if len(spec.candidates) > 1 else ""
            for check in _once(_region(aws, one, ssh_from, owner), seen):
                name = f"{names[aws.region]}{label}{check.name}"
                yield replace(check, name=name, region=aws.region, candidate=label)


def _once(checks: Iterator[Check], seen: list[Check]) -> Iterator[Check]:
    """Yield equal checks once, such as those of several Elastic IPs; failures once for each candidate."""
    failed: list[Check] = []
    for check in checks:
        known = failed if check.status == "fail" else seen
        if check not in known:
            known.append(check)
            yield check


# -- this computer -------------------------------------------------------------------------------------------


def _this_computer() -> Iterator[Check]:
    ssh, lacks = shutil.which("ssh"), "there is no `ssh` in PATH, which the verb ssh needs"
    yield (
        Check("OpenSSH", "pass", ssh) if ssh else Check("OpenSSH", "warn", lacks, "install an OpenSSH client")
    )
    folder = state_home()
    while not folder.exists():
        folder = folder.parent
    free = shutil.disk_usage(folder).free
    status: Status = "fail" if free < _DISK_FAIL else "warn" if free < _DISK_WARN else "pass"
    shown = f"{free / (1 << 30):.1f} GiB free at {folder}"
    yield Check("disk", status, shown, "" if status == "pass" else "free some space, or set CLOUDDDP_HOME")


def _outgoing_ssh() -> Check:
    """Check that a firewall lets connections to port 22 out, where the nodes answer SSH."""
    server = os.environ.get(SSH_VARIABLE) or _SSH_SERVER
    found = re.fullmatch(r"([A-Za-z0-9.:-]{1,253}):(\d{1,5})", server)
    if found is None:
        return Check("outgoing SSH", "fail", f"{SSH_VARIABLE} is not HOST:PORT", f"unset {SSH_VARIABLE}")
    try:
        socket.create_connection((found[1], int(found[2])), _CONNECT_SECONDS).close()
    except OSError as error:
        fix = (
            "does your network allow connections to port 22? Else set `connect` in cloudddp.toml. "
            f"{SSH_VARIABLE}=HOST:PORT tries another server"
        )
        return Check("outgoing SSH", "warn", f"no connection to {server}: {reason_of(error)}", fix)
    return Check("outgoing SSH", "pass", f"{server} answers")


# -- the account ---------------------------------------------------------------------------------------------


def _credentials(aws: AWS, spec: ClusterSpec) -> Iterator[Check]:
    """Check that the credentials last as long as the cluster: `down` needs them."""
    end = aws.credentials.ends()
    if end is None:
        return
    detail = f"end at {end:%Y-%m-%d %H:%M} UTC"
    if end < datetime.now(UTC) + timedelta(hours=spec.max_hours):
        yield Check(
            "credentials", "warn", f"{detail}, before the cluster's deadline", "log in again before then"
        )
    else:
        yield Check("credentials", "pass", detail)


def _clock(answer: Mapping[str, Any]) -> Check:
    """Compare the time of AWS's answer, which has whole seconds, with that of this computer."""
    header = str(answer.get("ResponseMetadata", {}).get("HTTPHeaders", {}).get("date", ""))
    try:
        theirs = email.utils.parsedate_to_datetime(header)
        skew = abs((datetime.now(UTC) - theirs).total_seconds())
    except (ValueError, TypeError):
        return Check("clock", "warn", "AWS's answer has no time")
    status: Status = "fail" if skew > _SKEW_FAIL else "warn" if skew > _SKEW_WARN else "pass"
    fix = (
        ""
        if status == "pass"
        else "set the clock of this computer: deadlines depend on it, and AWS refuses late requests"
    )
    return Check("clock", status, f"{skew:.0f} s from AWS's", fix)


def _route(spec: ClusterSpec) -> Check:
    """Check the route to nodes that SSH does not reach directly: the jump host, or the proxy command's
    program."""
    try:
        check_route(spec)
    except CloudDDPError as error:
        return _failed("route to the nodes", error)
    return Check(
        "route to the nodes",
        "pass",
        spec.proxy_jump or spec.proxy_command or "private addresses, not checked",
    )


def _caller(aws: AWS, spec: ClusterSpec) -> tuple[tuple[str, ...], Check]:
    try:
        blocks = ssh_sources(aws, spec)
    except CloudDDPError as error:
        return (), _failed("SSH from", error)
    shown = ", ".join(blocks) or "nobody: the proxy command needs no rule"
    if not spec.ssh_from and is_direct(spec):
        shown += ", this computer's address"
    return blocks, Check("SSH from", "pass", shown)


def _not_checked(*names: str) -> Check:
    """Return the line that names the checks which an earlier one prevents."""
    return Check("not checked", "warn", ", ".join(names), "fix what failed, then repeat doctor")


def _failed(name: str, error: CloudDDPError) -> Check:
    return Check(name, "fail", error.message, error.hint)


# -- one region ----------------------------------------------------------------------------------------------


def _region(aws: AWS, spec: ClusterSpec, ssh_from: tuple[str, ...], owner: str) -> Iterator[Check]:
    asked = _Asked()
    info = asked("instance type", lambda: _type_for(aws, spec), _type_detail)
    if info is None:
        yield from asked.checks
        yield _not_checked(*_OF_REGION[1:])
        return
    image = asked("image", lambda: images.find(aws, spec, info), lambda found: f"{found.id} {found.name}")
    if image is not None and image.warning:
        asked.checks[-1] = Check("image", "warn", image.warning)
    reservation = None
    if spec.reservation:
        reservation = asked("reservation", lambda: _reservation(aws, spec, image), reservation_title)
    subnets = asked("network", lambda: offers.subnets(aws, spec, ssh_from, reservation), _network_detail)
    price = asked("price", lambda: offers.price(aws, spec, reservation), _price_detail)
    if price is not None and _age(price) > _PRICE_AGE:
        asked.checks[-1] = Check("price", "warn", _price_detail(price), "give the current one: --price USD")
    if reservation is None:  # whose instances are counted already
        asked.checks.append(_quota(aws, spec, info))
    if spec.kms_key:
        asked.checks.append(_key(aws, spec.kms_key))
    yield from asked.checks
    if image and subnets and price:
        offer = offers.offer_of(aws, spec, info, image, subnets, price, ssh_from, owner, reservation)
        yield from _addresses(offer, spec)
        yield from _permissions(aws, spec, offer.plan(spec, new_identity()[0]))
    else:
        yield _not_checked("permissions")
    yield Check(
        "capacity",
        "note",
        f"not checked: only a launch shows whether {aws.region} has free {spec.instance_type}",
    )


def _type_for(aws: AWS, spec: ClusterSpec) -> TypeInfo:
    info = instance_types.describe(aws, spec)
    choose_interfaces(spec, info)  # raises if EFA is required and the type has none
    return info


def _reservation(aws: AWS, spec: ClusterSpec, image: Image | None) -> Reservation:
    found = find_reservation(aws, spec)
    if image is not None:
        check_reservation_platform(found, image.platform)
    if found is None:
        raise CloudDDPError(f"there is no reservation {spec.reservation} in {aws.region}")
    return found


def _addresses(offer: Offer, spec: ClusterSpec) -> Iterator[Check]:
    """Check the Elastic IPs, if the nodes need any."""
    if needs_elastic_ip(offer.context.interfaces, public=connection_mode(spec) == "public"):
        try:
            offers.check_addresses(offer, spec)
            yield Check("Elastic IPs", "pass", f"{spec.nodes} more may be allocated")
        except CloudDDPError as error:
            yield _failed("Elastic IPs", error)


class _Asked:
    """Calls a function of `up`, and keeps a check of its result."""

    def __init__(self) -> None:
        self.checks: list[Check] = []

    def __call__(self, name: str, ask: Callable[[], T], detail: Callable[[T], str]) -> T | None:
        try:
            found = ask()
        except CloudDDPError as error:
            self.checks.append(_failed(name, error))
            return None
        self.checks.append(Check(name, "pass", detail(found)))
        return found


def _network_detail(subnets: tuple[Subnet, ...]) -> str:
    listed = ", ".join(f"{one.zone} {one.id} ({one.free} free addresses)" for one in subnets)
    return f"{subnets[0].vpc_id}: {listed}"


def _price_detail(price: Price) -> str:
    age = f" ({_age(price)} days old)" if _age(price) else ""
    return f"${price.hour:.2f} an hour for the cluster, {price.source}{age}"


def _age(price: Price) -> int:
    """Return how many days ago the list was made that the price is from; 0 for a price without a date."""
    found = re.search(r"\d{4}-\d\d-\d\d", price.source)
    return (datetime.now(UTC).date() - date.fromisoformat(found[0])).days if found else 0


def _type_detail(info: TypeInfo) -> str:
    gpus = f"{info.gpus} x {info.gpu_name}" if info.gpus else info.accelerator or "no GPU"
    return f"{info.name}: {gpus}, {info.vcpus} vCPUs"


def _quota(aws: AWS, spec: ClusterSpec, info: TypeInfo) -> Check:
    spot = bool(spec.spot)
    quota = quotas.quota_of(spec.instance_type, spot=spot)
    if quota is None:
        return Check("quota", "warn", f"the vCPU quota of {info.family} is not checked")
    try:
        found = quotas.usage(aws, quota, spec.nodes * info.vcpus)
    except AWSError as error:
        return Check("quota", "warn", f"{quota.name} cannot be read: {error.message}", error.hint)
    if caveat := quotas.caveat(spec.instance_type, spot=spot):  # not a failure: another one may count
        fix = "" if found.suffices else found.increase(aws.region)
        return Check("quota", "warn", f"{found.detail}; {caveat}", fix)
    if found.suffices:
        return Check("quota", "pass", found.detail)
    return Check("quota", "fail", found.detail, found.increase(aws.region))


def _key(aws: AWS, key: str) -> Check:
    """Check that a KMS key can be used for volumes; its policy is checked only by a launch."""
    shown = one_line(key, 300)
    try:
        problem = key_problem(aws, key)
    except AWSError as error:
        if error.code in denials.CODES:  # `up` does not need the call
            return Check("KMS key", "note", f"{shown} is not checked: {error.message}")
        return Check("KMS key", "fail", error.message, error.hint or key_hint(f"KMS key {shown}"))
    if problem:
        return Check("KMS key", "fail", f"{shown}: {problem}", key_hint(f"KMS key {shown}"))
    return Check("KMS key", "pass", f"{shown} is enabled; whether EC2 may use it, only a launch shows")


def _permissions(aws: AWS, spec: ClusterSpec, plan: Plan) -> Iterator[Check]:
    """Check the calls of `up` that need no object of an earlier one, as DryRun: EC2 checks permissions
    only."""
    for request in (*plan.requests, plan.launches[0].request):
        params = _without_refs(request)
        if params is None:
            continue
        name = action("ec2", request.method)
        try:
            aws.dry_run("ec2", request.method, **params)
            yield Check(name, "pass", "allowed")
        except AWSError as error:
            if error.code == "InvalidKeyPair.Duplicate":
                yield Check(name, "pass", "allowed; the name of the cluster is taken")
            elif is_about_default_group(error):
                yield Check(
                    name, "warn", "unknown: a policy denies the VPC's default group, which `up` does not use"
                )
            else:
                yield Check(name, "fail", error.message, hint_of_denial(spec, error))


def _without_refs(request: Request) -> dict[str, Any] | None:
    """Return the parameters of a request without what does not exist yet; None if nothing useful is left."""
    is_launch = request.method == "run_instances"
    params = dry_run_parameters(request.params) if is_launch else dict(request.params)
    return None if any(isinstance(value, Ref) for value in params.values()) else params
