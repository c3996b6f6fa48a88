"""`up` on process nodes that boot slowly, or with defective GPUs."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from support.harness import TIMEOUT, wait_for

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


def test_up_waits_while_logins_are_refused(cli: Any, boot: Callable[..., None]) -> None:
    """And shows the limit and the reason."""
    boot(ssh_seconds=7, nologin_seconds=8, first_import_seconds=1)
    err = cli.messages("up", "-n", "2", CLOUDDDP_TIME_SCALE="0.1")
    wait = "waiting for SSH on every node, for up to 10 min"
    assert f"{wait}\n" in err
    assert re.search(rf"{wait}; not yet: nodes 0, 1; node \d \(i-\w+\) at .*refused", err)


def test_defective_gpus_are_refused_unless_allowed(cli: Any, boot: Callable[..., None], remains: Any) -> None:
    pytest.importorskip("torch")
    problem = "has 3 of 4 GPUs that PyTorch can use: GPU 3: CUDA error: device is lost"
    boot(unusable_gpus=1)
    err = cli.fails(1, "up", "-n", "1", "-t", "g5.12xlarge", CLOUDDDP_TIME_SCALE="0.05")
    assert problem in err
    assert "checking GPUs, interfaces and the deadline on every node: waits until it has booted, " in err
    assert "s for its 4 GPUs" in err
    assert remains().nothing
    err = cli.messages("up", "-n", "1", "-t", "g5.12xlarge", "--allow-cpu", CLOUDDDP_TIME_SCALE="0.05")
    assert "warning: node 0" in err
    assert problem in err


def test_jobs_are_listed_while_a_replacement_boots(cli: Any, ec2: Any, boot: Callable[..., None]) -> None:
    cli.write("cloudddp.toml", '[job]\nrendezvous = "direct"\nnproc_per_node = 1\n')
    cli.write("fail.py", "raise SystemExit(5)\n")
    cli.ok("up", "-n", "2")
    assert cli("launch", "fail.py").returncode == 5
    ids = [node["instance_id"] for node in json.loads(cli.ok("status", "--json"))[0]["nodes"]]
    ec2.terminate_instances(InstanceIds=ids[1:])
    wait_for(lambda: len(running(cli)) == 1, "the node has terminated")
    boot(ssh_seconds=15)
    process = cli.start("resume")
    wait_for(lambda: len(running(cli)) == 2, "the replacement is launched")
    process.kill()  # otherwise `jobs` waits for it: both need the nodes' host keys
    process.communicate(timeout=TIMEOUT)
    done = cli.exits(0, "jobs", "--json")
    assert "node 1 is booting: it replaces a lost node" in done.stderr
    assert [one["state"] for one in json.loads(done.stdout)] == ["failed"]


def test_up_does_not_wait_for_a_node_that_was_stopped(cli: Any, ec2: Any, boot: Callable[..., None]) -> None:
    boot(ssh_seconds=600)
    process = cli.start("up", "-n", "1")
    wait_for(lambda: "waiting for SSH" in process.stderr.readline(), "the node boots")
    (node,) = running(cli)
    ec2.stop_instances(InstanceIds=[node])
    _, err = process.communicate(timeout=TIMEOUT)
    assert process.returncode == 1
    assert f"node 0 ({node}) was stopped while booting: Client.UserInitiatedShutdown" in err


def running(cli: Any) -> list[str]:
    nodes = json.loads(cli.ok("status", "--json"))[0]["nodes"]
    return [one["instance_id"] for one in nodes if one["state"] in ("pending", "running")]
