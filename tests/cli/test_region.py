"""--region with --sim applies to every verb, and is validated before anything is started."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.harness import CommandLine, clean_environment, running_instances
from support.simlab import client_of

from cloudddp.simulator import control

OTHER = "eu-central-1"


@pytest.fixture
def own(simulator: Any, project: Path) -> Iterator[CommandLine]:
    """The command line with --sim, whose simulator is running."""
    env = clean_environment(
        CLOUDDDP_HOME=str(simulator.home), CLOUDDDP_YES="1", CLOUDDDP_SIM_NODES="process", CLOUDDDP_PRICE="1"
    )
    line = CommandLine(project, "regions", env)
    yield line
    line.end()
    for region in (OTHER, "us-east-1"):
        ec2 = client_of(simulator, "ec2", region_name=region)
        line.remove(ec2, "--sim", "--region", region, "-c", "regions")


def where(simulator: Any) -> dict[str, int]:
    """Count the running instances of the test's cluster by region, with plain boto3."""
    clients = {one: client_of(simulator, "ec2", region_name=one) for one in (OTHER, "us-east-1")}
    return {region: len(running_instances(ec2, "regions")) for region, ec2 in clients.items()}


def test_region_option_applies_to_every_verb(simulator: Any, own: CommandLine) -> None:
    there = ("--sim", "-c", "regions", "--region", OTHER)
    own.ok(*there, "up", "-n", "1")
    assert where(simulator) == {OTHER: 1, "us-east-1": 0}
    (shown,) = json.loads(own.ok(*there, "status", "--json"))
    assert (shown["region"], len(shown["nodes"])) == (OTHER, 1)
    assert shown["nodes"][0]["zone"].startswith(OTHER)
    assert own.ok(*there, "exec", "true; echo ran") == "ran\n"
    assert "1 node terminated" in own.ok(*there, "down", "-y")
    assert where(simulator) == {OTHER: 0, "us-east-1": 0}


def test_unknown_region_is_refused_before_the_simulator_starts(own: CommandLine, tmp_path: Path) -> None:
    err = own.fails(2, "--sim", "--region", "eu-centrall-1", "ls", CLOUDDDP_HOME=str(tmp_path / "home"))
    assert "unknown AWS region 'eu-centrall-1'" in err
    assert "'eu-central-1'" in err
    assert control.find(tmp_path / "home") is None


def test_region_in_a_file_or_a_variable_does_not_apply_to_the_simulator(own: CommandLine) -> None:
    """An empty one is none."""
    own.write("cloudddp.toml", f'[cluster]\nname = "regions"\nregion = "{OTHER}"\n')
    done = own("--sim", "ls", AWS_REGION="")
    assert f"--sim uses its own region, us-east-1, and not {OTHER} (" in done.stderr
    done = own("--sim", "ls", CLOUDDDP_REGION=OTHER)
    text = f"--sim uses its own region, us-east-1, and not {OTHER} (environment variable CLOUDDDP_REGION)"
    assert done.stderr.count(text) == 1, done.stderr


def test_aws_commands_in_messages_act_on_the_simulator(own: CommandLine) -> None:
    """On a computer with credentials, `aws ec2 ...` alone would act on the user's account."""
    err = own.fails(2, "--sim", "up", "--reservation", "cr-0123456789abcdef0")
    command = "aws ec2 describe-capacity-reservations --region us-east-1"
    assert f"`cloudddp sim exec -- {command}`" in err
