"""For tests that start training processes: makes `train` importable, from this checkout only, and leaves no
process behind."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest
from support.training import launch

if str(launch.ROOT) not in sys.path:
    sys.path.insert(0, str(launch.ROOT))


@pytest.fixture(scope="session", autouse=True)
def no_process_is_left() -> Iterator[None]:
    """End what a test has left, at the end of the session."""
    yield
    launch.kill_all()
