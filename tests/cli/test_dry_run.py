"""--dry-run runs the same code against moto in this process, without an account, a network or files."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from support.harness import CommandLine

pytest.importorskip("moto")


@pytest.fixture
def dry_run(line: CommandLine) -> Any:
    """Run a command without credentials and with a dead proxy for every connection."""
    dead = "http://127.0.0.1:1"
    line.env.update(HTTP_PROXY=dead, HTTPS_PROXY=dead, NO_PROXY="")

    def run(*words: str, **more: str) -> str:
        out = line.ok(*words, **more)
        assert not Path(line.env["CLOUDDDP_HOME"]).exists()  # a dry run leaves no files
        return out

    return run


def test_up_prints_calls_parameters_and_price(dry_run: Any) -> None:
    """Profiles and endpoints are ignored."""
    environment = {
        "AWS_PROFILE": "nobody",
        "AWS_ENDPOINT_URL_EC2": "http://127.0.0.1:1",
        "AWS_USE_FIPS_ENDPOINT": "true",
    }
    words = "-c demo up -n 2 -t p4d.24xlarge --max-hours 2 --tag Team=ml --dry-run"
    out = dry_run(*words.split(), **environment)
    assert len(set(re.findall(r"\bc-[0-9a-f]{10}\b", out))) == 1
    for expected in (
        "aws ec2 RunInstances",
        "MinCount: 2",
        "MaxCount: 2",
        'InstanceType: "p4d.24xlarge"',
        "aws ssm GetParameter",
        "aws ec2 AuthorizeSecurityGroupEgress",
        '"HttpTokens": "required"',
        "8 x NVIDIA A100",
        "in 2 h 00 min",
        "203.0.113.7/32",
        "$44.",
        "$88.",
        "TagSpecifications: instance, volume, network-interface with the cluster's tags",
    ):
        assert expected in out, expected
    assert "PRIVATE KEY" not in out
    assert out.count('cloudddp:cluster: "demo"') == 1
    assert out.count("Team: ") == 1
    assert out.count("at most   $") == 1
    assert out.index("at most   $") > out.index("install-host-key")
    calls = [line for line in out.splitlines() if line.startswith("  ")]
    assert max(map(len, calls)) < 1000
    # how each node gets a host key of its own
    made = re.findall(r"node (\d) .* sudo -n sh -s -- make-host-key 'ssh-ed25519 (\S+)'", out)
    installed = re.findall(r"node (\d) .* sudo -n sh -s -- install-host-key 'ssh-ed25519 (\S+)'", out)
    assert [node for node, _ in made] == [node for node, _ in installed] == ["0", "1"]
    assert len({key for _, key in made}) == 1
    assert len({key for _, key in made + installed}) == 3
    assert out.count("bytes: infra/node/host-key.sh") == 4
    assert out.rindex("make-host-key") < out.index("install-host-key") < out.index(" probe\n")


def test_launch_prints_commands_of_each_node_without_secrets(dry_run: Any, project: Path) -> None:
    (project / "train.py").write_text("print('hi')\n")
    (project / "cloudddp.toml").write_text('[job]\nenv = { FROM_FILE = "hunter2", NCCL_DEBUG = "hunter2" }\n')
    notify = {"CLOUDDDP_NOTIFY": "https://example.com/hunter2"}
    (project.parent / "keys").write_text("FILED=hunter2\n")
    variables = ("--env", "A=hunter2", "-e", "TOKEN", "--env-file", "../keys")
    out = dry_run("launch", "--dry-run", *variables, "train.py", "--lr", "0.1", TOKEN="hunter2", **notify)
    assert out.count("torch.distributed.run") == 2
    assert re.search(r"# sending \d files?, [1-9]\d* bytes, to 2 nodes", out)
    for expected in (
        "train.py --lr 0.1",
        "--local-addr=172.31.",
        "NCCL_SOCKET_IFNAME==ens5",
        "A=****",
        "TOKEN=****",
        "FILED=****",
        "FROM_FILE=****",
        "NCCL_DEBUG=****",
        "GLOO_SOCKET_IFNAME=ens5",
        "an hour",
        "2 files,",
    ):
        assert expected in out, expected
    assert "hunter2" not in out
    assert '"private_ip": "172.31.' in out  # the request of `probe`


def test_plan_of_a_dry_run_names_what_is_left_out(dry_run: Any) -> None:
    """And a jump host, which is not looked for. tests/golden/requests has private nodes."""
    words = ("--region", "sa-east-1", "up", "-t", "g5.xlarge,p6-b200.48xlarge", "--dry-run")
    out = dry_run(*words, "--proxy-jump", "ubuntu@198.51.100.9")
    assert '"AssociatePublicIpAddress": false' in out
    assert '"CidrIp": "10.0.0.10/32"' in out
    assert "  left out: p6-b200.48xlarge on demand in sa-east-1: sa-east-1 does not offer" in out
