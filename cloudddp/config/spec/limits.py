"""How a field of the settings states its limits and its help."""

from __future__ import annotations

from typing import Annotated, Any

from msgspec import Meta


def limited(description: str, *, allowed: str = "", **limits: Any) -> Meta:
    """Limits of a value, as msgspec checks them; `allowed` states a pattern in words, for messages and the reference."""
    return Meta(description=description, extra={"allowed": allowed} if allowed else None, **limits)


Relative = Annotated[
    str,
    limited(
        "",
        allowed="a relative path inside the project, without '..'",
        pattern=r"^(?!/)(?!~)(?!(.*/)?\.\.(/|$)).+\Z",
    ),
]
