"""How functions that take long report what they do: one sentence at a time, for people."""

from __future__ import annotations

from collections.abc import Callable

ProgressCallback = Callable[[str], None]


def ignore(_: str) -> None:
    """The callback of a caller that reports nothing."""
