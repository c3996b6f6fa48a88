"""Allows calls as policies require, answers denied ones as AWS does, and records which permissions calls
need.

The policy of `sim start --policy` is that of the simulator's own access key (control.environment): it limits
the user that `cloudddp --sim` and `sim env` are. Other keys, such as those of tests, are an administrator's.
A service control policy limits every key. Both are read once, at the start.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any
from xml.sax.saxutils import escape

from cloudddp.simulator.api.proxy import error_response
from cloudddp.simulator.api.wsgi import Application, Call, Environ, StartResponse, read_call, respond
from cloudddp.simulator.control.environment import ACCESS_KEY
from cloudddp.simulator.ec2 import encryption
from cloudddp.simulator.ec2.catalog import ACCOUNT
from cloudddp.simulator.iam import denials
from cloudddp.simulator.iam.documents import Policy
from cloudddp.simulator.iam.evaluate import Check, Decision, evaluate
from cloudddp.simulator.iam.request import Request, Resource
from cloudddp.simulator.iam.services import checks, key_checks

_CHECKED = ("ec2", "iam", "kms", "pricing", "scheduler", "servicequotas", "ssm", "sts")
_DECODE = "sts:DecodeAuthorizationMessage"


@dataclass(frozen=True, slots=True)
class Policies:
    """`identity` limits the simulator's key, `scp` every key. None does not limit."""

    identity: Policy | None = None
    scp: Policy | None = None

    def of(self, key: str) -> Policy | None:
        return self.identity if key == ACCESS_KEY else None


@dataclass
class Permissions:
    """How often the calls of each access key have needed each permission, whether they had it or not."""

    counts: dict[str, Counter[str]] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def record(self, key: str, actions: Iterable[str]) -> None:
        with self._lock:
            self.counts.setdefault(key, Counter()).update(set(actions))

    def to_json(self) -> dict[str, dict[str, int]]:
        """Return access key -> action, such as ec2:CreateTags -> number of calls that needed it."""
        with self._lock:
            return {key: dict(sorted(counter.items())) for key, counter in self.counts.items()}


def with_authorization(application: Application, policies: Policies, permissions: Permissions) -> Application:
    """Return the application for the calls that policies allow. EC2's dry runs end here: allowed or not."""

    def serve(environ: Environ, start_response: StartResponse) -> Iterable[bytes]:
        call = read_call(environ)
        if not call.action or call.service not in _CHECKED:
            return application(environ, start_response)
        request = _request(call)
        needed = checks(request, MotoResources(request.account, request.region))
        permissions.record(call.key, [request.name, *(check.action for check in needed)])
        for check in needed:
            decision = evaluate(check, policies.of(call.key), policies.scp)
            if not decision.allowed:
                return _deny(environ, start_response, check, decision, request)
        if call.service == "ec2" and request.text("DryRun").lower() == "true":
            message = "Request would have succeeded, but DryRun flag is set."
            return error_response(environ, start_response, 412, "DryRunOperation", message)
        if request.name == _DECODE:
            return _decode(environ, start_response, request.text("EncodedMessage"))

        def may_use(key: str) -> bool:
            identity, scp = policies.of(call.key), policies.scp
            return all(evaluate(check, identity, scp).allowed for check in key_checks(request, key))

        with encryption.key_access(may_use):
            return application(environ, start_response)

    return serve


def _request(call: Call) -> Request:
    from moto.iam.models import get_account_id_from
    from moto.sts.models import sts_backends

    account = str(get_account_id_from(call.key)) if call.key else ACCOUNT
    _, principal, _ = sts_backends[account]["aws"].get_caller_identity(call.key, call.region)
    return Request(call.service, call.action, call.region, account, str(principal), call.parameters)


def _deny(
    environ: Environ, start_response: StartResponse, check: Check, decision: Decision, request: Request
) -> Iterable[bytes]:
    """Respond in the protocol of the service: with the error of EC2, or of others."""
    if request.service == "ec2":
        message = denials.ec2_message(check, decision, request.principal)
        return error_response(environ, start_response, 403, "UnauthorizedOperation", message)
    is_json = read_call(environ).is_json
    code, status = ("AccessDeniedException", 400) if is_json else ("AccessDenied", 403)
    message = denials.reason(check, decision, request.principal)
    return error_response(environ, start_response, status, code, message)


