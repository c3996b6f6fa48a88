"""Waiting until instances have terminated: large ones take longer."""

from __future__ import annotations

import time
from typing import Any, cast

import pytest
from support.instances import inventory_instance

from cloudddp.aws import removal
from cloudddp.aws.client import AWS
from cloudddp.tags import Tags


@pytest.mark.parametrize(
    ("kind", "gpus", "minutes"),
    [
        ("g5.xlarge", 1, 10),
        ("p5.48xlarge", 8, 30),
        ("g4dn.metal", 8, 40),
        ("", None, 10),
        ("p5.48xlarge", None, 30),
        ("trn2.48xlarge", 0, 30),
        ("g5.8xlarge", None, 10),
        ("c5.24xlarge", 0, 30),
    ],
)
def test_limit_depends_on_the_type(
    monkeypatch: pytest.MonkeyPatch, kind: str, gpus: int | None, minutes: int
) -> None:
    now = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    monkeypatch.setattr(time, "sleep", lambda _: now.__setitem__(0, now[0] + 10.0))
    ending: Any = inventory_instance("i-a", Tags(gpus=gpus), state="shutting-down", type=kind)
    assert removal.wait_terminated(cast(AWS, None), lambda: [ending]) == [ending]
    assert now[0] == pytest.approx(60 * minutes, abs=11)
