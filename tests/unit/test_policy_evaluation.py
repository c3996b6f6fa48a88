"""Policies: what IAM accepts, and what they allow (IAM User Guide, "Policy evaluation logic")."""

from __future__ import annotations

import json
from typing import Any

import pytest

from cloudddp.simulator.iam import denials
from cloudddp.simulator.iam.documents import InvalidPolicy, Policy, parse
from cloudddp.simulator.iam.evaluate import IDENTITY, SCP, Check, Decision, evaluate

RUN = "ec2:RunInstances"
INSTANCE = "arn:aws:ec2:us-east-1:123456789012:instance/*"
VOLUME = "arn:aws:ec2:us-east-1:123456789012:volume/*"


def statement(effect: str = "Allow", **more: Any) -> dict[str, Any]:
    defaults = {} if {"Action", "NotAction"} & set(more) else {"Action": "*"}
    defaults |= {} if {"Resource", "NotResource"} & set(more) else {"Resource": "*"}
    return {"Effect": effect, **defaults, **more}


def policy(*statements: dict[str, Any]) -> Policy:
    return parse(json.dumps({"Version": "2012-10-17", "Statement": list(statements)}))


def allowed(check: Check, *statements: dict[str, Any]) -> bool:
    return evaluate(check, policy(*statements)).allowed


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        ({"Action": "EC2:runinstances"}, True),  # actions are not case-sensitive
        ({"Action": "ec2:Run*"}, True),
        ({"Action": "ec2:Run"}, False),
        ({"Action": "ec2:[R]unInstances"}, False),
        ({"NotAction": "ec2:Terminate*"}, True),
        ({"NotAction": "ec2:*"}, False),
        ({"Resource": "arn:aws:ec2:*:*:instance/*"}, True),
        ({"Resource": "arn:aws:ec2:*:*:INSTANCE/*"}, False),  # resources are
        ({"Resource": ["arn:aws:ec2:*:*:volume/*", "arn:aws:ec2:*:*:subnet/*"]}, False),
        ({"NotResource": "arn:aws:ec2:*:*:volume/*"}, True),
    ],
)
def test_actions_and_resources(pattern: dict[str, Any], expected: bool) -> None:
    assert allowed(Check(RUN, INSTANCE), statement(**pattern)) is expected


CONTEXT = {
    "aws:RequestTag/team": ("vision",),
    "aws:TagKeys": ("team", "cost"),
    "ec2:InstanceType": ("p5.48xlarge",),
    "ec2:Encrypted": ("true",),
    "ec2:VolumeSize": ("100",),
}


@pytest.mark.parametrize(
    ("operator", "key", "values", "expected"),
    [
        ("StringEquals", "aws:RequestTag/team", "vision", True),
        ("StringEquals", "AWS:requesttag/TEAM", "vision", True),  # keys are not case-sensitive, values are
        ("StringEquals", "aws:RequestTag/team", "Vision", False),
        ("StringEquals", "aws:RequestTag/team", ["speech", "vision"], True),
        ("StringEquals", "aws:RequestTag/owner", "vision", False),
        ("StringEqualsIfExists", "aws:RequestTag/owner", "vision", True),
        ("StringEqualsIfExists", "aws:RequestTag/team", "speech", False),
        ("StringEqualsIgnoreCase", "aws:RequestTag/team", "VISION", True),
        ("StringNotEquals", "aws:RequestTag/team", "vision", False),
        ("StringNotEquals", "aws:RequestTag/team", ["speech", "vision"], False),
        ("StringNotEquals", "aws:RequestTag/team", ["speech", "text"], True),
        ("StringNotEquals", "aws:RequestTag/owner", "anyone", True),  # a negated operator without the key
        ("StringLike", "ec2:InstanceType", ["g5.*", "p5.*"], True),
        ("StringNotLike", "ec2:InstanceType", ["g5.*", "p5.*"], False),
        ("Bool", "ec2:Encrypted", True, True),
        ("Bool", "ec2:Encrypted", "false", False),
        ("BoolIfExists", "ec2:Other", "true", True),
        ("Null", "aws:RequestTag/team", "true", False),
        ("Null", "aws:RequestTag/owner", "true", True),
        ("ForAllValues:StringEquals", "aws:TagKeys", ["team", "cost", "owner"], True),
        ("ForAllValues:StringEquals", "aws:TagKeys", ["team"], False),
        ("ForAllValues:StringEquals", "aws:Missing", ["team"], True),
        ("ForAnyValue:StringEquals", "aws:TagKeys", ["cost", "owner"], True),
        ("ForAnyValue:StringEquals", "aws:TagKeys", ["owner"], False),
        ("ForAnyValue:StringEquals", "aws:Missing", ["owner"], False),
        ("ForAnyValue:StringNotEquals", "aws:TagKeys", ["team"], True),
        ("ForAllValues:StringNotEquals", "aws:TagKeys", ["team"], False),
        ("NumericLessThanEquals", "ec2:VolumeSize", 100, True),
        ("NumericGreaterThan", "ec2:VolumeSize", "100", False),
    ],
)
def test_conditions(operator: str, key: str, values: Any, expected: bool) -> None:
    condition = {operator: {key: values}}
    assert allowed(Check(RUN, INSTANCE, CONTEXT), statement(Condition=condition)) is expected


