"""Where the AWS credentials of a session come from, when they end, and how the user renews them.

Read from the configuration and the environment, in the order of botocore's providers: no call, and no
credentials.
"""

from __future__ import annotations

import hashlib
import json
import os
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from cloudddp.errors import Command, Text, UsageError
from cloudddp.text import one_line

_MOST_PROFILES = 10  # in a chain of roles; botocore reports a loop
# Settings with a single value; others, such as s3, have nested ones.
_TEXTS = """
    role_arn source_profile credential_source external_id mfa_serial role_session_name duration_seconds
    web_identity_token_file sso_session sso_account_id sso_role_name sso_start_url sso_region
    sso_registration_scopes login_session credential_process aws_access_key_id aws_secret_access_key
    aws_session_token aws_account_id region endpoint_url ca_bundle services output retry_mode
    max_attempts defaults_mode sts_regional_endpoints use_fips_endpoint use_dualstack_endpoint
    ignore_configure_endpoint_urls user_agent_appid sdk_ua_app_id metadata_service_timeout
    metadata_service_num_attempts parameter_validation cli_timestamp_format tcp_keepalive
""".split()
_SSO_TOKENS = "~/.aws/sso/cache"

ENVIRONMENT, SSO, LOGIN, KEYS, PROCESS = "environment", "sso", "login", "keys", "process"
WEB_IDENTITY, CONTAINER, INSTANCE, NONE = "web identity", "container", "instance", "none"


@dataclass(frozen=True, slots=True)
class Source:
    """`profile` has the settings of the credentials, and is the last one of a chain of `source_profile`s.

    `role` is the ARN of the role that is assumed with them, '' for none; `mfa` whether that takes an MFA
    code. `detail` depends on the kind: the token file, or the program of credential_process. `sso_key` is the
    name of the SSO session, or its start URL, which names the file of its token.
    """

    kind: str
    profile: str = "default"
    role: str = ""
    mfa: bool = False
    detail: str = ""
    sso_key: str = ""
    token_file: str = ""  # the path that `detail` shows

    @property
    def shown(self) -> str:
        return f"profile {one_line(self.profile, 100)!r}"

    @property
    def renewal(self) -> Text:
        """How to renew the credentials, as a phrase that ", then ..." can follow."""
        if self.mfa:
            return (Command("status"), " in a terminal, where it asks for a new MFA code")
        return self.login

    @property
    def login(self) -> Text:
        """How to renew what the role is assumed with."""
        option = "" if self.profile == "default" else f" --profile {shlex.quote(one_line(self.profile, 100))}"
        return {
            SSO: f"`aws sso login{option}`",
            LOGIN: f"`aws login{option}`",
            ENVIRONMENT: "set AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY and AWS_SESSION_TOKEN to new values",
            KEYS: f"put new keys into {self.shown} (`aws configure{option}`)",
            PROCESS: f"log in again for the credential_process of {self.shown} ({self.detail})",
            WEB_IDENTITY: f"renew the token in {self.detail}",
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
            return moment(os.environ.get("AWS_CREDENTIAL_EXPIRATION"))
        if self.kind == SSO:
            return _sso_end(self.sso_key, role_session)
        return None


def source(config: Mapping[str, Any], profile: str | None, *, explicit: bool) -> Source:
    """Return the source for a profile of botocore's `full_config`. `explicit`: it overrides the environment's
    keys."""
    name = profile or "default"
    _require_texts(config, name)
    if not explicit and os.environ.get("AWS_ACCESS_KEY_ID"):
        return Source(ENVIRONMENT, name)
    profiles = config.get("profiles", {})
    settings = profiles.get(name, {})
    role, mfa = "", False
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
        name, settings = following, profiles.get(following, {})
        _require_texts(config, name)
    return _own(name, settings, role, mfa, from_environment=not explicit and not role)


def _require_texts(config: Mapping[str, Any], profile: str) -> None:
    """Raise UsageError for a setting of a profile, or of its SSO session, that has settings of its own
    (indented lines)."""
    settings = config.get("profiles", {}).get(profile, {})
    sections = [(f"profile {one_line(profile, 100)!r}", settings)]
    if isinstance(session := settings.get("sso_session"), str):
        sections.append(
            (f"sso-session {one_line(session, 100)!r}", config.get("sso_sessions", {}).get(session, {}))
        )
    for where, values in sections:
        for key in _TEXTS:
            if isinstance(values.get(key), Mapping):
                raise UsageError(
                    f"AWS configuration: {key} of {where} is not a single value",
                    hint=f"fix ~/.aws/config: write {key} = VALUE on one line, without indented lines after "
                    "it",
                )


def _own(
    name: str,
    settings: Mapping[str, Any],
    role: str,
    mfa: bool,
    *,
    from_environment: bool,
) -> Source:
    """Return the source of a profile that assumes no role of `source_profile`."""
    token_file = os.environ.get("AWS_WEB_IDENTITY_TOKEN_FILE") if from_environment else None
    if token_file := token_file or settings.get("web_identity_token_file"):
        arn = os.environ.get("AWS_ROLE_ARN") if from_environment else None
        arn = one_line(str(arn or settings.get("role_arn", "")), 300)
        return Source(
            WEB_IDENTITY, name, role or arn, mfa, one_line(str(token_file), 300), token_file=str(token_file)
        )
    if "sso_account_id" in settings or "sso_role_name" in settings:
        key = settings.get("sso_session") or settings.get("sso_start_url", "")
        return Source(SSO, name, role, mfa, sso_key=str(key))
    if "aws_access_key_id" in settings:
        return Source(KEYS, name, role, mfa)
    if "login_session" in settings:
        return Source(LOGIN, name, role, mfa)
    if "credential_process" in settings:
        program = str(settings["credential_process"]).split()[:1]  # its arguments may be secret
        return Source(PROCESS, name, role, mfa, one_line("".join(program), 100))
    if any(f"AWS_CONTAINER_CREDENTIALS_{kind}_URI" in os.environ for kind in ("RELATIVE", "FULL")):
        return Source(CONTAINER, name, role, mfa)
    return Source(NONE, name, role, mfa)


def moment(text: object) -> datetime | None:
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
        return moment(token["registrationExpiresAt"])
    ends = [one for one in (moment(token.get("expiresAt")), role_session) if one]
    return max(ends, default=None)
