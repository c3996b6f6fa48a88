"""Rejects calls whose credentials have ended or are for a region that the account has not enabled, or whose
time of signing is not AWS's time.

A signature is valid for 5 minutes
(docs.aws.amazon.com/IAM/latest/UserGuide/reference_sigv-troubleshooting.html). EC2 has codes of its own for
both (docs.aws.amazon.com/AWSEC2/latest/APIReference/errors-overview.html: RequestExpired). Signatures are not
verified: the simulator accepts any key that it has not issued itself.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from datetime import UTC, datetime, timedelta
from typing import Any

from cloudddp.simulator.api.proxy import error_response
from cloudddp.simulator.api.wsgi import Application, Call, Environ, StartResponse, read_call
from cloudddp.simulator.conditions.model import Rejection
from cloudddp.simulator.conditions.store import Store
from cloudddp.simulator.ec2 import role_sessions

_VALID = timedelta(minutes=5)


def with_credential_checks(application: Application, store: Store) -> Application:
    """Return the application with these checks before its calls."""

    def serve(environ: Environ, start_response: StartResponse) -> Iterable[bytes]:
        call, now = read_call(environ), datetime.now(UTC) + timedelta(seconds=store.clock)
        refusal = _skewed(call, environ.get("HTTP_X_AMZ_DATE", ""), now) or _ended(call)
        refusal = refusal or (_not_enabled(call) if call.region in store.read().regions else None)
        if refusal is not None:
            return error_response(environ, start_response, refusal.status, refusal.code, refusal.message)
        return application(environ, start_response)

    return serve


def with_clock(handler: Any, store: Store) -> Any:
    """Return a request handler whose responses have AWS's time in their `Date`."""

    class Handler(handler):  # type: ignore[misc]
        def date_time_string(self, timestamp: float | None = None) -> str:
            return str(super().date_time_string((timestamp or time.time()) + store.clock))

    return Handler


def _skewed(call: Call, text: str, now: datetime) -> Rejection | None:
    try:
        signed = datetime.strptime(text, "%Y%m%dT%H%M%SZ").replace(tzinfo=UTC)
    except ValueError:
        return None
    if abs(now - signed) <= _VALID:
        return None
    if call.service == "ec2":
        return Rejection("RequestExpired", "Request has expired.")
    if signed < now:
        message = (
            f"Signature expired: {text} is now earlier than {now - _VALID:%Y%m%dT%H%M%SZ} "
            f"({now:%Y%m%dT%H%M%SZ} - 5 min.)"
        )
    else:
        message = (
            f"Signature not yet current: {text} is still later than {now + _VALID:%Y%m%dT%H%M%SZ} "
            f"({now:%Y%m%dT%H%M%SZ} + 5 min.)"
        )
    return Rejection("SignatureDoesNotMatch", message, 403)


def _not_enabled(call: Call) -> Rejection:
    """Return the refusal of credentials in a region that does not know the account: "AWS was not able to
    validate the provided access credentials" (AWS Knowledge Center, "Why did I receive the IAM error ... in
    some AWS Regions?"; AuthFailure: EC2 API reference, "Error codes for the Amazon EC2 API")."""
    if call.service == "ec2":
        return Rejection("AuthFailure", "AWS was not able to validate the provided access credentials", 401)
    code = "UnrecognizedClientException" if call.is_json else "InvalidClientTokenId"
    return Rejection(code, "The security token included in the request is invalid.", 403)


def _ended(call: Call) -> Rejection | None:
    if not call.key.startswith("ASIA") or not role_sessions.has_ended(call.key):
        return None
    if call.service == "ec2":
        return Rejection("RequestExpired", "Request has expired.")
    code = "ExpiredTokenException" if call.is_json else "ExpiredToken"
    return Rejection(code, "The security token included in the request is expired", 403)
