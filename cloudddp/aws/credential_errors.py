"""Translates what goes wrong while credentials are loaded: which profile, what happened, and how to renew
them."""

from __future__ import annotations

import os
import re
from typing import Any

from botocore import exceptions

from cloudddp.aws import credential_source as kinds
from cloudddp.aws.answers import CREDENTIALS_HINT, shown, skewed, unreachable
from cloudddp.aws.credential_source import Source
from cloudddp.errors import AWSError, CloudDDPError, CredentialsError, UsageError
from cloudddp.text import one_line

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
)
# What files and programs that botocore reads raise if their data is invalid.
_INVALID_DATA = (ValueError, LookupError, TypeError, AttributeError, OverflowError)


def explained(error: Exception, source: Source) -> CloudDDPError | None:
    """Return an error of loading credentials as ours; None if it is not one of those."""
    if isinstance(error, CloudDDPError):
        return error
    if isinstance(error, exceptions.ClientError):
        return _refused(error, source)
    if isinstance(error, exceptions.BotoCoreError):
        return _of_botocore(error, source)
    if isinstance(error, RuntimeError) and "still expired" in str(error):  # botocore's words
        return _expired(source)
    if isinstance(error, OSError):
        return _unreadable(error, source)
    if isinstance(error, _INVALID_DATA) and not isinstance(error, UnicodeEncodeError):
        return _invalid(error, source)
    return None


def without_secrets(text: object) -> str:
    """Return a message of another program on one line of limited length, without what may be a key."""
    return one_line(_SECRET.sub("****", " ".join(str(text).split())), _SHOWN)


def _of_botocore(error: Any, source: Source) -> CloudDDPError:
    names = {kind.__name__ for kind in type(error).__mro__}  # older versions lack some
    if isinstance(error, exceptions.NoCredentialsError) and source.kind == kinds.LOGIN:  # an old botocore
        names.add("MissingDependencyException")
    elif isinstance(error, exceptions.NoCredentialsError):
        return CredentialsError("no AWS credentials found", renew=source.renewal, hint=CREDENTIALS_HINT)
    if isinstance(error, exceptions.PartialCredentialsError):
        return UsageError(f"AWS configuration: {error}", hint=_FIX)
    if isinstance(error, _CONFIGURATION):
        return UsageError(f"AWS configuration: {without_secrets(error)}", hint=_FIX)
    if "MissingDependencyException" in names:
        return UsageError(
            f"{source.shown} uses `aws login`, which needs a package that is not installed",
            hint="pip install 'botocore[crt]>=1.41'",
        )
    if "SSOError" in names or "TokenRetrievalError" in names:
        return CredentialsError(
            f"the SSO session of {source.shown} has expired, or there is none", renew=source.login
        )
    if "LoginError" in names:
        return CredentialsError(
            f"the `aws login` session of {source.shown} has ended: {without_secrets(error)}",
            renew=source.login,
        )
    if isinstance(error, exceptions.EndpointConnectionError | exceptions.HTTPClientError):
        return unreachable("credentials", error)
    if isinstance(error, exceptions.CredentialRetrievalError) and source.kind == kinds.PROCESS:
        printed = without_secrets(str(error).partition(f"{_PROCESS_METHOD}: ")[2]) or "it printed no reason"
        return CredentialsError(f"{_process(source)} failed: {printed}", renew=source.login)
    return CredentialsError(f"cannot load AWS credentials: {without_secrets(error)}", renew=source.login)


_PROCESS_METHOD = "custom-process"


def _process(source: Source) -> str:
    return f"the credential_process of {source.shown} ({source.detail})"


def _expired(source: Source) -> CredentialsError:
    of = "in the environment" if source.kind == kinds.ENVIRONMENT else f"of {source.shown}"
    return CredentialsError(f"the AWS credentials {of} have expired", renew=source.login)


def _unreadable(error: OSError, source: Source) -> CloudDDPError | None:
    if source.kind == kinds.PROCESS:
        return UsageError(f"cannot run {_process(source)}: {error.strerror}", hint="fix it in ~/.aws/config")
    if source.kind == kinds.WEB_IDENTITY:
        return unreadable_token(source, str(error.strerror))
    return None


def unreadable_token(source: Source, reason: str) -> UsageError:
    return UsageError(
        f"cannot read the web identity token {source.detail}: {reason}",
        hint="check AWS_WEB_IDENTITY_TOKEN_FILE, or web_identity_token_file in ~/.aws/config",
    )


def _invalid(error: Exception, source: Source) -> CloudDDPError | None:
    if source.kind == kinds.PROCESS:
        return CredentialsError(f"{_process(source)} did not print valid credentials", renew=source.login)
    if source.kind in (kinds.SSO, kinds.LOGIN):
        return CredentialsError(f"the stored session of {source.shown} is not valid", renew=source.login)
    if source.kind == kinds.CONTAINER:
        return CredentialsError(
            "the container's endpoint did not return valid credentials", renew=source.login
        )
    if source.kind == kinds.ENVIRONMENT and _invalid_expiration():
        return UsageError(
            "the AWS credentials in the environment are not valid",
            hint="check AWS_CREDENTIAL_EXPIRATION and the other AWS_* variables",
        )
    if isinstance(error, ValueError):  # for example an endpoint that is not a URL
        return UsageError(
            f"AWS configuration: {without_secrets(error)}",
            hint="check AWS_ENDPOINT_URL, the other AWS_* variables and ~/.aws/config",
        )
    return None


def _invalid_expiration() -> bool:
    text = os.environ.get("AWS_CREDENTIAL_EXPIRATION")
    return bool(text) and kinds.moment(text) is None


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
