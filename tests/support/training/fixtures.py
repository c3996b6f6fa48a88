"""Fixtures of tests that start training processes."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from support.training import launch


@pytest.fixture(scope="session", autouse=True)
def no_process_is_left() -> Iterator[None]:
    """End what a test has left, at the end of the session."""
    yield
    launch.kill_all()
