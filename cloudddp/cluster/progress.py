"""The callback by which long operations report progress: one sentence at a time."""

from __future__ import annotations

from collections.abc import Callable

from cloudddp.errors import Text

ProgressCallback = Callable[[Text], None]


def ignore(_: Text) -> None:
    """Report nothing."""
