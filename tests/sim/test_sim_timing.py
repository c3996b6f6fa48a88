"""EC2 takes its time: new instances are unknown at first, run before they answer, and are seen after their end."""

from __future__ import annotations

import re
import socket
import time
from pathlib import Path
from typing import Any

import pytest
from botocore.exceptions import ClientError
from simlab import Laptop, until

from cloudddp.sim import control


def start(home: Path, **timing: float) -> Laptop:
    named = {name.replace("_", "-"): value for name, value in timing.items()}
    return Laptop(control.start(home, nodes="process", timing=named), "key")


def first(laptop: Laptop, wanted: Any, ids: list[str]) -> float:
    """When `wanted` state was first seen, by the clock of this test."""
    until(lambda: {i["State"]["Name"] for i in laptop.describe(*ids)} == {wanted})
    return time.monotonic()


def test_a_new_instance_is_not_found_for_a_moment_and_then_is(home: Path) -> None:
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


def test_states_last_at_least_as_long_as_was_asked(home: Path) -> None:
    laptop = start(home, pending=1.0, shutting_down=1.0)
    began = time.monotonic()
    ids = [laptop.run()[0]["InstanceId"]]
    assert laptop.state(ids[0]) == "pending" or time.monotonic() - began >= 1.0
    assert first(laptop, "running", ids) - began >= 1.0
    ended = time.monotonic()
    laptop.ec2.terminate_instances(InstanceIds=ids)
    (shown,) = laptop.describe(ids[0])
    assert shown["State"]["Name"] == "shutting-down" or time.monotonic() - ended >= 1.0
    assert shown["StateReason"]["Code"] == "Client.UserInitiatedShutdown"  # said from the call on
    asked = shown["StateTransitionReason"]
    assert re.fullmatch(r"User initiated \([0-9-]{10} [0-9:]{8} GMT\)", asked)
    assert first(laptop, "terminated", ids) - ended >= 1.0
    assert laptop.describe(ids[0])[0]["StateTransitionReason"] == asked


def test_ssh_answers_later_than_running(home: Path) -> None:
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


def test_an_instance_that_boots_can_be_terminated_at_once(home: Path) -> None:
    laptop = start(home, booting=600.0)
    (instance,) = laptop.launch()
    laptop.terminate(instance["InstanceId"])


def test_a_terminated_instance_is_seen_for_a_while_and_then_forgotten(home: Path) -> None:
    laptop = start(home, visible=1.0)
    (instance,) = laptop.launch()
    told = time.monotonic()
    laptop.ec2.terminate_instances(InstanceIds=[instance["InstanceId"]])
    until(lambda: laptop.ec2.describe_instances()["Reservations"] == [])
    assert time.monotonic() - told >= 1.0
    with pytest.raises(ClientError, match=r"InvalidInstanceID\.NotFound"):
        laptop.describe(instance["InstanceId"])
    laptop._launched.clear()
