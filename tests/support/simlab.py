"""A user of the simulator with plain boto3 and paramiko."""

from __future__ import annotations

import base64
import io
import json
import threading
from dataclasses import dataclass
from typing import Any

import boto3
import paramiko
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from support.harness import until

from cloudddp.simulator import control

IMAGE_PARAMETER = (
    "/aws/service/deeplearning/ami/x86_64/oss-nvidia-driver-gpu-pytorch-2.12-ubuntu-24.04/latest/ami-id"
)


@dataclass(frozen=True)
class Key:
    private: str
    public: str

    @property
    def paramiko(self) -> paramiko.PKey:
        return paramiko.Ed25519Key.from_private_key(io.StringIO(self.private))


def make_key() -> Key:
    key = Ed25519PrivateKey.generate()
    private = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.OpenSSH, serialization.NoEncryption()
    )
    public = key.public_key().public_bytes(serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH)
    return Key(private.decode(), public.decode())


@dataclass(frozen=True)
class Result:
    status: int
    out: bytes
    err: bytes


def execute(client: paramiko.SSHClient, command: str, stdin: bytes = b"") -> Result:
    """Run a command with `stdin`, and return its status and output."""
    channel = client.get_transport().open_session(timeout=300)
    channel.exec_command(command)

    def feed() -> None:
        try:
            for start in range(0, len(stdin), 1 << 17):  # in parts: paramiko copies the rest for each packet
                channel.sendall(stdin[start : start + (1 << 17)])
            channel.shutdown_write()
        except OSError:
            pass  # the command has ended without reading it all

    errors: list[bytes] = []
    threads = [
        threading.Thread(target=feed),
        threading.Thread(target=lambda: errors.extend(iter(lambda: channel.recv_stderr(1 << 16), b""))),
    ]
    for thread in threads:
        thread.start()
    out = b"".join(iter(lambda: channel.recv(1 << 16), b""))
    for thread in threads:
        thread.join(60)
    status = channel.recv_exit_status()
    channel.close()
    return Result(status, out, b"".join(errors))


def cloud_config(**content: Any) -> str:
    return "#cloud-config\n" + json.dumps(content)


def client_of(sim: control.Simulator, service: str, **more: Any) -> Any:
    return boto3.client(
        service,
        endpoint_url=sim.endpoint,
        region_name=more.pop("region_name", sim.region),
        aws_access_key_id="anyone",
        aws_secret_access_key="anything",
        **more,
    )


class Laptop:
    """A user of the account with a key pair, a host key to inject, and clients. `leave` cleans up."""

    def __init__(self, sim: control.Simulator, name: str) -> None:
        self.sim = sim
        self.ec2 = self.client("ec2")
        self.image = self.client("ssm").get_parameter(Name=IMAGE_PARAMETER)["Parameter"]["Value"]
        self.key, self.host_key, self.name = make_key(), make_key(), name
        self.ec2.import_key_pair(KeyName=name, PublicKeyMaterial=self.key.public.encode())
        self._launched: list[str] = []
        self._clients: list[paramiko.SSHClient] = []

    def client(self, service: str, **more: Any) -> Any:
        return client_of(self.sim, service, **more)

    def user_data(self, **more: Any) -> str:
        keys = {"ed25519_private": self.host_key.private, "ed25519_public": self.host_key.public}
        return cloud_config(ssh_keys=keys, **more)

    def run(self, count: int = 1, **more: Any) -> list[dict[str, Any]]:
        """Return the instances in the response of RunInstances."""
        request = {
            "ImageId": self.image,
            "InstanceType": "g5.12xlarge",
            "KeyName": self.name,
            "UserData": self.user_data(),
            **more,
        }
        answer = self.ec2.run_instances(MinCount=count, MaxCount=count, **request)
        self._launched += [instance["InstanceId"] for instance in answer["Instances"]]
        return answer["Instances"]

    def launch(self, count: int = 1, **more: Any) -> list[dict[str, Any]]:
        """Return running instances as in DescribeInstances, in launch order."""
        ids = [instance["InstanceId"] for instance in self.run(count, **more)]
        until(lambda: {i["State"]["Name"] for i in self.describe(*ids)} == {"running"})
        return sorted(self.describe(*ids), key=lambda instance: instance["AmiLaunchIndex"])

    def describe(self, *ids: str) -> list[dict[str, Any]]:
        answer = self.ec2.describe_instances(InstanceIds=list(ids))
        return [instance for part in answer["Reservations"] for instance in part["Instances"]]

    def state(self, instance_id: str) -> str:
        return self.describe(instance_id)[0]["State"]["Name"]

    def terminate(self, *ids: str) -> None:
        self.ec2.terminate_instances(InstanceIds=list(ids))
        until(lambda: {i["State"]["Name"] for i in self.describe(*ids)} == {"terminated"})

    def connect(
        self,
        address: str,
        *,
        user: str = "ubuntu",
        key: Key | None = None,
        host_key: Key | None = None,
        verify: bool = True,
    ) -> paramiko.SSHClient:
        """Connect, accepting only the injected host key, or any."""
        client = paramiko.SSHClient()
        port = self.sim.ssh_port
        name = address if port == 22 else f"[{address}]:{port}"
        kind, data = (host_key or self.host_key).public.split()[:2]
        client.set_missing_host_key_policy(paramiko.RejectPolicy() if verify else paramiko.AutoAddPolicy())
        if verify:
            client.get_host_keys().add(name, kind, paramiko.Ed25519Key(data=base64.b64decode(data)))
        self._clients.append(client)
        client.connect(
            address,
            port=port,
            username=user,
            pkey=(key or self.key).paramiko,
            allow_agent=False,
            look_for_keys=False,
            timeout=300,
            banner_timeout=30,
            auth_timeout=30,
        )
        return client

    def leave(self) -> None:
        for client in self._clients:
            client.close()
        if self._launched:
            self.terminate(*self._launched)
        self.ec2.delete_key_pair(KeyName=self.name)
