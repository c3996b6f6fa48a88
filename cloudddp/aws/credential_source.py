"""Where the AWS credentials of a session come from: from which profile, until when, how the user renews them,
and what an error while they are loaded means.

Read from the configuration and the environment, in the order of botocore's providers: no call, and no
credentials.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from botocore import exceptions

from cloudddp.aws.answers import CREDENTIALS_HINT, shown, skewed, unreachable
from cloudddp.errors import AWSError, CloudDDPError, CredentialsError, Message, UsageError
from cloudddp.text import one_line

_MOST_PROFILES = 10  # in a chain of roles; botocore reports a loop
_SSO_TOKENS = "~/.aws/sso/cache"

ENVIRONMENT, SSO, LOGIN, KEYS, PROCESS = "environment", "sso", "login", "keys", "process"
WEB_IDENTITY, CONTAINER, INSTANCE, NONE = "web identity", "container", "instance", "none"


@dataclass(frozen=True, slots=True)
class Source:
    """`profile` has the settings of the credentials, and is the last one of a chain of `source_profile`s.

    `role` is the ARN of the role that is assumed with them, '' for none; `mfa` whether that takes an MFA
    code. `detail` depends on the kind: the token file, the program of credential_process, or what names the
    file of the SSO token: the SSO session, or its start URL.
    """

    kind: str
    profile: str = "default"
    role: str = ""
    mfa: bool = False
    detail: str = ""

    @property
    def shown(self) -> str:
        return f"profile {one_line(self.profile, 100)!r}"

    @property
    def process(self) -> str:
        return f"the credential_process of {self.shown} ({one_line(self.detail, 100)})"

    @property
    def renewal(self) -> str:
        """How to renew the credentials, as a phrase that ", then ..." can follow."""
        if self.mfa:
            return Message("`cloudddp status` in a terminal, where it asks for a new MFA code")
        return self.login

    @property
    def login(self) -> str:
        """How to renew what the role is assumed with."""
        option = "" if self.profile == "default" else f" --profile {shlex.quote(one_line(self.profile, 100))}"
        return {
            SSO: f"`aws sso login{option}`",
            LOGIN: f"`aws login{option}`",
            ENVIRONMENT: "set AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY and AWS_SESSION_TOKEN to new values",
            KEYS: f"put new keys into {self.shown} (`aws configure{option}`)",
            PROCESS: f"log in again for {self.process}",
            WEB_IDENTITY: f"renew the token in {one_line(self.detail, 300)}",
            CONTAINER: "check the container's credentials endpoint (AWS_CONTAINER_CREDENTIALS_*)",
            INSTANCE: "check the instance profile of this computer",
        }.get(self.kind, "run `aws configure`")

    def ends(self, role_session: datetime | None) -> datetime | None:
        """Return when these credentials end for good; None if they do not, or nobody can know.

        Not the end of credentials that are renewed without the user. `role_session` is the end of the role
        credentials that are in use.
        """
        if self.mfa:
            return role_session
        if self.kind == ENVIRONMENT:
            return parse_time(os.environ.get("AWS_CREDENTIAL_EXPIRATION"))
        if self.kind == SSO:
            return _sso_end(self.detail, role_session)
        return None


def source(config: Mapping[str, Any], profile: str | None, *, explicit: bool) -> Source:
    """Return the source for a profile of botocore's `full_config`. `explicit`: it overrides the environment's
    keys."""
    name, role, mfa = profile or "default", "", False
    settings = _settings(config, name)
    if not explicit and os.environ.get("AWS_ACCESS_KEY_ID"):
        return Source(ENVIRONMENT, name)
    for _ in range(_MOST_PROFILES):
        if "role_arn" not in settings or "web_identity_token_file" in settings:
            break
        role = role or one_line(str(settings["role_arn"]), 300)
        mfa = mfa or "mfa_serial" in settings
        if origin := settings.get("credential_source"):
            kinds = {"Environment": ENVIRONMENT, "EcsContainer": CONTAINER, "Ec2InstanceMetadata": INSTANCE}
            return Source(kinds.get(origin, NONE), name, role, mfa)
        following = settings.get("source_profile", name)
        if following == name:  # its own static keys
            return Source(KEYS, name, role, mfa)
        name, settings = following, _settings(config, following)
    environ = os.environ if not explicit and not role else {}
    if token_file := environ.get("AWS_WEB_IDENTITY_TOKEN_FILE") or settings.get("web_identity_token_file"):
        role = role or one_line(environ.get("AWS_ROLE_ARN") or settings.get("role_arn", ""), 300)
        return Source(WEB_IDENTITY, name, role, mfa, token_file)
    if "sso_account_id" in settings or "sso_role_name" in settings:
        key = settings.get("sso_session") or settings.get("sso_start_url", "")
        return Source(SSO, name, role, mfa, key)
    if "aws_access_key_id" in settings:
        return Source(KEYS, name, role, mfa)
    if "login_session" in settings:
        return Source(LOGIN, name, role, mfa)
    if "credential_process" in settings:
        program = settings["credential_process"].split()[:1]  # its arguments may be secret
        return Source(PROCESS, name, role, mfa, "".join(program))
    in_container = any(f"AWS_CONTAINER_CREDENTIALS_{kind}_URI" in os.environ for kind in ("RELATIVE", "FULL"))
    return Source(CONTAINER if in_container else NONE, name, role, mfa)


def _settings(config: Mapping[str, Any], profile: str) -> Mapping[str, str]:
    """Return the settings of a profile. Raises UsageError for one, or one of its SSO session, that has
    settings of its own (indented lines), as only those of one service may have: s3, emr."""
    found: Mapping[str, Any] = config.get("profiles", {}).get(profile, {})
    session = config.get("sso_sessions", {}).get(str(found.get("sso_session")), {})
    for key, value in (*found.items(), *session.items()):
        is_text = ("_" in key and key != "api_versions") or key in ("region", "output", "services")
        if is_text and isinstance(value, Mapping):
            raise UsageError(
                f"AWS configuration: {one_line(key, 60)} of profile {one_line(profile, 100)!r} is not a "
                "single value",
                hint="fix ~/.aws/config: write KEY = VALUE on one line, without indented lines after it",
            )
    return found


def parse_time(text: object) -> datetime | None:
    """Return a time as AWS's tools write it (ISO 8601, or with UTC at the end); None if it is not one."""
    if not isinstance(text, str) or len(text) > 40:
        return None
    try:
        found = datetime.fromisoformat(text.removesuffix("UTC") + "+00:00" * text.endswith("UTC"))
        return found.astimezone(UTC) if found.tzinfo else found.replace(tzinfo=UTC)
    except (ValueError, OverflowError):  # the latter: before the year 1, or after 9999, in UTC
        return None


