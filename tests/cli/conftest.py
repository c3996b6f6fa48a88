"""Fixtures of several files of this folder."""

from __future__ import annotations

import os
from typing import Any

import pytest

from cloudddp.aws.client import AWS


@pytest.fixture
def aws(cli: Any, faults: Any, monkeypatch: pytest.MonkeyPatch) -> AWS:
    """Calls of this process in place of a command, through `faults`."""
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    for name, value in cli.env.items():
        if name.startswith("AWS_"):
            monkeypatch.setenv(name, value)
    return AWS(region="us-east-1")
