"""STS in the simulator: roles that require MFA, sessions that end, and a clock that differs from ours."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import boto3
import pytest
from botocore.config import Config
from support.account import Account, refused

from cloudddp.simulator import control

ROLE = "arn:aws:iam::123456789012:role/trainer"
SERIAL = "arn:aws:iam::123456789012:mfa/alice"
ONCE = Config(retries={"total_max_attempts": 1})


def assume(account: Account, **more: Any) -> dict[str, Any]:
    answer = account.client("sts").assume_role(RoleArn=ROLE, RoleSessionName="test", **more)
    return answer["Credentials"]


def client_with(sim: control.Simulator, issued: dict[str, Any], service: str) -> Any:
    return boto3.client(
        service,
        endpoint_url=sim.endpoint,
        region_name=sim.region,
        config=ONCE,
        aws_access_key_id=issued["AccessKeyId"],
        aws_secret_access_key=issued["SecretAccessKey"],
        aws_session_token=issued["SessionToken"],
    )


@pytest.mark.over_http
def test_role_with_mfa_needs_an_unused_code(account: Account) -> None:
    """AssumeRole without a code, with a wrong one and with a used one is AccessDenied (IAM user guide,
    MFA-protected API access).
    """
    account.conditions(roles={ROLE: {"codes": ["123456"]}})
    with refused("AccessDenied") as refusal:
        assume(account)
    assert refusal.message.endswith(f"is not authorized to perform: sts:AssumeRole on resource: {ROLE}")
    with refused("AccessDenied") as refusal:
        assume(account, SerialNumber=SERIAL, TokenCode="654321")
    assert "invalid MFA one time pass code" in refusal.message
    assert assume(account, SerialNumber=SERIAL, TokenCode="123456")["SessionToken"]
    with refused("AccessDenied"):
        assume(account, SerialNumber=SERIAL, TokenCode="123456")


def test_ended_session_is_refused_with_the_code_of_each_service(
    remote: Account, sim: control.Simulator
) -> None:
    """EC2's error code list: RequestExpired; the common errors of STS and SSM: ExpiredToken,
    ExpiredTokenException.
    """
    issued = assume(remote)
    client_with(sim, issued, "ec2").describe_vpcs()
    remote.conditions(roles={ROLE: {"seconds": 0}})
    with refused("RequestExpired"):
        client_with(sim, issued, "ec2").describe_vpcs()
    with refused("ExpiredToken"):
        client_with(sim, issued, "sts").get_caller_identity()
    with refused("ExpiredTokenException"):
        client_with(sim, issued, "ssm").get_parameter(Name="/x")
    remote.conditions(roles={ROLE: None})
    client_with(sim, issued, "ec2").describe_vpcs()


@pytest.mark.parametrize(("ahead", "message"), [(900, "Signature expired"), (-900, "not yet current")])
def test_request_signed_at_another_time_is_refused(remote: Account, ahead: int, message: str) -> None:
    remote.conditions(clock={"ahead": ahead})
    with refused("RequestExpired"):
        remote.client("ec2", config=ONCE).describe_vpcs()
    with refused("SignatureDoesNotMatch") as refusal:
        remote.client("sts", config=ONCE).get_caller_identity()
    assert message in refusal.message
    assert abs((refusal.date - datetime.now(UTC)).total_seconds() - ahead) < 60
    remote.conditions(clock={"ahead": None})
    remote.ec2.describe_vpcs()
