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
from cloudddp.aws import denials, quotas
from cloudddp.aws.answers import action
from cloudddp.aws.client import AWS
from cloudddp.aws.images import Image, key_problem
from cloudddp.aws.instance_types import TypeInfo
from cloudddp.aws.networks import Subnet
from cloudddp.aws.reservations import Reservation
from cloudddp.cluster import region_search
from cloudddp.cluster.connect import check_route, is_direct, ssh_sources
from cloudddp.cluster.offers import offer_of
from cloudddp.cluster.plan import Plan
from cloudddp.cluster.preconditions import (
    dry_run_parameters,
    hint_of_denial,
    is_about_default_group,
    key_hint,
    reservation_title,
)
from cloudddp.cluster.prices import Price
from cloudddp.cluster.requests import Ref
from cloudddp.cluster.user_data import new_identity
from cloudddp.config.cluster_spec import Access, ClusterSpec, Lifetime, Machine, Placement
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
    several_regions: bool = False

    @property
    def title(self) -> str:
        """The name, after the region and the candidate where there are several."""
        region = self.region if self.several_regions else ""
        return ": ".join(filter(None, (region, self.candidate, self.name)))


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
    several = len(clouds) > 1
    refused = region_search.not_enabled(region_search.ask(clouds), clouds[0])
    for region, problem in refused.items():
        yield replace(_failed("region", problem), region=region, several_regions=several)
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
        for candidate in spec.candidates:
            label = candidate.label if len(spec.candidates) > 1 else ""
            for check in _once(_region(aws, candidate, ssh_from, owner), seen):
                yield replace(check, region=aws.region, candidate=label, several_regions=several)


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
    yield _graded("OpenSSH", "pass" if ssh else "warn", ssh or lacks, "install an OpenSSH client")
    folder = state_home()
    while not folder.exists():
        folder = folder.parent
    free = shutil.disk_usage(folder).free
    status: Status = "fail" if free < _DISK_FAIL else "warn" if free < _DISK_WARN else "pass"
    shown = f"{free / (1 << 30):.1f} GiB free at {folder}"
    yield _graded("disk", status, shown, "free some space, or set CLOUDDDP_HOME")


def _graded(name: str, status: Status, detail: str, fix: str) -> Check:
    """Return a check that needs no fix if it passes."""
    return Check(name, status, detail, "" if status == "pass" else fix)


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


def _credentials(aws: AWS, spec: Lifetime) -> Iterator[Check]:
    """Check that the credentials last as long as the cluster: `down` needs them."""
    end = aws.credentials.ends()
    if end is None:
        return
    early = end < datetime.now(UTC) + timedelta(hours=spec.max_hours)
    detail = f"end at {end:%Y-%m-%d %H:%M} UTC" + ", before the cluster's deadline" * early
    yield _graded("credentials", "warn" if early else "pass", detail, "log in again before then")


def _clock(answer: Mapping[str, Any]) -> Check:
    """Compare the time of AWS's answer, which has whole seconds, with that of this computer."""
    header = str(answer.get("ResponseMetadata", {}).get("HTTPHeaders", {}).get("date", ""))
    try:
        theirs = email.utils.parsedate_to_datetime(header)
        skew = abs((datetime.now(UTC) - theirs).total_seconds())
    except (ValueError, TypeError):
        return Check("clock", "warn", "AWS's answer has no time")
    status: Status = "fail" if skew > _SKEW_FAIL else "warn" if skew > _SKEW_WARN else "pass"
    fix = "set the clock of this computer: deadlines depend on it, and AWS refuses late requests"
    return _graded("clock", status, f"{skew:.0f} s from AWS's", fix)


def _route(spec: Access) -> Check:
    """Check the route to nodes that SSH does not reach directly: jump host or proxy command."""
    try:
        check_route(spec)
    except CloudDDPError as error:
        return _failed("route to the nodes", error)
    shown = spec.proxy_jump or spec.proxy_command or "private addresses, not checked"
    return Check("route to the nodes", "pass", shown)


