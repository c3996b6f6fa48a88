"""Makes `train` importable for the tests in this folder, from this checkout only."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest
from support.training import launch

if str(launch.ROOT) not in sys.path:
    sys.path.insert(0, str(launch.ROOT))


@pytest.fixture(scope="session", autouse=True)
def _no_process_is_left() -> Iterator[None]:
    yield
    launch.kill_all()
