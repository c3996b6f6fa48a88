"""Fixtures of several files of this folder."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from cloudddp.aws import removal
from cloudddp.aws.client import AWS
from cloudddp.config import timing


@pytest.fixture
def aws(cli: Any, faults: Any, monkeypatch: pytest.MonkeyPatch) -> AWS:
    """Calls of this process in place of a command, through `faults`."""
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    for name, value in cli.env.items():
        if name.startswith("AWS_"):
            monkeypatch.setenv(name, value)
    return AWS(region="us-east-1")


@pytest.fixture
def limits(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Shorten the time limits of calls in this process; a teardown then looks again every 0.2 s."""

    def shorten(scale: float = timing.SMALLEST_SCALE, **seconds: float) -> None:
        shortened = replace(timing.Timing().scaled(scale), **seconds)
        monkeypatch.setattr(timing, "current", lambda: shortened)
        monkeypatch.setattr(removal, "POLL_SECONDS", 0.2)

    return shorten
