"""Policy documents: JSON decoded into typed statements.

Grammar: IAM User Guide, "Grammar of the IAM JSON policy language". What IAM would reject, and what
`operators` does not implement, is an error: a condition that is silently ignored would grant too much.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from cloudddp.simulator.iam import operators

MAX_CHARACTERS = 6144
"""Size of a managed policy without white space (IAM User Guide, "IAM and AWS STS quotas")."""

_VERSIONS = ("2012-10-17", "2008-10-17")
_ELEMENTS = {"Sid", "Effect", "Action", "NotAction", "Resource", "NotResource", "Condition"}


class InvalidPolicy(ValueError):
    """The text is not a policy that can be attached to a user, a role or an account."""


@dataclass(frozen=True, slots=True)
class Condition:
    """One key of one operator: `StringEquals` with `aws:RequestTag/team` and the values that it is compared
    with."""

    operator: operators.Operator
    key: str
    values: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Statement:
    """`actions` and `resources` are patterns; with `not_action` or `not_resource` the statement is about all
    others."""

    sid: str
    allow: bool
    actions: tuple[str, ...]
    not_action: bool
    resources: tuple[str, ...]
    not_resource: bool
    conditions: tuple[Condition, ...]


@dataclass(frozen=True, slots=True)
class Policy:
    statements: tuple[Statement, ...]

    @property
    def denies_everything(self) -> bool:
        """Whether no statement allows anything."""
        return not any(statement.allow for statement in self.statements)


def parse(text: str) -> Policy:
    """Return the policy in a JSON document. Raises InvalidPolicy."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InvalidPolicy(f"not valid JSON: {error}") from None
    if not isinstance(found, dict):
        raise InvalidPolicy("not a JSON object")
    if (size := len("".join(text.split()))) > MAX_CHARACTERS:
        raise InvalidPolicy(
            f"{size} characters without white space; a managed policy has at most {MAX_CHARACTERS}"
        )
    if unknown := sorted(set(found) - {"Version", "Id", "Statement"}):
        raise InvalidPolicy(f"unknown element {unknown[0]!r}")
    if found.get("Version", _VERSIONS[1]) not in _VERSIONS:
        raise InvalidPolicy(f"Version {found['Version']!r} is not {_VERSIONS[0]}")
    listed = found.get("Statement")
    statements = listed if isinstance(listed, list) else [listed]
    if not listed:
        raise InvalidPolicy("no Statement")
    return Policy(tuple(_statement(item, number) for number, item in enumerate(statements, 1)))


def _statement(item: Any, number: int) -> Statement:
    if not isinstance(item, dict):
        raise InvalidPolicy(f"statement {number} is not a JSON object")
    sid = item.get("Sid", "")
    where = f"statement {sid or number}"
    if "Principal" in item or "NotPrincipal" in item:
        raise InvalidPolicy(f"{where}: Principal is for policies of resources and trust policies")
    if unknown := sorted(set(item) - _ELEMENTS):
        raise InvalidPolicy(f"{where}: unknown element {unknown[0]!r}")
    if not isinstance(sid, str) or (sid and not (sid.isascii() and sid.isalnum())):
        raise InvalidPolicy(f"{where}: a Sid has letters and digits only")
    if item.get("Effect") not in ("Allow", "Deny"):
        raise InvalidPolicy(f"{where}: Effect is Allow or Deny, not {item.get('Effect')!r}")
    actions, not_action = _one_of(item, "Action", "NotAction", where)
    resources, not_resource = _one_of(item, "Resource", "NotResource", where)
    for action in actions:
        if action != "*" and ":" not in action:
            raise InvalidPolicy(f"{where}: action {action!r} has no service, as in ec2:RunInstances")
    for resource in resources:
        if resource != "*" and resource.count(":") < 5 and not resource.endswith("*"):
            raise InvalidPolicy(f"{where}: resource {resource!r} is not an ARN")
    allow = item["Effect"] == "Allow"
    return Statement(
        sid,
        allow,
        actions,
        not_action,
        resources,
        not_resource,
        _conditions(item.get("Condition", {}), where),
    )


def _one_of(
    item: Mapping[str, Any], positive: str, negative: str, where: str
) -> tuple[tuple[str, ...], bool]:
    """Return the patterns of one of two elements, and whether it is the negative one."""
    if (positive in item) == (negative in item):
        raise InvalidPolicy(f"{where}: needs one of {positive} and {negative}")
    name = positive if positive in item else negative
    return _texts(item[name], f"{where}: {name}"), name == negative


def _texts(value: Any, where: str) -> tuple[str, ...]:
    """Return a value or a list of values as text: JSON's true is `true`."""
    values = value if isinstance(value, list) else [value]
    if not values or not all(isinstance(one, (str, bool, int, float)) for one in values):
        raise InvalidPolicy(f"{where} is not text or a list of texts")
    return tuple(str(one).lower() if isinstance(one, bool) else str(one) for one in values)


def _conditions(block: Any, where: str) -> tuple[Condition, ...]:
    if not isinstance(block, dict) or not all(isinstance(keys, dict) for keys in block.values()):
        raise InvalidPolicy(f"{where}: Condition is not {{operator: {{key: values}}}}")
    found = []
    for name, keys in block.items():
        operator = operators.parse(name)
        if operator is None:
            raise InvalidPolicy(
                f"{where}: the simulator does not implement the operator {name!r}; it has "
                f"{', '.join(operators.NAMES)}, with ForAllValues:, ForAnyValue: and IfExists"
            )
        for key, values in keys.items():
            found.append(Condition(operator, key, _texts(values, f"{where}: {name} of {key}")))
    return tuple(found)