def _sso_end(key: str, role_session: datetime | None) -> datetime | None:
    """Return when an SSO session ends.

    The AWS CLI keeps the token in a file. With a refresh token botocore renews it, until the registration of
    the client ends; without one the role credentials that exist may outlive it.
    """
    name = hashlib.sha1(key.encode(errors="replace"), usedforsecurity=False).hexdigest()
    try:
        token = json.loads((Path(_SSO_TOKENS).expanduser() / f"{name}.json").read_bytes())
    except (OSError, ValueError, RuntimeError, RecursionError):
        return None
    if not isinstance(token, dict):
        return None
    if all(token.get(one) for one in ("refreshToken", "clientId", "clientSecret", "registrationExpiresAt")):
        return parse_time(token["registrationExpiresAt"])
    ends = [one for one in (parse_time(token.get("expiresAt")), role_session) if one]
    return max(ends, default=None)


_FIX = "fix ~/.aws/config or ~/.aws/credentials"
# Access key ids, and anything as long as a secret key or a token: programs print them in their errors.
_SECRET = re.compile(r"\b(?:AKIA|ASIA)[A-Z0-9]{8,}|[A-Za-z0-9+/=_-]{40,}")
_SHOWN = 300  # characters of another program's message
_CONFIGURATION = (
    exceptions.InvalidConfigError,
    exceptions.ConfigNotFound,
    exceptions.ConfigParseError,
    exceptions.UnknownCredentialError,
    exceptions.ProfileNotFound,
    exceptions.ParamValidationError,
    exceptions.PartialCredentialsError,
)
# What files and programs that botocore reads raise if their data is invalid.
_INVALID_DATA = (ValueError, LookupError, TypeError, AttributeError, OverflowError)
_PROCESS_METHOD = "custom-process"


def explained(error: Exception, source: Source) -> CloudDDPError | None:
    """Return an error of loading credentials as ours; None if it is not one of those."""
    if isinstance(error, CloudDDPError):
        return error
    if isinstance(error, exceptions.ClientError):
        return _refused(error, source)
    if isinstance(error, exceptions.BotoCoreError):
        return _of_botocore(error, source)
    if isinstance(error, RuntimeError) and "still expired" in str(error):  # botocore's words
        of = "in the environment" if source.kind == ENVIRONMENT else f"of {source.shown}"
        return CredentialsError(f"the AWS credentials {of} have expired", renew=source.login)
    if isinstance(error, OSError) and source.kind == PROCESS:
        return UsageError(f"cannot run {source.process}: {error.strerror}", hint="fix it in ~/.aws/config")
    if isinstance(error, OSError) and source.kind == WEB_IDENTITY:
        return unreadable_token(source, str(error.strerror))
    if isinstance(error, _INVALID_DATA) and not isinstance(error, UnicodeEncodeError):
        return _invalid(error, source)
    return None


