"""Condition operators (IAM User Guide, "IAM JSON policy elements: Condition operators")."""

from __future__ import annotations

import fnmatch
import functools
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

Compare = Callable[[str, str], bool]  # a value of the request, and one of the policy

_SETS = ("ForAllValues", "ForAnyValue")


@dataclass(frozen=True, slots=True)
class Operator:
    """`negated`: no value of the policy may match. `over`: ForAllValues, ForAnyValue or ''. `if_exists`: true
    without the key."""

    name: str
    negated: bool
    over: str
    if_exists: bool

    def holds(self, wanted: Sequence[str], actual: Sequence[str] | None) -> bool:
        """Return whether the values of a request satisfy it. `actual` is None if the request lacks the key.

        Without the key, a negated operator is true and others are false; ForAllValues is true, ForAnyValue
        false (IAM User Guide, "Multivalued context keys").
        """
        if self.name == "Null":
            return any((actual is None) == (one == "true") for one in wanted)
        if actual is None or not actual:
            return self.if_exists or self.over == "ForAllValues" or (self.negated and self.over == "")
        compare = _COMPARE[self.name]
        matched = [any(compare(value, one) for one in wanted) != self.negated for value in actual]
        if self.over == "ForAllValues" or (self.negated and not self.over):
            return all(matched)
        return any(matched)


def parse(name: str) -> Operator | None:
    """Return the operator of that name, such as ForAllValues:StringLikeIfExists; None for an unknown one."""
    over, separator, rest = name.rpartition(":")
    if separator and over not in _SETS:
        return None
    plain = rest.removesuffix("IfExists")
    if plain not in NAMES or (plain == "Null" and (separator or plain != rest)):
        return None
    return Operator(_positive(plain), plain in _NEGATED, over, plain != rest)


def matches(pattern: str, text: str) -> bool:
    """Return whether text matches a pattern, in which `*` is any text, also none, and `?` is one
    character."""
    return _compiled(pattern).fullmatch(text) is not None


@functools.lru_cache(maxsize=1024)
def _compiled(pattern: str) -> re.Pattern[str]:
    # fnmatch would also interpret [...], which IAM does not.
    return re.compile(fnmatch.translate(pattern.replace("[", "[[]")))


def _positive(name: str) -> str:
    return name.replace("Not", "", 1) if name in _NEGATED else name


def _numbers(test: Callable[[float, float], bool]) -> Compare:
    def compare(actual: str, wanted: str) -> bool:
        try:
            return test(float(actual), float(wanted))
        except ValueError:
            return False

    return compare


_COMPARE: dict[str, Compare] = {
    "StringEquals": lambda actual, wanted: actual == wanted,
    "StringEqualsIgnoreCase": lambda actual, wanted: actual.lower() == wanted.lower(),
    "StringLike": lambda actual, wanted: matches(wanted, actual),
    "ArnEquals": lambda actual, wanted: matches(wanted, actual),
    "ArnLike": lambda actual, wanted: matches(wanted, actual),
    "Bool": lambda actual, wanted: actual.lower() == wanted.lower(),
    "NumericEquals": _numbers(lambda actual, wanted: actual == wanted),
    "NumericLessThan": _numbers(lambda actual, wanted: actual < wanted),
    "NumericLessThanEquals": _numbers(lambda actual, wanted: actual <= wanted),
    "NumericGreaterThan": _numbers(lambda actual, wanted: actual > wanted),
    "NumericGreaterThanEquals": _numbers(lambda actual, wanted: actual >= wanted),
}
_NEGATED = (
    "StringNotEquals",
    "StringNotEqualsIgnoreCase",
    "StringNotLike",
    "ArnNotEquals",
    "ArnNotLike",
    "NumericNotEquals",
)
NAMES = (*_COMPARE, *_NEGATED, "Null")
