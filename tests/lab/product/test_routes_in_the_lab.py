"""Every way to reach the nodes, in the networks that accounts have, from `up` to `down`."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support import ssmcli
from support.account import post_conditions
from support.harness import CommandLine, cannot, listed_nodes
from support.jumphost import JumpHost, rules
from support.labnode import unavailable_reason
from support.simlab import Laptop
from support.vpcs import Vpc

from cloudddp.sim import control

REDUCE = (
    "import os, pathlib, torch, torch.distributed as dist\n"
    "dist.init_process_group('gloo')\n"
    "x = torch.ones(1) * dist.get_rank()\n"
    "dist.all_reduce(x)\n"
    "pathlib.Path('runs').mkdir(exist_ok=True)\n"
    "pathlib.Path('runs/sum').write_text(str(int(x)))\n"
    "print('sum', int(x), flush=True)\n"
    "dist.barrier()\n"
    "os._exit(0)\n"  # gloo's threads sometimes abort the interpreter's shutdown
)
WAIT = "import time\nprint('began', flush=True)\nwhile True: time.sleep(0.05)\n"
SSM = (
    'sh -c "aws ssm start-session --target %h --document-name AWS-StartSSHSession --parameters '
    "'portNumber=%p'\""
)


@pytest.fixture
def laptop(lab: control.Simulator, request: pytest.FixtureRequest) -> Iterator[Laptop]:
    """The account of the lab; its instances are terminated after the test."""
    if why := unavailable_reason():
        cannot(why)
    laptop = Laptop(lab, f"key of {request.node.name}")
    yield laptop
    laptop.leave()


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


_blocks = iter(range(60, 100))


def vpc_of(laptop: Laptop) -> Vpc:
    return Vpc(laptop.ec2, f"10.{next(_blocks)}.0.0/16")


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


def train(cli: CommandLine) -> None:
    """Run two ranks on each of two nodes, pull the result, and remove the cluster."""
    pytest.importorskip("torch")
    cli.write("reduce.py", REDUCE)
    assert cli.ok("launch", "--nproc-per-node", "2", "--rendezvous", "c10d", "reduce.py").count("sum 6") == 4
    cli.ok("pull")
    assert [path.read_text() for path in (cli.cwd / "results").rglob("sum")] == ["6"]
    assert "nothing is left" in cli.ok("down")


@pytest.mark.torch
def test_public_subnet_of_a_custom_vpc(cli: CommandLine, laptop: Laptop) -> None:
    vpc = vpc_of(laptop)
    found = start(cli, "--subnets", vpc.public)
    assert all(node["public_ip"] for node in found)
    assert rules(laptop.ec2, cli.cluster) == ["203.0.113.10/32"]
    train(cli)


@pytest.mark.torch
def test_private_subnet_with_a_jump_host(cli: CommandLine, laptop: Laptop, user: Path) -> None:
    vpc = vpc_of(laptop)
    jump = JumpHost(laptop, vpc)
    jump.write_ssh_files(user)
    configure(cli, subnets=f'["{vpc.private}"]', proxy_jump=f"ubuntu@{jump.public}")
    found = start(cli)
    assert not any(node["public_ip"] for node in found)
    assert rules(laptop.ec2, cli.cluster) == [f"{jump.private}/32"]
    train(cli)


@pytest.mark.torch
def test_private_subnet_by_session_manager(cli: CommandLine, laptop: Laptop, user: Path) -> None:
    """The command is the one that AWS documents, and its program a stand-in."""
    vpc = vpc_of(laptop)
    log = ssmcli.install(user / "bin")
    cli.env["PATH"] = f"{user / 'bin'}:{os.environ['PATH']}"
    configure(cli, subnets=f'["{vpc.private}"]', proxy_command=SSM)
    found = start(cli)
    assert not any(node["public_ip"] for node in found)
    assert rules(laptop.ec2, cli.cluster) == []
    assert set(log.read_text().splitlines()) == {f"{node['instance_id']} portNumber=22" for node in found}
    train(cli)


@pytest.mark.torch
def test_private_subnet_by_vpn(cli: CommandLine, laptop: Laptop) -> None:
    vpc = vpc_of(laptop)
    assert post_conditions(laptop.sim.endpoint, {"vpn": {vpc.id: "10.8.0.10"}})[0] == 200
    configure(cli, subnets=f'["{vpc.private}"]', connect="private", ssh_from='["10.8.0.10/32"]')
    assert not any(node["public_ip"] for node in start(cli))
    assert rules(laptop.ec2, cli.cluster) == ["10.8.0.10/32"]
    train(cli)


def test_every_verb_goes_through_the_jump_host(cli: CommandLine, laptop: Laptop, user: Path) -> None:
    """`up` records the way, so that later commands need no setting; ~/.ssh/config names the jump host."""
    vpc = vpc_of(laptop)
    jump = JumpHost(laptop, vpc)
    jump.write_ssh_files(user)
    (user / ".ssh" / "config").write_text(f"Host bastion\n  HostName {jump.public}\n  User ubuntu\n")
    configure(cli, subnets=f'["{vpc.private}"]')
    start(cli, "--proxy-jump", "bastion")
    assert cli.ok("exec", "--", "echo from $SSH_CLIENT").count(f"from {jump.private} ") == 2
    cli.write(
        "make.py", "import pathlib\npathlib.Path('runs').mkdir()\npathlib.Path('runs/a').write_text('a')\n"
    )
    cli.ok("launch", "make.py")
    cli.ok("logs")
    cli.ok("sync")
    assert json.loads(cli.ok("jobs", "--json"))[0]["state"] == "succeeded"
    assert cli.ok("ssh", "1", "echo", "here").strip() == "here"
    assert f"is allowed from {jump.private}/32" in cli.ok("allow-me")
    refused = cli("down")
    assert "results that were not pulled" in refused.stderr or "not pulled" in refused.stderr + refused.stdout


def test_other_configuration_than_that_of_up(cli: CommandLine, laptop: Laptop, user: Path) -> None:
    vpc = vpc_of(laptop)
    ssmcli.install(user / "bin")
    cli.env["PATH"] = f"{user / 'bin'}:{os.environ['PATH']}"
    configure(cli, subnets=f'["{vpc.private}"]')
    first, _ = start(cli, "--proxy-command", SSM)
    assert cli.ok("ssh", "0", "echo", "here").strip() == "here"
    cli.env["CLOUDDDP_CONNECT"] = "public"
    refused = cli("exec", "--", "true")
    assert refused.returncode == 1
    assert f"node 0 ({first['instance_id']}) has no public address" in refused.stderr
    assert "CLOUDDDP_CONNECT" in refused.stderr
    del cli.env["CLOUDDDP_CONNECT"]
    nothing = cli("allow-me")
    assert nothing.returncode == 2
    assert "nothing to allow" in nothing.stderr


def test_jump_host_with_unknown_key(cli: CommandLine, laptop: Laptop, user: Path) -> None:
    vpc = vpc_of(laptop)
    jump = JumpHost(laptop, vpc)
    jump.write_ssh_files(user, known=False)
    configure(cli, subnets=f'["{vpc.private}"]', proxy_jump=f"ubuntu@{jump.public}")
    refused = cli("up", "-n", "2", "-t", "g5.12xlarge")
    assert refused.returncode == 2
    assert "its host key is not in ~/.ssh/known_hosts" in refused.stderr
    assert f"ssh ubuntu@{jump.public}`" in refused.stderr
    assert (user / ".ssh" / "known_hosts").read_text() == ""
    assert json.loads(cli("status", "--json").stdout) == []


def test_jump_host_that_accepts_no_key(cli: CommandLine, laptop: Laptop, user: Path) -> None:
    jump = JumpHost(laptop, vpc_of(laptop))
    jump.write_ssh_files(user)
    (user / ".ssh" / "id_ed25519").unlink()
    cli.env["CLOUDDDP_PROXY_JUMP"] = f"ubuntu@{jump.public}"
    refused = cli("up")
    assert refused.returncode == 2
    assert "accepts none of your keys" in refused.stderr
    assert "ssh-add" in refused.stderr


def test_jump_host_that_dies_during_a_launch(cli: CommandLine, laptop: Laptop, user: Path) -> None:
    """The job goes on, as without a network; with another jump host the results can be pulled."""
    vpc = vpc_of(laptop)
    jump, other = JumpHost(laptop, vpc), None
    jump.write_ssh_files(user)
    configure(cli, subnets=f'["{vpc.private}"]')
    start(cli, "--proxy-jump", f"ubuntu@{jump.public}")
    cli.env["CLOUDDDP_TIME_SCALE"] = "0.05"
    cli.write("wait.py", WAIT)
    process = cli.start("launch", "wait.py")
    assert process.stdout is not None
    while "began" not in process.stdout.readline():
        assert process.poll() is None
    control.fault(laptop.sim, "kill", [jump.id])
    _, err = process.communicate(timeout=240)
    assert process.returncode != 0
    assert "Traceback" not in err
    assert f"jump host ubuntu@{jump.public}" in err or "lost connection" in err or "not responding" in err
    del cli.env["CLOUDDDP_TIME_SCALE"]
    other = JumpHost(laptop, vpc)
    other.write_ssh_files(user)
    cli.env["CLOUDDDP_PROXY_JUMP"] = f"ubuntu@{other.public}"
    assert f"is allowed from {other.private}/32" in cli.ok("allow-me")
    assert json.loads(cli.ok("jobs", "--json"))[0]["state"] == "running"
    cli.ok("cancel")


def test_private_nodes_without_a_vpn(cli: CommandLine, laptop: Laptop) -> None:
    vpc = vpc_of(laptop)
    configure(
        cli, subnets=f'["{vpc.private}"]', connect="private", ssh_from='["10.8.0.10/32"]', ready_minutes="0.1"
    )
    failed = cli("up", "-n", "2", "-t", "g5.12xlarge")
    assert failed.returncode == 1
    assert "no answer" in failed.stderr
    assert "is the VPN up" in failed.stderr
    assert json.loads(cli("status", "--json").stdout) == []


def test_jump_host_that_the_nodes_do_not_admit(cli: CommandLine, laptop: Laptop, user: Path) -> None:
    vpc = vpc_of(laptop)
    jump = JumpHost(laptop, vpc)
    jump.write_ssh_files(user)
    settings = {"proxy_jump": f"ubuntu@{jump.public}", "ssh_from": '["192.0.2.1/32"]', "ready_minutes": "0.1"}
    configure(cli, subnets=f'["{vpc.private}"]', **settings)
    failed = cli("up", "-n", "2", "-t", "g5.12xlarge")
    assert failed.returncode == 1
    assert "does the security group of the nodes admit it?" in failed.stderr
    assert json.loads(cli("status", "--json").stdout) == []


def test_proxy_command_that_exits_at_once(cli: CommandLine, laptop: Laptop) -> None:
    vpc = vpc_of(laptop)
    configure(cli, subnets=f'["{vpc.private}"]', proxy_command="sh -c 'echo no such tunnel >&2; exit 253'")
    failed = cli("up", "-n", "2", "-t", "g5.12xlarge")
    assert failed.returncode == 1
    assert "the proxy command exited with 253: no such tunnel" in failed.stderr
    assert json.loads(cli("status", "--json").stdout) == []


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"connect": "jump"}, "no jump host"),
        ({"connect": "public", "proxy_jump": "ubuntu@198.51.100.9"}, "proxy_jump is set"),
        ({"proxy_command": "nc %h %p", "proxy_jump": "b"}, "exclude each other"),
        ({"proxy_command": "nc %z"}, "unknown token %z"),
        ({"proxy_jump": "-oProxyCommand=x"}, "proxy_jump"),
        ({"proxy_jump": "b:99999"}, "no such port"),
        ({"connect": "private"}, "ssh_from is not set"),
        ({"proxy_command": "no-such-program %h"}, "no-such-program is not installed"),
    ],
)
def test_contradictions_are_refused_before_anything_is_created(
    cli: CommandLine, settings: dict[str, str], message: str
) -> None:
    configure(cli, **settings)
    refused = cli("up")
    (cli.cwd / "cloudddp.toml").unlink()
    assert refused.returncode == 2, refused.stderr
    assert message in refused.stderr
