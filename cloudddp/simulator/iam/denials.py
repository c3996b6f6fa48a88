"""What AWS says about a call that is not allowed, and the message that it encodes for
sts:DecodeAuthorizationMessage.

Wordings: IAM User Guide, "Troubleshoot access denied error messages"; AWS re:Post, "How do I decode and
analyze authorization errors for Amazon EC2 instance launch failures". The decoded JSON is that of the example
of DecodeAuthorizationMessage in the AWS CLI's reference.
"""

from __future__ import annotations

import base64
import binascii
import json
import zlib

from cloudddp.simulator.iam.evaluate import IDENTITY, Check, Decision

_MAX_ENCODED = 10240  # characters, of DecodeAuthorizationMessage
_ARTICLE = {IDENTITY: "an"}


def reason(check: Check, decision: Decision, principal: str) -> str:
    """Return the sentence about a denied check, without the encoded message."""
    on = "" if check.resource == "*" else f" on resource: {check.resource}"
    if decision.statement is not None:
        why = f"with an explicit deny in {_ARTICLE.get(decision.policy, 'a')} {decision.policy}"
    else:
        why = f"because no {decision.policy} allows the {check.action} action"
    return f"User: {principal} is not authorized to perform: {check.action}{on} {why}"


def ec2_message(check: Check, decision: Decision, principal: str) -> str:
    """Return the message of EC2's UnauthorizedOperation. For an action without resources nothing is
    encoded."""
    text = f"You are not authorized to perform this operation. {reason(check, decision, principal)}"
    if check.resource == "*":
        return text
    return f"{text}. Encoded authorization failure message: {encode(check, decision, principal)}"


def encode(check: Check, decision: Decision, principal: str) -> str:
    """Return the encoded authorization failure message: opaque text, as on AWS."""
    items = [
        {"key": key, "values": {"items": [{"value": value} for value in values]}}
        for key, values in check.context.items()
    ]
    matched = []
    if decision.statement is not None:
        matched.append(
            {
                "statementId": decision.statement.sid,
                "effect": "DENY",
                "actions": {"items": [{"value": one} for one in decision.statement.actions]},
                "resources": {"items": [{"value": one} for one in decision.statement.resources]},
            }
        )
    message = {
        "allowed": False,
        "explicitDeny": decision.statement is not None,
        "matchedStatements": {"items": matched},
        "failures": {"items": []},
        "context": {
            "principal": {"id": "AIDASIMULATED", "name": principal.rpartition("/")[2], "arn": principal},
            "action": check.action,
            "resource": check.resource,
            "conditions": {"items": items},
        },
    }
    packed = zlib.compress(json.dumps(message, separators=(",", ":")).encode())
    return base64.urlsafe_b64encode(packed).decode().rstrip("=")


def decode(text: str) -> str | None:
    """Return the JSON of an encoded message, or None if the simulator has not encoded it."""
    if not 0 < len(text) <= _MAX_ENCODED or not text.isascii():
        return None
    try:
        packed = base64.urlsafe_b64decode(text + "=" * (-len(text) % 4))
        found = zlib.decompressobj().decompress(packed, 1 << 20).decode()
        return found if "allowed" in json.loads(found) else None
    except (ValueError, TypeError, binascii.Error, zlib.error):
        return None