def _caller(aws: AWS, spec: Access) -> tuple[tuple[str, ...], Check]:
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
    offer = offer_of(aws, spec, ssh_from, owner, asked)
    yield from asked.checks
    info = asked.answers.get("instance type")
    if info is None:
        yield _not_checked(*_OF_REGION[1:])
        return
    if "reservation" not in asked.answers:  # whose instances are counted already
        yield _quota(aws, spec, info)
    if spec.kms_key:
        yield _key(aws, spec.kms_key)
    if offer is not None:
        yield from _permissions(aws, spec, offer.plan(spec, new_identity()[0]))
    else:
        yield _not_checked("permissions")
    yield Check(
        "capacity",
        "note",
        f"not checked: only a launch shows whether {aws.region} has free {spec.instance_type}",
    )


class _Asked:
    """Makes the steps of an offer, and keeps the answers and a check of each."""

    def __init__(self) -> None:
        self.checks: list[Check] = []
        self.answers: dict[str, Any] = {}

    def __call__(self, name: str, step: Callable[[], T], /) -> T | None:
        try:
            found = step()
        except CloudDDPError as error:
            self.checks.append(_failed(name, error))
            return None
        self.answers[name] = found
        self.checks.append(_of_answer(name, found))
        return found


def _of_answer(name: str, found: Any) -> Check:
    """Return the check of what a step of an offer has answered."""
    status: Status = "pass"
    detail = fix = ""
    match found:
        case TypeInfo():
            gpus = f"{found.gpus} x {found.gpu_name}" if found.gpus else found.accelerator or "no GPU"
            detail = f"{found.name}: {gpus}, {found.vcpus} vCPUs"
        case Image():
            status = "warn" if found.warning else "pass"
            detail = found.warning or f"{found.id} {found.name}"
        case Reservation():
            detail = reservation_title(found)
        case Price():
            day = date.fromisoformat(found.published) if found.published else None
            age = (datetime.now(UTC).date() - day).days if day else 0
            old = f" ({age} days old)" if age else ""
            detail = f"${found.hour:.2f} an hour for the cluster, {found.source}{old}"
            status = "warn" if age > _PRICE_AGE else "pass"
            fix = "give the current one: --price USD"
        case (Subnet() as first, *_):
            zones = (f"{one.zone} {one.id} ({one.free} free addresses)" for one in found)
            detail = f"{first.vpc_id}: {', '.join(zones)}"
        case int():
            detail = f"{found} more may be allocated"
    return _graded(name, status, detail, fix)


def _quota(aws: AWS, spec: Placement, info: TypeInfo) -> Check:
    spot = bool(spec.spot)
    quota = quotas.quota_of(spec.instance_type, spot=spot)
    if quota is None:
        return Check("quota", "warn", f"the vCPU quota of {info.family} is not checked")
    try:
        found = quotas.usage(aws, quota, spec.nodes * info.vcpus)
    except AWSError as error:
        return Check("quota", "warn", f"{quota.name} cannot be read: {error.message}", error.hint)
    status: Status = "pass" if found.suffices else "fail"
    detail = found.detail
    if caveat := quotas.caveat(spec.instance_type, spot=spot):  # not a failure: another one may count
        status, detail = "warn", f"{detail}; {caveat}"
    return Check("quota", status, detail, "" if found.suffices else found.increase(aws.region))


def _key(aws: AWS, key: str) -> Check:
    """Check that a KMS key can be used for volumes; its policy is checked only by a launch."""
    shown = one_line(key, 300)
    fix = key_hint(f"KMS key {shown}")
    try:
        problem = key_problem(aws, key)
    except AWSError as error:
        if error.code in denials.CODES:  # `up` does not need the call
            return Check("KMS key", "note", f"{shown} is not checked: {error.message}")
        return Check("KMS key", "fail", error.message, error.hint or fix)
    detail = problem or "it is enabled; whether EC2 may use it, only a launch shows"
    return _graded("KMS key", "fail" if problem else "pass", f"{shown}: {detail}", fix)


def _permissions(aws: AWS, spec: Machine, plan: Plan) -> Iterator[Check]:
    """Check as DryRun, for permissions only, the calls of `up` that need no object of an earlier one."""
    for request in (*plan.requests, plan.launches[0].request):
        launch = request.method == "run_instances"
        params = dry_run_parameters(request.params) if launch else request.params
        if any(isinstance(value, Ref) for value in params.values()):
            continue  # nothing useful is left
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
