"""Measures how fast the simulator starts and terminates hosts, with plain boto3 and sockets inside its network.

`python -m bench lab` starts a simulator and runs this file in it with `cloudddp sim exec`. It imports nothing of
cloudddp, so that it measures what any other client of EC2 would see.
"""

from __future__ import annotations

import argparse
import json
import socket
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

SIZES = (1, 8, 32, 64)
RUNS = {1: 5, 8: 5, 32: 3, 64: 3}
TIMEOUT = 120.0  # seconds; a guard against hanging
_POLL = 0.05
_IMAGE = "/aws/service/deeplearning/ami/x86_64/oss-nvidia-driver-gpu-pytorch-2.12-ubuntu-24.04/latest/ami-id"


class Account:
    """An image, a security group that admits SSH, and instances, through boto3."""

    def __init__(self) -> None:
        import boto3

        self.ec2 = boto3.client("ec2")
        self.image = boto3.client("ssm").get_parameter(Name=_IMAGE)["Parameter"]["Value"]
        self.group = self.ec2.create_security_group(GroupName="bench", Description="bench")["GroupId"]
        self.ec2.authorize_security_group_ingress(
            GroupId=self.group, IpProtocol="tcp", FromPort=22, ToPort=22, CidrIp="0.0.0.0/0"
        )

    def run(self, count: int) -> list[str]:
        reply = self.ec2.run_instances(
            ImageId=self.image,
            InstanceType="t3.medium",
            MinCount=count,
            MaxCount=count,
            SecurityGroupIds=[self.group],
        )
        return [instance["InstanceId"] for instance in reply["Instances"]]

    def instances(self, ids: list[str]) -> list[dict[str, Any]]:
        pages = self.ec2.describe_instances(InstanceIds=ids)["Reservations"]
        return [instance for page in pages for instance in page["Instances"]]

    def close(self) -> None:
        self.ec2.delete_security_group(GroupId=self.group)

    def terminate(self, ids: list[str]) -> None:
        self.ec2.terminate_instances(InstanceIds=ids)


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + TIMEOUT
    while not condition():
        if time.monotonic() > deadline:
            raise SystemExit("timed out")
        time.sleep(_POLL)


def all_in_state(account: Account, ids: list[str], state: str) -> bool:
    return {instance["State"]["Name"] for instance in account.instances(ids)} == {state}


def wait_for_ssh(address: str) -> None:
    """Return when an SSH server has sent its banner, at the instance's public address."""
    deadline = time.monotonic() + TIMEOUT
    while time.monotonic() < deadline:
        try:
            with socket.create_connection((address, 22), timeout=5) as line:
                if line.recv(4) == b"SSH-":
                    return
        except OSError:
            time.sleep(0.01)
    raise SystemExit(f"{address} does not respond")


def measure(account: Account, count: int) -> dict[str, float]:
    """Return the seconds from RunInstances until it returns, until all instances are `running`, until SSH responds on
    all; and from TerminateInstances until all are `terminated`."""
    started = time.perf_counter()
    ids = account.run(count)
    answered = time.perf_counter()
    until(lambda: all_in_state(account, ids, "running"))
    running = time.perf_counter()
    with ThreadPoolExecutor(count) as pool:
        list(pool.map(wait_for_ssh, [str(one["PublicIpAddress"]) for one in account.instances(ids)]))
    ssh = time.perf_counter()
    account.terminate(ids)
    until(lambda: all_in_state(account, ids, "terminated"))
    gone = time.perf_counter()
    return {
        "answer": answered - started,
        "running": running - started,
        "ssh": ssh - started,
        "gone": gone - ssh,
    }


def main() -> None:
    """Print one line of JSON per launch: {"nodes": N, "answer": s, "running": s, "ssh": s, "gone": s}."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("sizes", nargs="*", type=int, default=list(SIZES))
    account = Account()
    measure(account, 1)  # warm-up: imports in the server, the first firewall rules
    for size in parser.parse_args().sizes:
        for _ in range(RUNS.get(size, 3)):
            print(json.dumps({"nodes": size, **measure(account, size)}), flush=True)
    account.close()


if __name__ == "__main__":
    main()
