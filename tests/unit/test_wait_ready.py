"""How long a node may take to boot, and which of its GPUs can be used."""

from __future__ import annotations

from typing import Any

import pytest

from cloudddp.agent.protocol.machine import ProbeReply
from cloudddp.cluster.wait_ready import missing_gpus, ready_minutes
from cloudddp.config.spec import ClusterSpec


@pytest.mark.parametrize(
    ("instance_type", "gpus", "given", "minutes"),
    [
        ("g5.xlarge", 1, None, 10),
        ("t3.micro", 0, None, 10),
        ("g5.12xlarge", 4, None, 30),
        ("p5.48xlarge", 8, None, 30),
        ("g4dn.metal", 8, None, 40),
        ("m5.metal-24xl", 0, None, 40),
        ("g4dn.metal", 8, 3.0, 3),
        ("g5.xlarge", 1, 90.0, 90),
    ],
)
def test_minutes_depend_on_the_type_unless_set(
    instance_type: str, gpus: int, given: float | None, minutes: float
) -> None:
    assert ready_minutes(ClusterSpec(instance_type=instance_type, ready_minutes=given), gpus) == minutes


def reply(**changes: Any) -> ProbeReply:
    known = {
        "interface": "ens5",
        "gpus": 8,
        "cpus": 96,
        "python": "/usr/bin/python3",
        "free_port": 29500,
        "agent_port": 29501,
        "time": 1e9,
        "timer_state": "active",
        "timer_next": "x",
        "running": (),
    }
    return ProbeReply(**{**known, **changes})


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
    found = missing_gpus(reply(**changes), 8)
    assert found.startswith(problem)
    assert found.isprintable()
    assert bool(found) == bool(problem)
