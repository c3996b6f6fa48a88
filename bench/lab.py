"""How fast the simulator starts and terminates hosts, with plain boto3 and sockets inside its network.

It uses nothing of cloudddp there, so that it measures what any other client of EC2 would see.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from bench.harness import Options, rows_inside
from bench.tables import line, load

RUNS = {1: 5, 8: 5, 32: 3, 64: 3}  # by number of nodes
TIMEOUT = 120.0  # seconds; a guard against hanging
_IMAGE = "/aws/service/deeplearning/ami/x86_64/oss-nvidia-driver-gpu-pytorch-2.12-ubuntu-24.04/latest/ami-id"


def rows() -> Iterator[dict[str, float]]:
    """Yield a row per launch: nodes, and the seconds that `measure` returns."""
    import boto3

    ec2 = boto3.client("ec2")
    group = ec2.create_security_group(GroupName="bench", Description="bench")["GroupId"]
    ec2.authorize_security_group_ingress(
        GroupId=group, IpProtocol="tcp", FromPort=22, ToPort=22, CidrIp="0.0.0.0/0"
    )
    image = boto3.client("ssm").get_parameter(Name=_IMAGE)["Parameter"]["Value"]
    request = {"ImageId": image, "InstanceType": "t3.medium", "SecurityGroupIds": [group]}
    measure(ec2, request, 1)  # warm-up: imports in the server, the first firewall rules
    for nodes, runs in RUNS.items():
        for _ in range(runs):
            yield {"nodes": nodes, **measure(ec2, request, nodes)}


def measure(ec2: Any, request: dict[str, Any], nodes: int) -> dict[str, float]:
    """Return the seconds from RunInstances until SSH responds on all, and from TerminateInstances until all
    are `terminated`."""

    def instances() -> list[dict[str, Any]]:
        return [
            one
            for part in ec2.describe_instances(InstanceIds=ids)["Reservations"]
            for one in part["Instances"]
        ]

    def reach(state: str) -> None:
        _until(lambda: {one["State"]["Name"] for one in instances()} == {state}, 0.05)

    started = time.perf_counter()
    reply = ec2.run_instances(**request, MinCount=nodes, MaxCount=nodes)
    ids = [one["InstanceId"] for one in reply["Instances"]]
    reach("running")
    with ThreadPoolExecutor(nodes) as pool:
        list(pool.map(lambda one: _until(lambda: _responds(one["PublicIpAddress"]), 0.01), instances()))
    responding = time.perf_counter()
    ec2.terminate_instances(InstanceIds=ids)
    reach("terminated")
    return {"ssh": responding - started, "gone": time.perf_counter() - responding}


def _until(condition: Callable[[], bool], poll: float) -> None:
    deadline = time.monotonic() + TIMEOUT
    while not condition():
        if time.monotonic() > deadline:
            raise SystemExit("timed out")
        time.sleep(poll)


def _responds(address: str) -> bool:
    """Return whether an SSH server has sent its banner."""
    try:
        with socket.create_connection((address, 22), timeout=5) as connection:
            return connection.recv(4) == b"SSH-"
    except OSError:
        return False


def bench_lab(_: Options) -> None:
    """Namespace nodes, with plain boto3: how fast they start and end."""
    print("lab: namespace nodes, plain boto3; in brackets the load average before and after")
    before = load()
    found = list(rows_inside(rows))
    for nodes in RUNS:
        for key, name in (("ssh", "until SSH responds on all"), ("gone", "until all are terminated")):
            line(f"{nodes:2} nodes, {name}", [row[key] for row in found if row["nodes"] == nodes], "s")
    print(f"  [{before:.1f}, {load():.1f}]")
