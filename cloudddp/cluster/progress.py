"""The callback by which long operations report progress: one sentence at a time."""

from __future__ import annotations

from collections.abc import Callable

ProgressCallback = Callable[[str], None]


def ignore(_: str) -> None:
    """Report nothing."""
