"""A jump host in the lab, an ordinary instance of a test, and the SSH files of a user who knows it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from support.harness import until
from support.labnode import reachable
from support.simlab import Laptop
from support.vpcs import EVERYWHERE, Vpc


class JumpHost:
    """An instance in the public subnet of a VPC, whose user logs in with a key pair of its own."""

    def __init__(self, laptop: Laptop, vpc: Vpc) -> None:
        self._laptop = laptop
        self.group = vpc.group(EVERYWHERE)
        interface = {"DeviceIndex": 0, "SubnetId": vpc.public, "Groups": [self.group]}
        (found,) = laptop.launch(1, NetworkInterfaces=[{**interface, "AssociatePublicIpAddress": True}])
        self.id, self.public, self.private = (
            found["InstanceId"],
            found["PublicIpAddress"],
            found["PrivateIpAddress"],
        )
        until(lambda: reachable(laptop.sim, self.public, 22))

    def write_ssh_files(self, home: Path) -> None:
        """Write ~/.ssh of a user who has the key, and who has logged in before."""
        folder = home / ".ssh"
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        key = folder / "id_ed25519"
        key.write_text(self._laptop.key.private)
        key.chmod(0o600)
        (folder / "known_hosts").write_text(f"{self.public} {self._laptop.host_key.public}\n")


def rules(ec2: Any, cluster: str, port: int) -> list[str]:
    """Return the address blocks that the security group of a cluster admits to SSH."""
    found = ec2.describe_security_groups(Filters=[{"Name": "tag:cloudddp:cluster", "Values": [cluster]}])
    return [
        block["CidrIp"]
        for group in found["SecurityGroups"]
        for rule in group["IpPermissions"]
        if rule.get("FromPort") == port
        for block in rule["IpRanges"]
    ]
