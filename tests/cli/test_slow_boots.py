"""`up` on process nodes that boot slowly, or with defective GPUs."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from support.harness import TIMEOUT, listed_nodes, wait_for

from cloudddp.simulator import control


@pytest.fixture
def boot(simulator: Any) -> Iterator[Callable[..., None]]:
    """Set how nodes boot; reset after the test."""
    changed: set[str] = set()

    def set_boot(**condition: float) -> None:
        changed.update(condition)
        control.conditions(simulator, {"boot": condition})

    yield set_boot
    control.conditions(simulator, {"boot": dict.fromkeys(changed)})


def test_up_waits_while_logins_are_refused_and_refuses_defective_gpus(
    cli: Any, boot: Callable[..., None], remains: Any
) -> None:
    """It shows the limit and the reason. tests/cli/test_terminal.py has --allow-cpu."""
    pytest.importorskip("torch")
    boot(ssh_seconds=4, nologin_seconds=8, first_import_seconds=1, unusable_gpus=1)
    err = cli.fails(1, "up", "-n", "1", "-t", "g5.12xlarge", CLOUDDDP_TIME_SCALE="0.1")
    assert re.search(r"waiting for SSH on every node, for up to \d+ min\n", err)
    assert re.search(r"min; not yet: node 0; node 0 \(i-\w+\) at .*(refused|during the login)", err), err
    assert "has 3 of 4 GPUs that PyTorch can use: GPU 3: CUDA error: device is lost" in err
    assert "checking GPUs, interfaces and the deadline on every node: waits until it has booted, " in err
    assert "s for its 4 GPUs" in err
    assert remains().nothing


def test_up_does_not_wait_for_a_node_that_was_stopped(cli: Any, ec2: Any, boot: Callable[..., None]) -> None:
    boot(ssh_seconds=600)
    process = cli.start("up", "-n", "1")
    wait_for(lambda: "waiting for SSH" in process.stderr.readline(), "the node boots")
    (node,) = [one["instance_id"] for one in listed_nodes(cli)]
    ec2.stop_instances(InstanceIds=[node])
    _, err = process.communicate(timeout=TIMEOUT)
    assert process.returncode == 1
    assert f"node 0 ({node}) was stopped while booting: Client.UserInitiatedShutdown" in err
