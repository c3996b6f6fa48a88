"""Simulated delays: eventual consistency, state transitions, booting, and visibility after termination."""

from __future__ import annotations

import re
import socket
import time
from pathlib import Path
from typing import Any

import pytest
from botocore.exceptions import ClientError
from support.harness import until
from support.simlab import Laptop

from cloudddp.sim import control


def start(home: Path, **timing: float) -> Laptop:
    named = {name.replace("_", "-"): value for name, value in timing.items()}
    return Laptop(control.start(home, nodes="process", timing=named), "key")


def first(laptop: Laptop, wanted: Any, ids: list[str]) -> float:
    """Return when the state was first seen (monotonic clock)."""
    until(lambda: {i["State"]["Name"] for i in laptop.describe(*ids)} == {wanted})
    return time.monotonic()


def test_new_instance_is_not_found_at_first(home: Path) -> None:
    laptop = start(home, unknown=1.5)
    began = time.monotonic()
    ids = [instance["InstanceId"] for instance in laptop.run(2)]
    listed = laptop.ec2.describe_instances()["Reservations"]
    assert listed == [] or time.monotonic() - began >= 1.5

    def found() -> bool:
        try:
            return len(laptop.describe(*ids)) == 2
        except ClientError as refused:
            assert refused.response["Error"]["Code"] == "InvalidInstanceID.NotFound"
            return False

    until(found)
    assert time.monotonic() - began >= 1.5


def test_minimum_state_times(home: Path) -> None:
    laptop = start(home, pending=1.0, shutting_down=1.0)
    began = time.monotonic()
    ids = [laptop.run()[0]["InstanceId"]]
    assert laptop.state(ids[0]) == "pending" or time.monotonic() - began >= 1.0
    assert first(laptop, "running", ids) - began >= 1.0
    ended = time.monotonic()
    laptop.ec2.terminate_instances(InstanceIds=ids)
    (shown,) = laptop.describe(ids[0])
    assert shown["State"]["Name"] == "shutting-down" or time.monotonic() - ended >= 1.0
    assert shown["StateReason"]["Code"] == "Client.UserInitiatedShutdown"  # shown from the call on
    reason = shown["StateTransitionReason"]
    assert re.fullmatch(r"User initiated \([0-9-]{10} [0-9:]{8} GMT\)", reason)
    assert first(laptop, "terminated", ids) - ended >= 1.0
    assert laptop.describe(ids[0])[0]["StateTransitionReason"] == reason


def test_booting_time(home: Path) -> None:
    laptop = start(home, booting=2.0)
    began = time.monotonic()
    (instance,) = laptop.launch()

    def answers() -> bool:
        try:
            with socket.create_connection(
                (instance["PublicIpAddress"], laptop.sim.ssh_port), timeout=5
            ) as line:
                return line.recv(4) == b"SSH-"
        except OSError:
            return False

    until(answers)
    assert time.monotonic() - began >= 2.0
    laptop.connect(instance["PublicIpAddress"])


def test_terminate_while_booting(home: Path) -> None:
    laptop = start(home, booting=600.0)
    (instance,) = laptop.launch()
    laptop.terminate(instance["InstanceId"])


def test_terminated_instance_is_forgotten(home: Path) -> None:
    laptop = start(home, visible=1.0)
    (instance,) = laptop.launch()
    requested = time.monotonic()
    laptop.ec2.terminate_instances(InstanceIds=[instance["InstanceId"]])
    until(lambda: laptop.ec2.describe_instances()["Reservations"] == [])
    assert time.monotonic() - requested >= 1.0
    with pytest.raises(ClientError, match=r"InvalidInstanceID\.NotFound"):
        laptop.describe(instance["InstanceId"])
    laptop._launched.clear()
