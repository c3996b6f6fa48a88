"""How fast the simulator's hosts come and go, seen by plain boto3 and plain sockets inside the lab's network.

`python -m bench lab` starts a lab and runs this file in it with `cloudddp sim exec`; nothing of cloudddp is imported
in there, so that what is measured is what any other client of EC2 would see.
"""

from __future__ import annotations

import argparse
import json
import socket
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

SIZES = (1, 8, 32, 64)
RUNS = {1: 5, 8: 5, 32: 3, 64: 3}
PATIENCE = 120.0  # seconds; a hang guard
_POLL = 0.05
_IMAGE = "/aws/service/deeplearning/ami/x86_64/oss-nvidia-driver-gpu-pytorch-2.12-ubuntu-24.04/latest/ami-id"


class Account:
    """What a person with boto3 has: an image, a group that lets them in, and instances."""

    def __init__(self) -> None:
        import boto3

        self.ec2 = boto3.client("ec2")
        self.image = boto3.client("ssm").get_parameter(Name=_IMAGE)["Parameter"]["Value"]
        self.group = self.ec2.create_security_group(GroupName="bench", Description="bench")["GroupId"]
        self.ec2.authorize_security_group_ingress(
            GroupId=self.group, IpProtocol="tcp", FromPort=22, ToPort=22, CidrIp="0.0.0.0/0"
        )

    def run(self, count: int) -> list[str]:
        made = self.ec2.run_instances(
            ImageId=self.image,
            InstanceType="t3.medium",
            MinCount=count,
            MaxCount=count,
            SecurityGroupIds=[self.group],
        )
        return [instance["InstanceId"] for instance in made["Instances"]]

    def instances(self, ids: list[str]) -> list[dict[str, Any]]:
        pages = self.ec2.describe_instances(InstanceIds=ids)["Reservations"]
        return [instance for page in pages for instance in page["Instances"]]

    def leave(self) -> None:
        self.ec2.delete_security_group(GroupId=self.group)

    def terminate(self, ids: list[str]) -> None:
        self.ec2.terminate_instances(InstanceIds=ids)


def until(condition: Callable[[], bool]) -> None:
    patience = time.monotonic() + PATIENCE
    while not condition():
        if time.monotonic() > patience:
            raise SystemExit("the lab does not get there")
        time.sleep(_POLL)


def in_state(account: Account, ids: list[str], state: str) -> bool:
    return {instance["State"]["Name"] for instance in account.instances(ids)} == {state}


def greeted(address: str) -> None:
    """Return when an SSH server has said who it is, at the instance's public address."""
    patience = time.monotonic() + PATIENCE
    while time.monotonic() < patience:
        try:
            with socket.create_connection((address, 22), timeout=5) as line:
                if line.recv(4) == b"SSH-":
                    return
        except OSError:
            time.sleep(0.01)
    raise SystemExit(f"{address} does not answer")


def once(account: Account, count: int) -> dict[str, float]:
    """Seconds from RunInstances to its answer, to every state `running`, to every SSH; and to every `terminated`."""
    began = time.perf_counter()
    ids = account.run(count)
    answered = time.perf_counter()
    until(lambda: in_state(account, ids, "running"))
    running = time.perf_counter()
    with ThreadPoolExecutor(count) as pool:
        list(pool.map(greeted, [str(one["PublicIpAddress"]) for one in account.instances(ids)]))
    ssh = time.perf_counter()
    account.terminate(ids)
    until(lambda: in_state(account, ids, "terminated"))
    gone = time.perf_counter()
    return {"answer": answered - began, "running": running - began, "ssh": ssh - began, "gone": gone - ssh}


def main() -> None:
    """Print one line of JSON per launch: {"nodes": N, "answer": s, "running": s, "ssh": s, "gone": s}."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("sizes", nargs="*", type=int, default=list(SIZES))
    account = Account()
    once(account, 1)  # the first of everything: imports in the server, the firewall's first rules
    for size in parser.parse_args().sizes:
        for _ in range(RUNS.get(size, 3)):
            print(json.dumps({"nodes": size, **once(account, size)}), flush=True)
    account.leave()


if __name__ == "__main__":
    sys.exit(main())
