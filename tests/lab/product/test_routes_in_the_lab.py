"""Every way to reach the nodes, in the networks that accounts have, from `up` to `down`."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from support import ssmcli
from support.account import post_conditions
from support.harness import CommandLine, lines_until, listed_nodes
from support.jumphost import JumpHost, rules
from support.labnode import LabLaptop
from support.vpcs import Vpc

from cloudddp.simulator import control

WAIT = "import time\nprint('began', flush=True)\nwhile True: time.sleep(0.05)\n"
SSM = (
    'sh -c "aws ssm start-session --target %h --document-name AWS-StartSSHSession --parameters '
    "'portNumber=%p'\""
)


@pytest.fixture
def user(tmp_path: Path) -> Path:
    """The user's home folder, which is empty."""
    home = tmp_path / "user"
    home.mkdir()
    return home


@pytest.fixture
def cli(lab_cli: CommandLine, user: Path) -> CommandLine:
    """The command line of a user without an SSH agent."""
    lab_cli.env.update(HOME=str(user))
    lab_cli.env.pop("SSH_AUTH_SOCK", None)
    return lab_cli


def configure(cli: CommandLine, **settings: str) -> None:
    """Write cloudddp.toml with a [cluster] and a job that needs no torchrun."""
    lines = [
        f"{key} = {value if value[0] in '[0123456789' else json.dumps(value)}"
        for key, value in settings.items()
    ]
    cli.write(
        "cloudddp.toml",
        "\n".join(["[cluster]", *lines, "[job]", 'rendezvous = "direct"', "nproc_per_node = 1", ""]),
    )


def start(cli: CommandLine, *options: str) -> list[dict[str, Any]]:
    cli.ok("up", "-n", "2", "-t", "g5.12xlarge", *options)
    return listed_nodes(cli)


def test_every_verb_goes_through_the_jump_host(cli: CommandLine, lab_laptop: LabLaptop, user: Path) -> None:
    """`up` records the way, so that later commands need no setting; ~/.ssh/config names the jump host. A job
    goes on without it, and with another one it can be reached."""
    vpc = Vpc(lab_laptop.ec2, "10.60.0.0/16")
    jump = JumpHost(lab_laptop, vpc)
    jump.write_ssh_files(user)
    (user / ".ssh" / "config").write_text(f"Host bastion\n  HostName {jump.public}\n  User ubuntu\n")
    subnets = f'["{vpc.private}"]'
    configure(cli, subnets=subnets, proxy_jump="bastion", ssh_from='["192.0.2.1/32"]', ready_minutes="0.1")
    failed = cli.fails(1, "up", "-n", "2", "-t", "g5.12xlarge")
    assert "does the security group of the nodes admit it?" in failed
    assert json.loads(cli("status", "--json").stdout) == []

    configure(cli, subnets=subnets)
    found = start(cli, "--proxy-jump", "bastion")
    assert not any(node["public_ip"] for node in found)
    assert rules(lab_laptop.ec2, cli.cluster, 22) == [f"{jump.private}/32"]
    assert cli.ok("exec", "--", "echo from $SSH_CLIENT").count(f"from {jump.private} ") == 2
    cli.write("make.py", "import os\nos.mkdir('runs')\nopen('runs/a', 'w').write('a')\n")
    cli.ok("launch", "make.py")
    cli.ok("logs")
    synced = cli.messages("sync")
    assert "warning" not in synced  # one says that nodes cannot copy files from each other
    assert json.loads(cli.ok("jobs", "--json"))[0]["state"] == "succeeded"
    assert cli.ok("ssh", "1", "echo", "here").strip() == "here"
    assert f"is allowed from {jump.private}/32" in cli.ok("allow-me")

    cli.write("wait.py", WAIT)
    process = cli.start("launch", "wait.py", CLOUDDDP_TIME_SCALE="0.1")
    lines_until(process.stdout, "began")
    control.fault(lab_laptop.sim, "kill", [jump.id])
    _, err = process.communicate()
    assert process.returncode != 0
    assert "Traceback" not in err
    assert "jump host" in err or "lost connection" in err or "not responding" in err
    other = JumpHost(lab_laptop, vpc)
    other.write_ssh_files(user)
    cli.env["CLOUDDDP_PROXY_JUMP"] = f"ubuntu@{other.public}"
    assert f"is allowed from {other.private}/32" in cli.ok("allow-me")
    assert json.loads(cli.ok("jobs", "--json"))[-1]["state"] == "running"
    cli.ok("cancel")
    assert "not pulled" in cli("down").stderr


def test_private_subnet_by_session_manager(cli: CommandLine, lab_laptop: LabLaptop, user: Path) -> None:
    """The command is the one that AWS documents, its program a stand-in. Later commands need no setting."""
    vpc = Vpc(lab_laptop.ec2, "10.61.0.0/16")
    configure(cli, subnets=f'["{vpc.private}"]')
    assert "no-such-program is not installed" in cli.fails(2, "up", "--proxy-command", "no-such-program %h")
    log = ssmcli.install(user / "bin")
    cli.env["PATH"] = f"{user / 'bin'}:{os.environ['PATH']}"
    found = start(cli, "--proxy-command", SSM)
    assert not any(node["public_ip"] for node in found)
    assert rules(lab_laptop.ec2, cli.cluster, 22) == []
    assert set(log.read_text().splitlines()) == {f"{node['instance_id']} portNumber=22" for node in found}
    assert cli.ok("ssh", "0", "echo", "here").strip() == "here"
    refused = cli.fails(1, "exec", "--", "true", CLOUDDDP_CONNECT="public")
    assert f"node 0 ({found[0]['instance_id']}) has no public address" in refused
    assert "CLOUDDDP_CONNECT" in refused
    refused = cli.fails(1, "up", "-n", "2", "-t", "g5.12xlarge", CLOUDDDP_CONNECT="public")
    assert "has no public address" in refused
    assert "nothing to allow" in cli.fails(2, "allow-me")
    assert "nothing is left" in cli.ok("down")


def test_private_subnet_by_vpn(cli: CommandLine, lab_laptop: LabLaptop) -> None:
    vpc = Vpc(lab_laptop.ec2, "10.62.0.0/16")
    configure(cli, subnets=f'["{vpc.private}"]', connect="private")
    assert "ssh_from is not set" in cli.fails(2, "up")
    settings = {"subnets": f'["{vpc.private}"]', "connect": "private", "ssh_from": '["10.8.0.10/32"]'}
    configure(cli, **settings, ready_minutes="0.1")
    failed = cli.fails(1, "up", "-n", "2", "-t", "g5.12xlarge")
    assert "no answer" in failed
    assert "is the VPN up" in failed
    assert json.loads(cli("status", "--json").stdout) == []
    assert post_conditions(lab_laptop.sim.endpoint, {"vpn": {vpc.id: "10.8.0.10"}})[0] == 200
    configure(cli, **settings)
    assert not any(node["public_ip"] for node in start(cli))
    assert rules(lab_laptop.ec2, cli.cluster, 22) == ["10.8.0.10/32"]
    assert cli.ok("exec", "--", "echo here").count("here") == 2
    assert "nothing is left" in cli.ok("down")
