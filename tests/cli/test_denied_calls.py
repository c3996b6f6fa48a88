"""What the user sees when a policy denies a call: the action, the resource, and what to do next."""

from __future__ import annotations

from typing import Any

from support.harness import CommandLine

from cloudddp.simulator.iam import denials
from cloudddp.simulator.iam.evaluate import Check, Decision

RUN_INSTANCES = "ec2:RunInstances on arn:aws:ec2:us-east-1:123456789012:instance/*"


def encoded(action: str = "ec2:RunInstances") -> str:
    check = Check(action, "arn:aws:ec2:us-east-1:123456789012:instance/*")
    return denials.encode(
        check, Decision(False, "identity-based policy"), "arn:aws:iam::123456789012:user/ann"
    )


def denial(message: str, code: str = "UnauthorizedOperation") -> dict[str, Any]:
    return {"code": code, "message": message, "status": 403, "calls": 9}


OLD = "You are not authorized to perform this operation. Encoded authorization failure message: "


def test_message_with_nothing_but_the_encoded_part(cli: CommandLine, conditions: Any, remains: Any) -> None:
    """EC2's wording before 2021, which AWS re:Post still shows."""
    conditions(reject={"RunInstances": denial(OLD + encoded())})
    done = cli("up", "-n", "1")
    assert f"AWS denied {RUN_INSTANCES}: no policy allows it (UnauthorizedOperation)" in done.stderr
    assert "failure message" not in done.stderr
    assert remains().nothing


def test_without_decoding_the_plain_facts_remain(cli: CommandLine, conditions: Any) -> None:
    for message, decoding in (
        (encoded(), {"DecodeAuthorizationMessage": denial("no", "AccessDenied")}),
        ("A" * 20_000, {}),
    ):
        conditions(clear=True, reject={"DescribeInstances": denial(OLD + message), **decoding})
        err = cli.fails(1, "status")
        denied = "AWS denied ec2:DescribeInstances in us-east-1: no policy allows it (UnauthorizedOperation)"
        assert denied in err
        assert message not in err
