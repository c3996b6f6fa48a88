"""--dry-run: the same code against an in-process moto. It needs no account, no network, and leaves no trace."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from harness import clean_environment

pytest.importorskip("moto")


@pytest.fixture
def rehearse(tmp_path: Path, project: Path) -> Any:
    """Run a command with nothing that could reach anything: no credentials, a dead proxy for every connection."""
    home = tmp_path / "home"
    dead = "http://127.0.0.1:1"
    env = clean_environment(CLOUDDDP_HOME=str(home), HTTP_PROXY=dead, HTTPS_PROXY=dead, NO_PROXY="")

    def run(*words: str) -> str:
        done = subprocess.run(
            [sys.executable, "-m", "cloudddp", *words], cwd=project, env=env, capture_output=True, text=True,
            timeout=120, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        assert not home.exists()  # nothing of a rehearsal stays on the disk
        return done.stdout

    return run


def test_up_prints_calls_parameters_and_price(rehearse: Any) -> None:
    out = rehearse("-c", "demo", "up", "-n", "3", "-t", "p5.48xlarge", "--max-hours", "2", "--dry-run")
    for expected in (
        "aws ec2 RunInstances", "MinCount: 3", "MaxCount: 3", "InstanceType: \"p5.48xlarge\"", "aws ssm GetParameter",
        "aws ec2 AuthorizeSecurityGroupEgress", '"HttpTokens": "required"', "8 x NVIDIA H100", "in 2 h 00 min",
        "203.0.113.7/32", "$165.", "$330.",
    ):  # fmt: skip
        assert expected in out, expected
    assert "PRIVATE KEY" not in out


def test_launch_prints_what_each_node_is_told(rehearse: Any, project: Path) -> None:
    (project / "train.py").write_text("print('hi')\n")
    out = rehearse("launch", "--dry-run", "--env", "A=b c", "train.py", "--lr", "0.1")
    assert out.count("torch.distributed.run") == 2
    for expected in (
        "train.py --lr 0.1",
        "--local-addr=172.31.",
        "NCCL_SOCKET_IFNAME==ens5",
        "A=b c",
        "an hour",
        "1 file,",
    ):
        assert expected in out, expected


def test_down_prints_the_order_of_the_teardown(rehearse: Any) -> None:
    out = rehearse("down", "--dry-run")
    assert out.index("TerminateInstances") < out.index("DeleteSecurityGroup") < out.index("DeleteKeyPair")
    assert "nothing is left" in out


def test_bad_settings_are_refused_in_a_rehearsal_too(project: Path, tmp_path: Path) -> None:
    env = clean_environment(CLOUDDDP_HOME=str(tmp_path / "home"))
    done = subprocess.run(
        [sys.executable, "-m", "cloudddp", "up", "-n", "0", "--dry-run"], cwd=project, env=env, capture_output=True,
        text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 2
