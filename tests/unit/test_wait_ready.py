"""How long nodes may take to boot, and which of their GPUs can be used."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest
from support import corpus
from support.instances import inventory_instance

from cloudddp.agent.protocol.machine import ProbeReply
from cloudddp.aws import removal
from cloudddp.aws.client import AWS
from cloudddp.cluster.wait_ready import missing_gpus, ready_minutes
from cloudddp.config.cluster_spec import ClusterSpec
from cloudddp.tags import Tags


@pytest.mark.parametrize(
    ("instance_type", "gpus", "given", "minutes"),
    [
        ("g5.xlarge", 1, None, 10),
        ("g5.12xlarge", 4, None, 30),
        ("p5.48xlarge", 8, None, 30),
        ("g4dn.metal", 8, None, 40),
        ("g4dn.metal", 8, 3.0, 3),
    ],
)
def test_minutes_depend_on_the_type_unless_set(
    instance_type: str, gpus: int, given: float | None, minutes: float
) -> None:
    assert ready_minutes(ClusterSpec(instance_type=instance_type, ready_minutes=given), gpus) == minutes


REPLY = ProbeReply(**corpus.example(ProbeReply) | {"gpus": 8, "torch_gpus": None})


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({}, ""),
        ({"torch_gpus": 8}, ""),
        ({"gpus": 0}, "shows 0 of 8 GPUs (nvidia-smi -L)"),
        ({"torch_gpus": 7}, "has 7 of 8 GPUs that PyTorch can use"),
        ({"torch_gpus": 0, "torch_error": "a\nb\x1b"}, "has 0 of 8 GPUs that PyTorch can use: a"),
    ],
)
def test_gpus_that_cannot_be_used(changes: dict[str, Any], problem: str) -> None:
    found = missing_gpus(replace(REPLY, **changes), 8)
    assert found.startswith(problem)
    assert found.isprintable()
    assert bool(found) == bool(problem)


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
    # The module's own clock: other threads of this process sleep too.
    clock = SimpleNamespace(monotonic=lambda: now[0], sleep=lambda _: now.__setitem__(0, now[0] + 10.0))
    monkeypatch.setattr(removal, "time", clock)
    ending: Any = inventory_instance("i-a", Tags(gpus=gpus), state="shutting-down", type=kind)
    assert removal.wait_terminated(cast(AWS, None), lambda: [ending]) == [ending]
    assert now[0] == pytest.approx(60 * minutes, abs=11)
