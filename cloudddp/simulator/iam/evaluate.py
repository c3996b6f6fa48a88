"""Decides whether policies allow a call: an explicit deny wins, then an allow is needed from every kind of
policy.

IAM User Guide, "Policy evaluation logic". A call needs one decision per resource, and for each action that it
implies.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from cloudddp.simulator.iam.documents import Policy, Statement
from cloudddp.simulator.iam.operators import matches

IDENTITY = "identity-based policy"
SCP = "service control policy"

Context = Mapping[str, tuple[str, ...]]  # condition key -> its values; keys in any case

_VARIABLE = re.compile(r"\$\{([^}]*)\}")


@dataclass(frozen=True, slots=True)
class Check:
    """An action on one resource, an ARN or `*`, with the condition keys of the request."""

    action: str
    resource: str
    context: Context = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Decision:
    """If not allowed: the kind of policy that decided, and its statement if that is an explicit deny."""

    allowed: bool
    policy: str = ""
    statement: Statement | None = None


ALLOWED = Decision(True)


def evaluate(check: Check, identity: Policy | None, scp: Policy | None = None) -> Decision:
    """Return the decision on one check. A policy that is None does not limit.

    The context is looked up regardless of case, as IAM does for the names of condition keys.
    """
    context = {key.lower(): values for key, values in check.context.items()}
    policies = [(SCP, scp), (IDENTITY, identity)]
    applying = {kind: _applying(policy, check, context) for kind, policy in policies if policy is not None}
    for kind, statements in applying.items():
        for statement in statements:
            if not statement.allow:
                return Decision(False, kind, statement)
    for kind, statements in applying.items():
        if not statements:
            return Decision(False, kind)
    return ALLOWED


def _applying(policy: Policy, check: Check, context: Context) -> list[Statement]:
    return [statement for statement in policy.statements if applies(statement, check, context)]


def applies(statement: Statement, check: Check, context: Context) -> bool:
    """Return whether a statement is about a check. Keys of `context` are in lower case."""
    action = check.action.lower()
    if any(matches(pattern.lower(), action) for pattern in statement.actions) == statement.not_action:
        return False
    resources = [_substituted(pattern, context) for pattern in statement.resources]
    if any(one is not None and matches(one, check.resource) for one in resources) == statement.not_resource:
        return False
    for condition in statement.conditions:
        wanted = [one for value in condition.values if (one := _substituted(value, context)) is not None]
        if not condition.operator.holds(wanted, context.get(condition.key.lower())):
            return False
    return True


def _substituted(text: str, context: Context) -> str | None:
    """Return text with its policy variables replaced, as in ${aws:username}; None if the request lacks
    one."""
    missing = False

    def value(found: re.Match[str]) -> str:
        nonlocal missing
        if found[1] in ("*", "?", "$"):  # a character that would be special
            return found[1]
        values = context.get(found[1].lower())
        missing = missing or not values
        return values[0] if values else ""

    replaced = _VARIABLE.sub(value, text)
    return None if missing else replaced
