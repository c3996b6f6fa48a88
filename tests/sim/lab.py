"""A laptop inside the lab's network: its sockets live beside the simulated hosts, its API calls as everywhere.

Needs root: the test process itself steps into the lab's network, for as long as a `with` lasts.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import paramiko
from simlab import Laptop, Result, execute, until

from cloudddp.sim import control, ground, kernel
from cloudddp.ssh.order import keep_order

ECHO = (
    "import socket,sys;s=socket.create_server(('0.0.0.0',int(sys.argv[1])));"
    "print('up',flush=True)\nwhile True: c,a=s.accept(); c.sendall(a[0].encode()); c.close()"
)


def obstacle() -> str:
    """Why there can be no lab here, in a sentence; '' where there can."""
    return ground.obstacle() or ("the tests of the lab need root" if os.getuid() else "")


@contextmanager
def inside(lab: control.Simulator) -> Iterator[None]:
    """This thread, and threads started meanwhile, make their sockets in the lab's network."""
    with kernel.within(Path(f"/proc/{lab.pid}/ns/net")):
        yield


class LabLaptop(Laptop):
    """A user of the account whose nodes admit each other, and SSH from anywhere."""

    def __init__(self, sim: control.Simulator, name: str) -> None:
        super().__init__(sim, name)
        self.group = self.make_group(name)

    def make_group(self, name: str, *, itself: bool = True, ssh: bool = True) -> str:
        """A security group of that name; `itself`: whether its members admit each other. Returns its id."""
        group = self.ec2.create_security_group(GroupName=name, Description="of a test")["GroupId"]
        self._groups = [*getattr(self, "_groups", []), group]
        rules: list[dict[str, Any]] = []
        if itself:
            rules.append({"IpProtocol": "-1", "UserIdGroupPairs": [{"GroupId": group}]})
        if ssh:
            rules.append(
                {"IpProtocol": "tcp", "FromPort": 22, "ToPort": 22, "IpRanges": [{"CidrIp": "0.0.0.0/0"}]}
            )
        if rules:
            self.ec2.authorize_security_group_ingress(GroupId=group, IpPermissions=rules)
        return group

    def run(self, count: int = 1, **more: Any) -> list[dict[str, Any]]:
        if "NetworkInterfaces" not in more:
            more.setdefault("SecurityGroupIds", [self.group])
        return super().run(count, **more)

    def connect(self, address: str, **more: Any) -> paramiko.SSHClient:
        """As Laptop.connect, from inside the lab; waits for an sshd that has yet to start."""

        def attempt() -> paramiko.SSHClient | None:
            try:
                with inside(self.sim):
                    return Laptop.connect(self, address, **more)
            except (paramiko.ssh_exception.NoValidConnectionsError, TimeoutError, EOFError, ConnectionError):
                return None

        return until(attempt)

    def login(self, instance: dict[str, Any], **more: Any) -> paramiko.SSHClient:
        """A connection to an instance, as DescribeInstances shows it."""
        return self.connect(instance["PublicIpAddress"], **more)

    def meet(self, instance: dict[str, Any]) -> paramiko.SSHClient:
        """A connection that takes any host key, for a node that was told none; waits as `connect` does."""

        def attempt() -> paramiko.SSHClient | None:
            client = paramiko.SSHClient()
            client.set_missing_host_key_policy(paramiko.AutoAddPolicy())  # noqa: S507  inside the lab
            self._clients.append(client)
            try:
                with inside(self.sim):
                    client.connect(
                        instance["PublicIpAddress"],
                        username="ubuntu",
                        pkey=self.key.paramiko,
                        allow_agent=False,
                        look_for_keys=False,
                        timeout=30,
                    )
            except (OSError, paramiko.SSHException, EOFError):
                return None
            keep_order(client.get_transport())
            return client

        return until(attempt)

    def leave(self) -> None:
        super().leave()
        for group in self._groups:  # they may name each other
            rules = self.ec2.describe_security_groups(GroupIds=[group])["SecurityGroups"][0]["IpPermissions"]
            if rules:
                self.ec2.revoke_security_group_ingress(GroupId=group, IpPermissions=rules)
        for group in self._groups:
            self.ec2.delete_security_group(GroupId=group)


def shell(client: paramiko.SSHClient, command: str) -> str:
    """What the command prints, without the last newline; it has to succeed."""
    done = execute(client, command)
    assert done.status == 0, f"{command}: exit {done.status}\n{done.out.decode()}\n{done.err.decode()}"
    return done.out.decode().rstrip("\n")


def attempt(client: paramiko.SSHClient, command: str) -> Result:
    """The command's exit status and output, whatever they are."""
    return execute(client, command)


def reachable(lab: control.Simulator, address: str, port: int, *, seconds: float = 1.0) -> bool:
    """Whether a connection from the laptop is accepted within `seconds`; a firewall that drops looks like silence."""
    with inside(lab):
        try:
            socket.create_connection((address, port), timeout=seconds).close()
        except OSError:
            return False
        return True


def serve(client: paramiko.SSHClient, port: int = 4000) -> None:
    """Start a server on the node that tells every caller the address it comes from; return when it listens."""
    shell(
        client,
        f'rm -f up; nohup python3 -c "{ECHO}" {port} > up 2>&1 & until [ -s up ]; do sleep 0.05; done',
    )


def call(laptop: LabLaptop, node: Any, address: str, port: int = 4000, *, seconds: float = 2.0) -> str:
    """What a node hears when it calls an address: the caller's own address, or '' where nobody answers."""
    code = f"import socket;print(socket.create_connection(('{address}',{port}),{seconds}).recv(99).decode())"
    return attempt(laptop.login(node), f'python3 -c "{code}" 2>/dev/null').out.decode().strip()
