"""What a text of the settings may be, with more than one user, and why one is not allowed. Pure."""

from __future__ import annotations

import re
from typing import Annotated, Any

from msgspec import Meta

_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400}


def limited(*, allowed: str = "", **limits: Any) -> Meta:
    """Return limits of a value, as msgspec checks them. `allowed`: a pattern in words, for messages and the
    reference."""
    return Meta(extra={"allowed": allowed} if allowed else None, **limits)


Relative = Annotated[
    str,
    limited(
        allowed="a relative path inside the project, without '..'",
        pattern=r"^(?!/)(?!~)(?!(.*/)?\.\.(/|$)).+\Z",
    ),
]


def seconds_of(text: str) -> float:
    """Return the seconds of a valid time: 0, 45s, 30m, 2h, 1d. 0.0 for anything else."""
    found = re.fullmatch(r"([0-9]+)([smhd])", text)
    return float(int(found[1]) * _UNITS[found[2]]) if found else 0.0


S3 = (
    r"s3://(?!xn--)(?!\d+\.\d+\.\d+\.\d+(/|\Z))(?!.{0,63}\.\.)[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]"
    r"(/(?!/)(?!(.*/)?\.{1,2}(/|\Z))(?!.*//)[A-Za-z0-9!_.*'()=+@/-]{0,440})?"
)

NOTIFY = (
    "https://HOST/... (http:// with localhost) without a user name, '$NAME' for a variable of the job, or a "
    "command of one line and at most 2000 characters"
)
NOTIFY_PATTERN = (
    r"(https://([A-Za-z0-9._-]+|\[[0-9a-f:]+\])|http://(localhost|127(\.\d+){3}))(:\d+)?([/?][!-~]{0,1900})?"
    r"|(?![A-Za-z][A-Za-z0-9+.-]*://)(?=.*\S)[^\x00-\x1f\x7f]{1,2000}"
)
# A setting, '' for all; what a text of it is like; why it is not allowed.
_REASONS = (
    ("", r"\s*", "it is empty"),
    ("instance_type", r"(.*,)?\s*(,.*)?", "there is nothing beside a comma"),
    ("", r"\s.*|.*\s", "it begins or ends with a space"),
    ("notify", r"\w+://[^/]*@.*", "the URL has a user name"),
    ("notify", r"http://.*", "http:// is for localhost"),
    ("notify", r"(?!https:)\w+://.*", "the URL does not begin with https://"),
)


def why_not(key: str, value: Any) -> str:
    """Return why a text is not allowed, to append to a message; '' where what is allowed says it."""
    text = value if isinstance(value, str) else "-"
    reasons = (why for name, like, why in _REASONS if name in ("", key) and re.fullmatch(like, text, re.S))
    return f": {found}" if (found := next(reasons, "")) else ""
