"""Calls that a policy denies: which action on which resource, read from AWS's message, and what to do about
it.

AWS's text ends with an encoded message. It is for sts:DecodeAuthorizationMessage and never shown: it can be
10,000 characters long, and it describes policies that the caller may not read.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from cloudddp.errors import AWSError
from cloudddp.files import payload_root
from cloudddp.text import one_line

CODES = ("UnauthorizedOperation", "AccessDenied", "AccessDeniedException")

Decode = Callable[[str], str]
"""Returns the JSON of an encoded message, or '' if the caller may not decode it."""

_MAX_ENCODED = 10240  # characters that DecodeAuthorizationMessage accepts
_MAX_DECODED = 200_000
_SHOWN = 300  # characters of a name in a message
_SCP = "service control policy"

# "User: arn:... is not authorized to perform: ec2:RunInstances on resource: arn:... because no identity-based
# policy allows the ec2:RunInstances action", or "... with an explicit deny in a service control policy".
# Older messages, and some services, have only a part of it.
_ACTION = re.compile(r"is not authorized to perform: ([A-Za-z0-9-]{1,64}:[A-Za-z0-9*]{1,128})")
_RESOURCE = re.compile(r"on resource: (\S{1,2048})")
_NO_ALLOW = re.compile(r"because no ([a-z -]{1,40}) allows")
_DENY = re.compile(r"with an explicit deny in an? ([a-z -]{1,40})")
_ENCODED = re.compile(r"[Ee]ncoded authorization failure message: ([A-Za-z0-9+/=_-]+)")


@dataclass(frozen=True, slots=True)
class Denial:
    """`action` is always known; other texts are '' if AWS does not say. `policy` is the kind of policy that
    decided."""

    action: str
    resource: str = ""
    policy: str = ""
    explicit: bool = False  # denied by a statement, not for lack of one
    statement: str = ""  # the Sid of that statement


def denied(code: str, message: str, action: str, region: str, decode: Decode) -> AWSError:
    """Return the error for a denied call of `action` in a region."""
    denial = read(message, action)
    encoded = _ENCODED.search(message)
    if encoded and len(encoded[1]) <= _MAX_ENCODED:
        denial = completed(denial, decode(encoded[1]))
    error = AWSError(f"{_sentence(denial, region)} ({code})", hint=_hint(denial), code=code)
    error.organization = denial.policy == _SCP
    return error


def read(message: str, action: str) -> Denial:
    """Return what AWS's message says. `action` is the one that was called; a message can name another that it
    implies."""
    named, resource = _ACTION.search(message), _RESOURCE.search(message)
    deny, no_allow = _DENY.search(message), _NO_ALLOW.search(message)
    policy = deny or no_allow
    return Denial(
        action=named[1] if named else action,
        resource=one_line(resource[1].rstrip("."), _SHOWN) if resource else "",
        policy=policy[1].strip() if policy else "",
        explicit=deny is not None,
    )


class _Decoded(msgspec.Struct, rename="camel"):
    explicit_deny: bool = False
    matched_statements: dict[str, list[dict[str, Any]]] = {}
    context: dict[str, Any] = {}


def completed(denial: Denial, decoded: str) -> Denial:
    """Return the denial with what the decoded message adds. Text in another form than AWS's adds nothing."""
    if not decoded or len(decoded) > _MAX_DECODED:
        return denial
    try:
        found = msgspec.json.decode(decoded, type=_Decoded)
    except (msgspec.MsgspecError, RecursionError, ValueError):
        return denial
    action, resource = (one_line(str(found.context.get(name, "")), _SHOWN) for name in ("action", "resource"))
    statements = found.matched_statements.get("items") if found.explicit_deny else []
    return replace(
        denial,
        action=action if ":" in action else denial.action,
        resource=denial.resource or resource,
        explicit=denial.explicit or found.explicit_deny,
        statement=one_line(str(statements[0].get("statementId", "")), _SHOWN) if statements else "",
    )


def _sentence(denial: Denial, region: str) -> str:
    # A resource names its region; a call without one may be denied because of the region.
    on = f" on {denial.resource}" if denial.resource not in ("", "*") else f" in {region}"
    if denial.explicit:
        where = f" in a {denial.policy}" if denial.policy == _SCP else " in a policy"
        statement = f", statement {denial.statement}" if denial.statement else ""
        return f"AWS denied {denial.action}{on}: explicit deny{where}{statement}"
    return f"AWS denied {denial.action}{on}: no {denial.policy or 'policy'} allows it"


def _hint(denial: Denial) -> str:
    if denial.policy == _SCP:
        forbidden = "a rule of your organization forbids it for every user of the account"
        return (
            f"{forbidden}, or demands a tag (--tag K=V), a KMS key (--kms-key) or another region (--region): "
            "see docs/organizations.md in cloudddp's repository, or ask its administrators"
        )
    wanted = payload_root() / "infra" / "iam" / "operator.json"
    more = "; kms_key and instance_profile need more: docs/organizations.md in cloudddp's repository"
    also = more if denial.action.partition(":")[0] in ("kms", "iam") else ""
    return (
        f"ask for this permission for your AWS user or role; {wanted} has those of every call by "
        f"default{also}"
    )
