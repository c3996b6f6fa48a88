"""The AWS CLI with the lab: launch a machine, use it over OpenSSH, and terminate it.

cloudddp provides only the endpoint.
"""

from __future__ import annotations

import json
from typing import Any

import pytest
from support.witnesslab import IMAGE_PARAMETER, Lab, witness


class Person:
    """A user with the AWS CLI, ssh, and a key pair of ssh-keygen."""

    def __init__(self, lab: Lab) -> None:
        self.lab = lab
        self._program = witness("aws", "aws")
        lab("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", "key")

    def aws(self, *words: str) -> Any:
        output = self.lab(self._program, "--output", "json", *words).stdout
        return json.loads(output) if output.strip() else None

    def refused(self, *words: str) -> str:
        done = self.lab(self._program, *words, check=False)
        assert done.returncode != 0, done.stdout
        return done.stderr

    def ssh(self, address: str, command: str, *, check: bool = True) -> Any:
        options = ("StrictHostKeyChecking=accept-new", "UserKnownHostsFile=known_hosts", "IdentitiesOnly=yes")
        words = [
            word for option in (*options, f"ConnectTimeout={15 if check else 3}") for word in ("-o", option)
        ]
        return self.lab("ssh", "-i", "key", *words, f"ubuntu@{address}", command, check=check)


@pytest.fixture
def person(lab: Lab) -> Person:
    return Person(lab)


def test_aws_cli_launches_and_terminates_an_instance(person: Person) -> None:
    aws = person.aws
    image = aws("ssm", "get-parameter", "--name", IMAGE_PARAMETER)["Parameter"]["Value"]
    aws("ec2", "import-key-pair", "--key-name", "mine", "--public-key-material", "fileb://key.pub")
    group = aws("ec2", "create-security-group", "--group-name", "mine", "--description", "ssh")["GroupId"]
    made = aws(
        "ec2",
        "run-instances",
        "--image-id",
        image,
        "--instance-type",
        "g4dn.xlarge",
        "--key-name",
        "mine",
        "--security-group-ids",
        group,
    )["Instances"][0]
    instance = made["InstanceId"]
    assert made["State"]["Name"] == "pending"
    aws("ec2", "wait", "instance-running", "--instance-ids", instance)
    seen = aws("ec2", "describe-instances", "--instance-ids", instance)["Reservations"][0]["Instances"][0]
    address = seen["PublicIpAddress"]

    closed = person.ssh(address, "true", check=False)
    assert closed.returncode == 255 and "timed out" in closed.stderr  # no rule allows SSH yet

    me = person.lab("sh", "-c", 'curl -fsS "$CLOUDDDP_CHECKIP_URL"').stdout.strip()
    aws(
        "ec2",
        "authorize-security-group-ingress",
        "--group-id",
        group,
        "--protocol",
        "tcp",
        "--port",
        "22",
        "--cidr",
        f"{me}/32",
    )
    output = person.ssh(address, "hostname; id -un; echo $SSH_CONNECTION; nvidia-smi -L").stdout.splitlines()
    assert output[0] == f"ip-{seen['PrivateIpAddress'].replace('.', '-')}"
    assert output[1] == "ubuntu"
    assert output[2].split()[0] == me and output[2].split()[2] == seen["PrivateIpAddress"]
    assert [line.partition(":")[0] for line in output[3:]] == ["GPU 0"]

    assert "DependencyViolation" in person.refused("ec2", "delete-security-group", "--group-id", group)
    aws("ec2", "terminate-instances", "--instance-ids", instance)
    aws("ec2", "wait", "instance-terminated", "--instance-ids", instance)
    assert person.lab.states() == []
    assert person.ssh(address, "true", check=False).returncode == 255
    aws("ec2", "delete-security-group", "--group-id", group)
    aws("ec2", "delete-key-pair", "--key-name", "mine")
    assert aws("ec2", "describe-key-pairs")["KeyPairs"] == []
