"""A laptop inside the lab's network, for tests with namespace nodes.

Needs root: the test process enters the lab's network for the length of a `with` block. API calls are made
outside.
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import paramiko
from support.harness import until
from support.simlab import Laptop, Result, execute

from cloudddp.simulator import control
from cloudddp.simulator.hosts import lab_namespaces
from cloudddp.simulator.linux import kernel

ECHO = (
    "import socket;s=socket.create_server(('0.0.0.0',4000));"
    "print('up',flush=True)\nwhile True: c,a=s.accept(); c.sendall(a[0].encode()); c.close()"
)


def unavailable_reason() -> str:
    """Return why the lab is not available here, or ''."""
    return lab_namespaces.unavailable_reason() or ("the tests of the lab need root" if os.getuid() else "")


@contextmanager
def network_namespace(network: Path) -> Iterator[None]:
    """Run the body in another network namespace, in this thread only. Sockets created there stay there."""
    own = os.open("/proc/thread-self/ns/net", os.O_RDONLY | os.O_CLOEXEC)
    try:
        kernel.setns(network, kernel.CLONE_NEWNET)
        try:
            yield
        finally:
            kernel.setns(Path(f"/proc/self/fd/{own}"), kernel.CLONE_NEWNET)
    finally:
        os.close(own)


@contextmanager
def inside(lab: control.Simulator) -> Iterator[None]:
    """Create sockets of this thread, and of threads started in the block, in the lab's network."""
    with network_namespace(Path(f"/proc/{lab.pid}/ns/net")):
        yield


class LabLaptop(Laptop):
    """A user of the account whose nodes accept traffic from each other, and SSH from anywhere."""

    def __init__(self, sim: control.Simulator, name: str) -> None:
        super().__init__(sim, name)
        self.group = self.make_group(name)

    def make_group(self, name: str, *, itself: bool = True, ssh: bool = True) -> str:
        """Create a security group, with a self-referencing rule and a rule for SSH. Returns its id."""
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
        """As Laptop.connect, from inside the lab; waits until sshd has started."""
        early = (paramiko.ssh_exception.NoValidConnectionsError, TimeoutError, EOFError, ConnectionError)
        if not more.get("verify", True):
            early = (*early, OSError, paramiko.SSHException)

        def attempt() -> paramiko.SSHClient | None:
            try:
                with inside(self.sim):
                    return Laptop.connect(self, address, **more)
            except early:
                return None

        return until(attempt)

    def login(self, instance: dict[str, Any], **more: Any) -> paramiko.SSHClient:
        """Connect to an instance, given as in DescribeInstances."""
        return self.connect(instance["PublicIpAddress"], **more)

    def login_unverified(self, instance: dict[str, Any]) -> paramiko.SSHClient:
        """As `login`, but accept any host key, for a node without an injected one."""
        return self.login(instance, verify=False)

    def booting(self, condition: dict[str, float], **more: Any) -> dict[str, Any]:
        """Launch a node that boots under a condition."""
        control.conditions(self.sim, {"boot": condition})
        try:
            return self.launch(**more)[0]
        finally:
            control.conditions(self.sim, {"boot": dict.fromkeys(condition)})

    def leave(self) -> None:
        super().leave()
        for group in self._groups:  # first their rules, which may refer to each other
            rules = self.ec2.describe_security_groups(GroupIds=[group])["SecurityGroups"][0]["IpPermissions"]
            if rules:
                self.ec2.revoke_security_group_ingress(GroupId=group, IpPermissions=rules)
        for group in self._groups:
            self.ec2.delete_security_group(GroupId=group)


def shell(client: paramiko.SSHClient, command: str) -> str:
    """Return the output of a command without the last newline. Fails the test if the command fails."""
    done = execute(client, command)
    assert done.status == 0, f"{command}: exit {done.status}\n{done.out.decode()}\n{done.err.decode()}"
    return done.out.decode().rstrip("\n")


def boot_id(laptop: LabLaptop, node: Any) -> str:
    """Return the id of a node's boot; '' while it goes down, and may accept a connection and lose it."""
    try:
        return shell(laptop.login(node), "cat /proc/sys/kernel/random/boot_id")
    except (OSError, EOFError, paramiko.SSHException):
        return ""


def home_of(laptop: LabLaptop, node: Any) -> str:
    """Return the folder of a node's disk; '' while it is down."""
    listed = control.nodes(laptop.sim)
    return next((str(n["home"]) for n in listed if n["instance_id"] == node["InstanceId"]), "")


def reboot(laptop: LabLaptop, node: Any) -> None:
    """Reboot through EC2, and wait until the node has booted."""
    before = home_of(laptop, node)
    laptop.ec2.reboot_instances(InstanceIds=[node["InstanceId"]])
    until(lambda: home_of(laptop, node) not in ("", before))


def reconnect(laptop: LabLaptop, node: Any) -> paramiko.SSHClient:
    """Connect to a node that is rebooting, where /run/before existed."""

    def fresh() -> paramiko.SSHClient | None:
        with contextlib.suppress(OSError, EOFError, paramiko.SSHException):
            client = laptop.login_unverified(node)
            return client if attempt(client, "test -e /run/before").status == 1 else None
        return None

    return until(fresh)


def attempt(client: paramiko.SSHClient, command: str) -> Result:
    """Return exit status and output of a command that may fail."""
    return execute(client, command)


def reachable(lab: control.Simulator, address: str, port: int) -> bool:
    """Return whether a connection from the laptop is accepted within a second."""
    with inside(lab):
        try:
            socket.create_connection((address, port), timeout=1.0).close()
        except OSError:
            return False
        return True


def serve(client: paramiko.SSHClient) -> None:
    """Start a server on port 4000 of the node that sends every client the client's own address."""
    shell(client, f'rm -f up; nohup python3 -c "{ECHO}" > up 2>&1 & until [ -s up ]; do sleep 0.05; done')


def call(laptop: LabLaptop, node: Any, address: str, port: int = 4000, *, seconds: float = 2.0) -> str:
    """Connect from a node to a server of `serve`. Returns the address it sees, or '' without a connection."""
    code = f"import socket;print(socket.create_connection(('{address}',{port}),{seconds}).recv(99).decode())"
    return attempt(laptop.login(node), f'python3 -c "{code}" 2>/dev/null').out.decode().strip()


def seen_by(laptop: LabLaptop, node: Any, address: str) -> str:
    """As `call`, from a node that SSH does not reach."""
    with network_namespace(Path(f"/proc/{home_of(laptop, node).split('/')[2]}/ns/net")):
        try:
            with socket.create_connection((address, 4000), timeout=2) as connection:
                return connection.recv(99).decode()
        except OSError:
            return ""
