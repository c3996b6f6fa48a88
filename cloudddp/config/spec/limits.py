"""How a field of the settings states its limits and its help; and times in settings, such as 30m. Pure."""

from __future__ import annotations

import re
from typing import Annotated, Any

from msgspec import Meta

MAX_WAIT = 14 * 86400  # seconds
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