def without_secrets(text: object) -> str:
    """Return a message of another program on one line of limited length, without what may be a key."""
    return one_line(_SECRET.sub("****", " ".join(str(text).split())), _SHOWN)


def unreadable_token(source: Source, reason: str) -> UsageError:
    return UsageError(
        f"cannot read the web identity token {one_line(source.detail, 300)}: {reason}",
        hint="check AWS_WEB_IDENTITY_TOKEN_FILE, or web_identity_token_file in ~/.aws/config",
    )


def _of_botocore(error: Any, source: Source) -> CloudDDPError:
    names = {kind.__name__ for kind in type(error).__mro__}  # older versions lack some
    has_none = "NoCredentialsError" in names
    if has_none and source.kind != LOGIN:
        return CredentialsError("no AWS credentials found", renew=source.renewal, hint=CREDENTIALS_HINT)
    if has_none or "MissingDependencyException" in names:  # the former: an old botocore
        return UsageError(
            f"{source.shown} uses `aws login`, which needs a package that is not installed",
            hint="pip install 'botocore[crt]>=1.41'",
        )
    if isinstance(error, _CONFIGURATION):
        return UsageError(f"AWS configuration: {without_secrets(error)}", hint=_FIX)
    if isinstance(error, exceptions.EndpointConnectionError | exceptions.HTTPClientError):
        return unreachable("credentials", error)
    reason = without_secrets(error)
    if names & {"SSOError", "TokenRetrievalError"}:
        text = f"the SSO session of {source.shown} has expired, or there is none"
    elif "LoginError" in names:
        text = f"the `aws login` session of {source.shown} has ended: {reason}"
    elif "CredentialRetrievalError" in names and source.kind == PROCESS:
        printed = without_secrets(str(error).partition(f"{_PROCESS_METHOD}: ")[2]) or "it printed no reason"
        text = f"{source.process} failed: {printed}"
    else:
        text = f"cannot load AWS credentials: {reason}"
    return CredentialsError(text, renew=source.login)


def _invalid(error: Exception, source: Source) -> CloudDDPError | None:
    """Return the error for data in which botocore did not find what it expects."""
    expiration = os.environ.get("AWS_CREDENTIAL_EXPIRATION")
    if source.kind == ENVIRONMENT and expiration and parse_time(expiration) is None:
        return UsageError(
            "the AWS credentials in the environment are not valid",
            hint="check AWS_CREDENTIAL_EXPIRATION and the other AWS_* variables",
        )
    text = {
        PROCESS: f"{source.process} did not print valid credentials",
        CONTAINER: "the container's endpoint did not return valid credentials",
        **dict.fromkeys((SSO, LOGIN), f"the stored session of {source.shown} is not valid"),
    }.get(source.kind)
    if text:
        return CredentialsError(text, renew=source.login)
    if not isinstance(error, ValueError):  # which is, for example, an endpoint that is not a URL
        return None
    return UsageError(
        f"AWS configuration: {without_secrets(error)}",
        hint="check AWS_ENDPOINT_URL, the other AWS_* variables and ~/.aws/config",
    )


def _refused(error: Any, source: Source) -> CloudDDPError:
    """Return the error of AssumeRole, or of SSO's GetRoleCredentials."""
    answer = error.response.get("Error", {})
    code, message = one_line(str(answer.get("Code", "")), 100), shown(answer.get("Message", ""))
    if (clock := skewed(error.response, code)) is not None:
        return clock
    if code.startswith("ExpiredToken") or code == "RequestExpired":
        return CredentialsError(
            f"the AWS credentials of {source.shown} have expired", renew=source.login, code=code
        )
    if error.operation_name == "GetRoleCredentials":
        return AWSError(
            f"AWS refused the SSO role of {source.shown}: {code}: {message}",
            hint="check sso_account_id and sso_role_name in ~/.aws/config, and the assignment in IAM "
            "Identity Center",
            code=code,
        )
    role = source.role or "the role"
    return AWSError(
        f"AWS refused to let {source.shown} assume {role} ({error.operation_name}): {code}: {message}",
        hint="check role_arn, and the role's trust policy: who may assume it, and whether it requires an MFA "
        "device (mfa_serial) or an external_id",
        code=code,
    )
