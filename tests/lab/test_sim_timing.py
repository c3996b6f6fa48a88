"""Simulated delays: eventual consistency, state transitions, booting, and visibility after termination."""

from __future__ import annotations

import re
import socket
import time
from pathlib import Path

from botocore.exceptions import ClientError
from support.harness import until
from support.simlab import Laptop

from cloudddp.simulator import control


def states(laptop: Laptop, ids: list[str]) -> set[str]:
    """Return the states of instances; none while EC2 does not know them."""
    try:
        return {instance["State"]["Name"] for instance in laptop.describe(*ids)}
    except ClientError as refused:
        assert refused.response["Error"]["Code"] == "InvalidInstanceID.NotFound"
        return set()


def answers(laptop: Laptop, address: str) -> bool:
    try:
        with socket.create_connection((address, laptop.sim.ssh_port), timeout=5) as line:
            return line.recv(4) == b"SSH-"
    except OSError:
        return False


def test_instance_is_delayed_from_its_launch_until_it_is_forgotten(home: Path) -> None:
    """Lower bounds: it is not found, pending, booting, shutting down, and shown after its end."""
    timing = {"unknown": 1.5, "pending": 2.5, "booting": 5.0, "shutting-down": 1.0, "visible": 1.5}
    laptop = Laptop(control.start(home, nodes="process", timing=timing), "key")
    began = time.monotonic()
    (instance,) = laptop.run()
    ids = [instance["InstanceId"]]
    assert laptop.ec2.describe_instances()["Reservations"] == [] or time.monotonic() - began >= 1.5
    until(lambda: states(laptop, ids))
    assert time.monotonic() - began >= 1.5
    assert states(laptop, ids) == {"pending"} or time.monotonic() - began >= 2.5
    until(lambda: states(laptop, ids) == {"running"})
    assert time.monotonic() - began >= 2.5
    (shown,) = laptop.describe(*ids)
    until(lambda: answers(laptop, shown["PublicIpAddress"]))
    assert time.monotonic() - began >= 5.0
    ended = time.monotonic()
    laptop.ec2.terminate_instances(InstanceIds=ids)
    (shown,) = laptop.describe(*ids)
    assert shown["State"]["Name"] == "shutting-down" or time.monotonic() - ended >= 1.0
    assert shown["StateReason"]["Code"] == "Client.UserInitiatedShutdown"  # shown from the call on
    assert re.fullmatch(r"User initiated \([0-9-]{10} [0-9:]{8} GMT\)", shown["StateTransitionReason"])
    until(lambda: states(laptop, ids) in ({"terminated"}, set()))
    assert time.monotonic() - ended >= 1.0
    until(lambda: states(laptop, ids) == set())
    assert time.monotonic() - ended >= 1.5
    assert laptop.ec2.describe_instances()["Reservations"] == []
    ids = [laptop.run()[0]["InstanceId"]]
    until(lambda: states(laptop, ids) == {"running"})
    laptop.ec2.terminate_instances(InstanceIds=ids)  # while it boots
    until(lambda: control.nodes(laptop.sim) == [])
