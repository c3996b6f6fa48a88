"""Sessions of roles: STS's rules that moto leaves out (MFA, who may assume a role, the end of a session), and
the credentials and policies that an instance gets with its role.

An assumed role needs a code of the caller's MFA device where its trust policy says so; each code is valid
once (docs.aws.amazon.com/IAM/latest/UserGuide/id_credentials_mfa_configure-api-require.html). Which roles do
is a condition. A node gets credentials of the role in its instance profile from the metadata service
(docs.aws.amazon.com/AWSEC2/latest/UserGuide/instance-metadata-security-credentials.html).
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any

from cloudddp.simulator.ec2.catalog import ACCOUNT, CONDITIONS
from cloudddp.simulator.ec2.patch import override
from cloudddp.simulator.iam import documents
from cloudddp.simulator.iam.documents import Policy

_SECONDS = 6 * 3600  # for which credentials are valid; EC2's are about as long
_RENEWED = timedelta(minutes=5)  # before their end at the latest, as the guide says

_sessions: dict[tuple[str, str], Any] = {}  # (instance id, role) -> moto's AssumedRole
_lock = threading.Lock()


def install() -> None:
    from moto.sts.models import STSBackend
    from moto.sts.responses import TokenResponse

    override(TokenResponse, "assume_role", _with_rules)
    override(TokenResponse, "assume_role_with_web_identity", _with_web_identity)
    override(STSBackend, "assume_role", _with_duration)


def has_ended(access_key: str) -> bool:
    """Return whether an access key belongs to a role session that has ended. Other keys never end."""
    from moto.sts.models import sts_backends

    for account in list(sts_backends.values()):
        for backend in list(account.values()):
            for session in list(backend.assumed_roles):
                if session.access_key_id == access_key:
                    return end_of(session) <= datetime.now(UTC)
    return False


def end_of(session: Any) -> datetime:
    """Return when the session of a role ends."""
    seconds = CONDITIONS.role(session.role_arn).seconds
    ends: datetime = session.expiration.replace(tzinfo=UTC)
    if seconds is None:
        return ends
    return min(ends, ends + timedelta(seconds=seconds - session.cloudddp_seconds))


def _with_rules(original: Callable[[Any], Any], response: Any) -> Any:
    arn = response._get_param("RoleArn")
    role = CONDITIONS.role(arn)
    serial, code = (response._get_param(name) for name in ("SerialNumber", "TokenCode"))
    if role.refuse or (role.codes is not None and not (serial and code)):
        _deny(f"User: {_caller(response)} is not authorized to perform: sts:AssumeRole on resource: {arn}")
    if role.codes is not None and not CONDITIONS.use_code(arn, code):
        _deny("MultiFactorAuthentication failed with invalid MFA one time pass code. ")
    return original(response)


def _with_web_identity(original: Callable[[Any], Any], response: Any) -> Any:
    if CONDITIONS.role(response._get_param("RoleArn")).refuse:
        _deny("Not authorized to perform sts:AssumeRoleWithWebIdentity")
    return original(response)


def _with_duration(original: Callable[..., Any], backend: Any, **kwargs: Any) -> Any:
    seconds = CONDITIONS.role(kwargs["role_arn"]).seconds
    if seconds is not None:
        kwargs["duration"] = min(seconds, kwargs["duration"])
    session = original(backend, **kwargs)
    session.cloudddp_seconds = kwargs["duration"]
    return session


def _caller(response: Any) -> str:
    return str(response.backend.get_caller_identity(response.get_access_key(), response.region)[1])


def _deny(message: str) -> None:
    from moto.sts.exceptions import STSClientError

    class AccessDenied(STSClientError):
        status_code = 403

    raise AccessDenied("AccessDenied", message)


# -- the roles of instances: moto's associations of profiles, and the policies that are attached to roles ---


def profile_of(instance: Any) -> Any | None:
    """Return moto's instance profile of an instance, or None."""
    associations = instance.ec2_backend.iam_instance_profile_associations
    found = associations.get(instance.id)
    return None if found is None else found.iam_instance_profile


def session_of(instance: Any, role: Any) -> Any:
    """Return moto's session with the instance's credentials, a new one shortly before the last one ends."""
    with _lock:
        found = _sessions.get((instance.id, role.name))
        if found is None or end_of(found) <= datetime.now(UTC) + _RENEWED:
            found = _sessions[instance.id, role.name] = _assume(instance, role)
        return found


def _assume(instance: Any, role: Any) -> Any:
    from moto.sts.models import sts_backends
    from moto.utilities.utils import get_partition

    backend = sts_backends[ACCOUNT][get_partition(instance.region_name)]
    return backend.assume_role(
        region_name=instance.region_name,
        role_session_name=instance.id,
        role_arn=role.arn,
        policy="",
        duration=_SECONDS,
        external_id="",
    )


def session_with(access_key: str) -> Any | None:
    """Return the session of an instance that has this access key, or None."""
    with _lock:
        return next((one for one in _sessions.values() if one.access_key_id == access_key), None)


def policy_of(session: Any) -> Policy:
    """Return what the policies of a session's role say together: those in the role, and those attached to
    it."""
    from moto.iam.models import iam_backends

    role = iam_backends[ACCOUNT][session.partition].get_role_by_arn(session.role_arn)
    attached = [
        version.document
        for one in role.managed_policies.values()
        for version in one.versions
        if version.version_id == one.default_version_id
    ]
    texts = [*role.policies.values(), *attached]
    found = [documents.parse(one if isinstance(one, str) else json.dumps(one)) for one in texts]
    return Policy(tuple(statement for policy in found for statement in policy.statements))
