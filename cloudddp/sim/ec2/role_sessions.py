"""STS's rules about roles that moto leaves out: MFA, who may assume a role, and the end of a session.

An assumed role needs a code of the caller's MFA device where its trust policy says so; each code is valid
once (docs.aws.amazon.com/IAM/latest/UserGuide/id_credentials_mfa_configure-api-require.html). Which roles do
is a condition.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any

from cloudddp.sim.ec2.account_conditions import CONDITIONS
from cloudddp.sim.ec2.patch import override


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
