"""The rules for extra tags. Pure.

EC2 allows every Unicode character in tags (Amazon EC2 User Guide, "Tag your Amazon EC2 resources"). Keys have up to 127
characters in the service model of EC2 and 128 in that guide, values 256; keys of AWS begin with `aws:` in any case, and
a resource has at most 50 tags.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Mapping

OWN_PREFIX = "cloudddp:"
MOST = 35  # of the 50 of a resource; the others are for cloudddp's own tags
_LONGEST_KEY, _LONGEST_VALUE = 127, 256
_AWS_PREFIX = "aws:"


def problem(tags: Mapping[str, str]) -> tuple[str, str] | None:
    """Return what is wrong with extra tags and what is allowed, or None."""
    for key, value in tags.items():
        folded = key.lower()
        if folded.startswith(_AWS_PREFIX):
            return f"tag key {key!r} begins with 'aws:', which AWS reserves", "choose another key"
        if folded.startswith(OWN_PREFIX):
            return f"tag key {key!r} begins with 'cloudddp:', which is reserved", "choose another key"
        if not 0 < len(key) <= _LONGEST_KEY or _has_control_characters(key):
            allowed = f"allowed: 1 to {_LONGEST_KEY} characters, without control characters"
            return f"tag key {key[:60]!r} is not allowed", allowed
        if len(value) > _LONGEST_VALUE or _has_control_characters(value):
            allowed = f"allowed: up to {_LONGEST_VALUE} characters, without control characters"
            return f"the value of tag {key!r} is not allowed", allowed
    return None


def too_many(tags: Mapping[str, str]) -> tuple[str, str] | None:
    """Return what is wrong with the number of extra tags of all sources together, or None."""
    if len(tags) <= MOST:
        return None
    return (
        f"{len(tags)} extra tags are too many",
        f"allowed: up to {MOST}; EC2 allows 50 tags on a resource, and the others are for cloudddp",
    )


def _has_control_characters(text: str) -> bool:
    return any(unicodedata.category(character) == "Cc" for character in text)
