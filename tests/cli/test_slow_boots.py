"""`up` on process nodes that boot slowly, or with defective GPUs."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from cloudddp.sim import control


@pytest.fixture
def boot(simulator: Any) -> Iterator[Callable[..., None]]:
    """Set how nodes boot; reset after the test."""
    changed: set[str] = set()

    def set_boot(**condition: float) -> None:
        changed.update(condition)
        control.conditions(simulator, {"boot": condition})

    yield set_boot
    control.conditions(simulator, {"boot": dict.fromkeys(changed)})


def test_up_waits_while_logins_are_refused(cli: Any, boot: Callable[..., None]) -> None:
    boot(ssh_seconds=1, nologin_seconds=2, first_import_seconds=1)
    assert "is ready" in cli.ok("up", "-n", "2")


def test_wait_for_ssh_shows_its_limit_and_the_reason(cli: Any, boot: Callable[..., None]) -> None:
    boot(ssh_seconds=2)
    done = cli("up", "-n", "2", CLOUDDDP_TIME_SCALE="0.1")
    assert "waiting for SSH on every node, for up to 10 min\n" in done.stderr, done.stderr
    assert re.search(
        r"waiting for SSH on every node, for up to 10 min; node 0 \(i-\w+\) at .*refused", done.stderr
    )


@pytest.mark.parametrize(
    ("condition", "problem"),
    [
        ("failed_gpus", "shows 3 of 4 GPUs (nvidia-smi -L)"),
        ("unusable_gpus", "has 3 of 4 GPUs that PyTorch can use: GPU 3: CUDA error: device is lost"),
    ],
)
def test_defective_gpus_are_refused_unless_allowed(
    cli: Any, boot: Callable[..., None], remains: Any, condition: str, problem: str
) -> None:
    pytest.importorskip("torch")
    boot(**{condition: 1})
    done = cli("up", "-n", "1", "-t", "g5.12xlarge", CLOUDDDP_TIME_SCALE="0.05")
    assert done.returncode == 1
    assert problem in done.stderr
    assert (
        "checking GPUs, interfaces and the deadline on every node: waits until it has booted, " in done.stderr
    )
    assert "s for its 4 GPUs" in done.stderr
    assert remains().nothing
    done = cli("up", "-n", "1", "-t", "g5.12xlarge", "--allow-cpu", CLOUDDDP_TIME_SCALE="0.05")
    assert done.returncode == 0, done.stderr
    assert "warning: node 0" in done.stderr
    assert problem in done.stderr