def test_all_conditions_of_a_statement_have_to_hold() -> None:
    both = {"StringEquals": {"aws:RequestTag/team": "vision"}, "Bool": {"ec2:Encrypted": "false"}}
    assert not allowed(Check(RUN, INSTANCE, CONTEXT), statement(Condition=both))
    two_keys = {"StringEquals": {"aws:RequestTag/team": "vision", "ec2:InstanceType": "g5.xlarge"}}
    assert not allowed(Check(RUN, INSTANCE, CONTEXT), statement(Condition=two_keys))


def test_policy_variables() -> None:
    mine = statement(Condition={"StringEquals": {"aws:ResourceTag/owner": "${aws:PrincipalArn}"}})
    context = {"aws:PrincipalArn": ("arn:me",), "aws:ResourceTag/owner": ("arn:me",)}
    assert allowed(Check(RUN, INSTANCE, context), mine)
    assert not allowed(Check(RUN, INSTANCE, {**context, "aws:PrincipalArn": ("arn:you",)}), mine)
    assert not allowed(Check(RUN, INSTANCE, {"aws:ResourceTag/owner": ("",)}), mine)


def test_explicit_deny_wins() -> None:
    deny = statement("Deny", Sid="NoVolumes", Action=RUN, Resource=VOLUME)
    assert allowed(Check(RUN, INSTANCE), deny, statement())
    found = evaluate(Check(RUN, VOLUME), policy(statement(), deny))
    assert (found.allowed, found.policy) == (False, IDENTITY)
    assert found.statement is not None
    assert found.statement.sid == "NoVolumes"


def test_without_an_allow_the_call_is_denied() -> None:
    stop = Check("ec2:StopInstances", INSTANCE)
    assert evaluate(stop, policy(statement(Action=RUN))) == Decision(False, IDENTITY)


def test_service_control_policy_limits_what_the_identity_may() -> None:
    full, only_ec2 = policy(statement()), policy(statement(Action="ec2:*"))
    assert evaluate(Check(RUN, INSTANCE), full, only_ec2).allowed
    assert evaluate(Check("ssm:GetParameter", "*"), full, only_ec2) == Decision(False, SCP)
    not_there = {"StringNotEquals": {"aws:RequestedRegion": "eu-west-1"}}
    region = policy(statement(), statement("Deny", NotAction="sts:*", Condition=not_there))
    denied, other = (
        evaluate(Check(RUN, INSTANCE, {"aws:RequestedRegion": (name,)}), None, region)
        for name in ("us-east-1", "eu-west-1")
    )
    assert (denied.allowed, denied.policy, denied.statement is not None) == (False, SCP, True)
    assert other.allowed


@pytest.mark.parametrize(
    ("document", "words"),
    [
        ("no JSON", "not valid JSON"),
        ("[]", "not a JSON object"),
        ("{}", "no Statement"),
        ('{"Version": "2020-01-01", "Statement": {}}', "Version '2020-01-01'"),
        (statement("allow"), "Effect is Allow or Deny, not 'allow'"),
        ({"Effect": "Allow", "Resource": "*"}, "needs one of Action and NotAction"),
        ({"Effect": "Allow", "Action": "*"}, "needs one of Resource and NotResource"),
        (statement(Action="RunInstances"), "has no service"),
        (statement(Resource="instance/i-1"), "is not an ARN"),
        (statement(Principal="*"), "Principal"),
        (statement(Conditions={}), "unknown element 'Conditions'"),
        (statement(Condition={"StringMatches": {"a": "b"}}), "operator 'StringMatches'"),
        (statement(Condition={"ForSomeValues:StringLike": {"a": "b"}}), "ForSomeValues"),
        (statement(Condition={"StringEquals": "b"}), "Condition is not"),
        (statement(Sid="two words"), "a Sid has letters and digits only"),
        (statement(Action=["ec2:" + "x" * 7000]), "at most 6144"),
    ],
)
def test_invalid_policy_is_refused(document: Any, words: str) -> None:
    text = document if isinstance(document, str) else json.dumps({"Statement": document})
    with pytest.raises(InvalidPolicy, match=words):
        parse(text)


@pytest.mark.parametrize("text", ["", "abc", "%%%%", "é", "A" * 20_000])
def test_other_text_is_not_an_encoded_message(text: str) -> None:
    assert denials.decode(text) is None
