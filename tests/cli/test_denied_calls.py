"""What the user sees when a policy denies a call: the action, the resource, and what to do next."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.account import post_conditions
from support.harness import CommandLine, clean_environment, remaining
from support.permissions import FOLDER
from support.simlab import client_of

from cloudddp.sim import control
from cloudddp.sim.iam import denials
from cloudddp.sim.iam.evaluate import Check, Decision

RUN_INSTANCES = "ec2:RunInstances on arn:aws:ec2:us-east-1:123456789012:instance/*"
NO_G5 = {
    "Version": "2012-10-17",
    "Statement": [
        {"Effect": "Allow", "Action": "*", "Resource": "*"},
        {
            "Sid": "NoG5",
            "Effect": "Deny",
            "Action": "ec2:RunInstances",
            "Resource": "*",
            "Condition": {"StringLike": {"ec2:InstanceType": "g5.*"}},
        },
    ],
}


@pytest.fixture(scope="module")
def organization(tmp_path_factory: pytest.TempPathFactory) -> Iterator[control.Simulator]:
    """An account whose organization forbids g5, and an operator in it."""
    folder = tmp_path_factory.mktemp("organization")
    scp = folder / "scp.json"
    scp.write_text(json.dumps(NO_G5))
    home = folder / "home"
    policies = {"policy": FOLDER / "operator.json", "scp": scp}
    yield control.start(home, nodes="process", policies=policies)
    control.stop(home)


def command_line(sim: control.Simulator, folder: Path, cluster: str) -> CommandLine:
    env = clean_environment(
        CLOUDDDP_HOME=str(sim.home), CLOUDDDP_CLUSTER=cluster, CLOUDDDP_YES="1", **control.environment(sim)
    )
    return CommandLine(folder, cluster, env)


def test_rule_of_the_organization(organization: control.Simulator, project: Path) -> None:
    """The statement is known from the decoded message."""
    cli = command_line(organization, project, "scp")
    done = cli("up", "-n", "1", "-t", "g5.xlarge")
    assert done.returncode == 1
    assert (
        f"AWS denied {RUN_INSTANCES}: explicit deny in a service control policy, statement NoG5"
        in done.stderr
    )
    assert "your organization forbids it" in done.stderr
    assert "failure message" not in done.stderr
    assert remaining(client_of(organization, "ec2"), "scp").nothing
    cli.ok("up", "-n", "1", "-t", "g6.xlarge")
    cli.ok("down", "-y")


@pytest.fixture
def reject(simulator: Any) -> Iterator[Any]:
    """Have the next call of an action fail with a denial."""

    def set_message(action: str, message: str, code: str = "UnauthorizedOperation") -> None:
        rule = {"code": code, "message": message, "status": 403, "calls": 9}
        status, answer = post_conditions(simulator.endpoint, {"reject": {action: rule}})
        assert status == 200, answer

    yield set_message
    post_conditions(simulator.endpoint, {"clear": True})


def encoded(action: str = "ec2:RunInstances") -> str:
    check = Check(action, "arn:aws:ec2:us-east-1:123456789012:instance/*")
    return denials.encode(
        check, Decision(False, "identity-based policy"), "arn:aws:iam::123456789012:user/ann"
    )


OLD = "You are not authorized to perform this operation. Encoded authorization failure message: "


def test_message_with_nothing_but_the_encoded_part(cli: CommandLine, reject: Any, remains: Any) -> None:
    """EC2's wording before 2021, which AWS re:Post still shows."""
    reject("RunInstances", OLD + encoded())
    done = cli("up", "-n", "1")
    assert f"AWS denied {RUN_INSTANCES}: no policy allows it (UnauthorizedOperation)" in done.stderr
    assert "failure message" not in done.stderr
    assert remains().nothing


@pytest.mark.parametrize(
    "decoding",
    [
        pytest.param({"code": "AccessDenied", "status": 403}, id="not allowed"),
        pytest.param({"code": "ServiceUnavailable", "status": 503}, id="not available"),
    ],
)
def test_without_decoding_the_plain_facts_remain(
    cli: CommandLine, simulator: Any, reject: Any, remains: Any, decoding: dict[str, Any]
) -> None:
    reject("RunInstances", OLD + encoded())
    rule = {"message": "no", "calls": 9, **decoding}
    post_conditions(simulator.endpoint, {"reject": {"DecodeAuthorizationMessage": rule}})
    done = cli("up", "-n", "1")
    assert done.returncode == 1
    assert (
        "AWS denied ec2:RunInstances in us-east-1: no policy allows it (UnauthorizedOperation)" in done.stderr
    )
    assert "Traceback" not in done.stderr
    assert remains().nothing


@pytest.mark.parametrize("blob", ["nonsense", "A" * 20_000, encoded()[:-9]])
def test_encoded_message_that_cannot_be_decoded(cli: CommandLine, reject: Any, blob: str) -> None:
    reject("DescribeInstances", OLD + blob)
    done = cli("status")
    assert done.returncode == 1
    assert (
        "AWS denied ec2:DescribeInstances in us-east-1: no policy allows it (UnauthorizedOperation)"
        in done.stderr
    )
    assert blob not in done.stderr


def test_other_services_name_the_action(cli: CommandLine, reject: Any) -> None:
    message = (
        "User: arn:aws:iam::123456789012:user/ann is not authorized to perform: ssm:GetParameter on "
        "resource: arn:aws:ssm:us-east-1::parameter/aws/service/x because no identity-based policy allows "
        "the ssm:GetParameter action"
    )
    reject("GetParameter", message, "AccessDeniedException")
    done = cli("up", "-n", "1")
    assert (
        "AWS denied ssm:GetParameter on arn:aws:ssm:us-east-1::parameter/aws/service/x: no identity-based "
        "policy allows it (AccessDeniedException)"
    ) in done.stderr
    assert "infra/iam/operator.json" in done.stderr