def _decode(environ: Environ, start_response: StartResponse, encoded: str) -> Iterable[bytes]:
    """Serve DecodeAuthorizationMessage, which moto lacks."""
    decoded = denials.decode(encoded)
    if decoded is None:
        message = "The decoded message is not valid."
        return error_response(environ, start_response, 400, "InvalidAuthorizationMessageException", message)
    text = (
        '<DecodeAuthorizationMessageResponse xmlns="https://sts.amazonaws.com/doc/2011-06-15/">'
        f"<DecodeAuthorizationMessageResult><DecodedMessage>{escape(decoded)}</DecodedMessage>"
        "</DecodeAuthorizationMessageResult><ResponseMetadata><RequestId>00000000-0000-4000-8000-000000000000"
        "</RequestId></ResponseMetadata></DecodeAuthorizationMessageResponse>"
    )
    return respond(start_response, 200, "text/xml", text)


class MotoResources:
    """What conditions of policies can refer to: tags and a few attributes of the EC2 resources of one account
    and region. A name that does not exist is a resource without tags."""

    def __init__(self, account: str, region: str) -> None:
        from moto.backends import get_backend

        self._backend: Any = get_backend("ec2")[account][region]
        self._arn = f"arn:aws:ec2:{region}:{account}:"

    def find(self, kind: str, name: str) -> Resource:
        match kind:
            case "key-pair":
                return self._key_pair(name)
            case "placement-group":
                return self._placement_group(name)
            case "security-group":
                group = self._backend.get_security_group_by_name_or_id(name)
                return self._resource(group.id if group else name, self._vpc(group))
            case "subnet":
                subnet = _first(self._backend.subnets, name)
                zone = {"ec2:AvailabilityZone": subnet.availability_zone} if subnet else {}
                return self._resource(name, {**zone, **self._vpc(subnet)})
            case "elastic-ip":
                return self._resource(self._allocation(name))
            case "image":
                return self._image(name)
            case "snapshot":
                return self._resource(name, public=True)
        return self._resource(name)

    def _resource(self, name: str, keys: dict[str, str] | None = None, *, public: bool = False) -> Resource:
        return Resource(name, dict(self._backend.tags.get(name) or {}), keys or {}, public)

    def _vpc(self, item: Any) -> dict[str, str]:
        return {"ec2:Vpc": f"{self._arn}vpc/{item.vpc_id}"} if item is not None and item.vpc_id else {}

    def _key_pair(self, name: str) -> Resource:
        for key in list(self._backend.key_pairs.values()):
            if name in (key.key_name, key.id):
                return Resource(key.key_name, dict(self._backend.tags.get(key.id) or {}))
        return Resource(name)

    def _placement_group(self, name: str) -> Resource:
        groups = getattr(self._backend, "__dict__", {}).get("_cloudddp_placement_groups", {})
        for group in list(groups.values()):
            if name in (group.group_name, group.group_id):
                keys = {"ec2:PlacementGroupStrategy": group.strategy}
                return Resource(group.group_name, dict(self._backend.tags.get(group.group_id) or {}), keys)
        return Resource(name)

    def _allocation(self, name: str) -> str:
        """Return the allocation id for that id, an association's id or a public address."""
        for address in list(self._backend.addresses):
            if name in (address.allocation_id, address.association_id, address.public_ip):
                return str(address.allocation_id or name)
        return name

    def _image(self, name: str) -> Resource:
        image = self._backend.amis.get(name)
        if image is None:
            return Resource(name, public=True)
        owner = getattr(image, "image_owner_alias", None) or image.owner_id
        keys = {"ec2:Owner": str(owner), "ec2:ImageType": "machine", "ec2:RootDeviceType": "ebs"}
        return self._resource(name, keys, public=True)


def _first(by_zone: Any, name: str) -> Any:
    return next((items[name] for items in list(by_zone.values()) if name in items), None)
