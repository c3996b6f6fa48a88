"""A pytest plugin: `pytest_plugins = "cloudddp.pytest"` in a conftest.py gives the tests of any project the
fixture `cloudddp_sim`, in which cloudddp uses simulated nodes on this computer and no AWS account."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import cloudddp


@pytest.fixture(scope="session")
def cloudddp_sim() -> Iterator[str]:
    """Start the simulator for the tests of this session; yields the endpoint of its EC2."""
    with cloudddp.sim() as endpoint:
        yield endpoint
