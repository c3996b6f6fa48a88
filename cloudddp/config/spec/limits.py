"""How a field of the settings states its limits."""

from __future__ import annotations

from typing import Annotated, Any

from msgspec import Meta


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
