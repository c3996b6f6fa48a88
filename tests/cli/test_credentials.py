"""Every way to get AWS credentials: it works, and what goes wrong is explained."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support.identity import SECRET, Identity, Reply, User, identity_server, iso

from cloudddp.aws.client import AWS

ROLE = "arn:aws:iam::123456789012:role/watcher"
ROLE_OF_KEYS = (
    f"[profile up]\nrole_arn = {ROLE}\nsource_profile = keys\n"
    f"[profile keys]\naws_access_key_id = A\naws_secret_access_key = {SECRET}\n"
)


@pytest.fixture
def user(cli: Any, faults: Any, tmp_path: Path) -> User:
    return User(cli, tmp_path / "user")


@pytest.fixture
def owner(cli: Any, faults: Any, tmp_path: Path) -> User:
    """A user with a cluster, of which `status` shows when the credentials end."""
    cli.nodes(1)
    return User(cli, tmp_path / "user")


@pytest.fixture
def identity() -> Iterator[Identity]:
    with identity_server() as found:
        yield found


# Keys


def test_keys_of_a_profile_override_those_of_the_environment(user: User, faults: Any) -> None:
    user.credentials(f"[work]\naws_access_key_id = AKIAWORK\naws_secret_access_key = {SECRET}\n")
    user.works("ls", "--region", "us-east-1", CLOUDDDP_PROFILE="work")
    user.works(
        "ls", "--region", "us-east-1", "--profile", "work", AWS_ACCESS_KEY_ID="x", AWS_SECRET_ACCESS_KEY=""
    )
    remains = ["DescribeAddresses", "DescribeSecurityGroups", "DescribeKeyPairs"]
    assert faults.calls == ["DescribeInstances", *remains] * 2


def test_end_of_the_environments_keys_is_shown(owner: User) -> None:
    user, env = owner, {"AWS_ACCESS_KEY_ID": "A", "AWS_SECRET_ACCESS_KEY": SECRET, "AWS_SESSION_TOKEN": "t"}
    ends = user.works("status", AWS_CREDENTIAL_EXPIRATION=iso(minutes=50), **env)
    assert "your AWS credentials end in 49 min" in ends
    assert "credentials end" not in user.works("status", AWS_CREDENTIAL_EXPIRATION=iso(days=3), **env)
    for value, message, code in (
        (iso(minutes=-1), "the AWS credentials in the environment have expired", 1),
        ("soon", "the AWS credentials in the environment are not valid", 2),
    ):
        user.refused(message, "AWS_", "ls", code=code, AWS_CREDENTIAL_EXPIRATION=value, **env)


def test_end_that_no_clock_shows_is_no_traceback(user: User) -> None:
    """Before the year 1, or after 9999, in UTC."""
    env = {"AWS_ACCESS_KEY_ID": "A", "AWS_SECRET_ACCESS_KEY": SECRET, "AWS_SESSION_TOKEN": "t"}
    for command, value, codes in (
        ("ls", "9999-12-31T23:59:59-14:00", {0}),
        ("doctor", "0001-01-01T00:00:00+14:00", {1, 2}),
    ):
        done = user.run(command, AWS_CREDENTIAL_EXPIRATION=value, **env)
        assert "a bug in cloudddp" not in done.err
        assert done.code in codes, done


def test_incomplete_keys_are_a_usage_error(user: User, faults: Any) -> None:
    user.credentials("[work]\naws_access_key_id = AKIAWORK\n")
    fix = "fix ~/.aws/config or ~/.aws/credentials"
    user.refused("missing: aws_secret_access_key", fix, code=2, AWS_PROFILE="work")
    user.refused("missing: AWS_SECRET_ACCESS_KEY", fix, code=2, AWS_ACCESS_KEY_ID="AKIAWORK")
    assert faults.calls == []


@pytest.mark.parametrize(
    ("name", "hint"), [("wrok", "did you mean 'work'?"), ("elsewhere", "your profiles: ")]
)
def test_unknown_profile_is_a_usage_error_with_similar_names(user: User, name: str, hint: str) -> None:
    user.credentials(f"[work]\naws_access_key_id = AKIAWORK\naws_secret_access_key = {SECRET}\n")
    user.refused(f"AWS profile {name!r} does not exist", hint, "ls", "--profile", name, code=2)


def test_refused_keys_are_reported(user: User, faults: Any) -> None:
    """EC2's code for an access key that does not exist."""
    faults.fail("DescribeInstances", "AuthFailure", times=9)
    env = {"AWS_ACCESS_KEY_ID": "A", "AWS_SECRET_ACCESS_KEY": SECRET}
    user.refused("AWS refused ec2:DescribeInstances: AuthFailure", "run `aws configure`", **env)


@pytest.mark.parametrize(("ahead", "message"), [(1200, "20 minutes behind"), (-1200, "20 minutes ahead of")])
def test_wrong_clock_is_reported(
    user: User, simulator: Any, conditions: Callable[..., Any], ahead: int, message: str
) -> None:
    """Directly at the simulator, whose responses have AWS's time."""
    conditions(clock={"ahead": ahead})
    env = {"AWS_ACCESS_KEY_ID": "A", "AWS_SECRET_ACCESS_KEY": SECRET, "AWS_ENDPOINT_URL": simulator.endpoint}
    text = f"the clock of this computer is {message} AWS's clock"
    user.refused(text, "set the clock", **env)
    user.config(f"[profile up]\nrole_arn = {ROLE}\ncredential_source = Environment\n")
    user.refused(text, "set the clock", CLOUDDDP_PROFILE="up", **env)


# Roles


def test_role_without_mfa_renews_itself_and_is_cached(owner: User, faults: Any) -> None:
    owner.config(ROLE_OF_KEYS)
    owner.works(AWS_PROFILE="up")
    assert "credentials end" not in owner.works("status", AWS_PROFILE="up")
    assert faults.count("AssumeRole") == 1


def test_role_that_may_not_be_assumed_is_named(user: User, conditions: Callable[..., Any]) -> None:
    conditions(roles={ROLE: {"refuse": True}})
    user.config(ROLE_OF_KEYS)
    message = f"AWS refused to let profile 'keys' assume {ROLE} (AssumeRole): AccessDenied"
    user.refused(message, "the role's trust policy", AWS_PROFILE="up")


def test_endpoint_that_is_not_a_url_is_a_usage_error(user: User) -> None:
    user.config("[profile up]\nrole_arn = {ROLE}\ncredential_source = Environment\n")
    keys = {"AWS_ACCESS_KEY_ID": "A", "AWS_SECRET_ACCESS_KEY": SECRET, "CLOUDDDP_PROFILE": "up"}
    for url in ("http://127.0.0.1:1x", "nowhere"):
        user.refused("AWS configuration", "AWS_ENDPOINT_URL", code=2, AWS_ENDPOINT_URL_STS=url, **keys)
    del keys["CLOUDDDP_PROFILE"]
    for url in ("http://localhost:99999", "http://[::1", "http://a..b"):
        user.refused("AWS_ENDPOINT_URL is not a URL", "http://HOST", code=2, AWS_ENDPOINT_URL=url, **keys)
    user.config("[default]\nendpoint_url = http://localhost:abc\n")
    user.refused("AWS configuration: ", "~/.aws/config", "doctor", code=2, AWS_ENDPOINT_URL="", **keys)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ("[profile up]\nrole_arn = {ROLE}\nsource_profile = nowhere\n", '"nowhere"'),
        ("[profile up]\nrole_arn = {ROLE}\n", "source_profile or credential_source"),
        ("[profile up]\nrole_arn = {ROLE}\nsource_profile = up\n", "Infinite loop"),
        ("[profile up]\nrole_arn = {ROLE}\ncredential_source = Moon\n", '"Moon"'),
        ("[profile up]\nregion =\n  a = b\n", "region of profile 'up'"),
        ("[profile up]\nrole_arn =\n  a = b\nsource_profile = up\n", "role_arn of profile 'up'"),
        ("[profile up]\nsso_session = none\nsso_account_id = 1\nsso_role_name = r\n", '"none"'),
        ("[profile up]\nsso_account_id = 1\n", "missing required configuration"),
    ],
)
def test_inconsistent_profile_is_a_usage_error(user: User, config: str, message: str) -> None:
    user.config(config)
    user.refused(message, "~/.aws/config", code=2, AWS_PROFILE="up")


# credential_process


def program(user: User, text: str) -> None:
    user.home.mkdir(exist_ok=True)
    path = user.home / "get-keys"
    path.write_text(f"#!{sys.executable}\nimport json, sys, time\n{text}\n")
    path.chmod(0o700)
    user.config(f"[profile work]\ncredential_process = {path} --password {SECRET}\n")
    user.cli.env["AWS_PROFILE"] = "work"


def printed(**more: Any) -> str:
    keys = {"Version": 1, "AccessKeyId": "A", "SecretAccessKey": SECRET, "SessionToken": "t", **more}
    return f"print({json.dumps(json.dumps(keys))})"


def test_credential_process_works(owner: User) -> None:
    program(owner, printed(Expiration=iso(hours=1)))
    assert "credentials end" not in owner.works("status")  # the program gives new ones


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            f"sys.exit('no session\\n\\x1b[31mkey {SECRET} ASIAABCDEFGHIJKLMNOP\\n' + 'x ' * 9999)",
            "failed: no session \\x1b[31mkey **** **** x x",
        ),
        ("sys.exit(1)", "failed: it printed no reason"),
        ("print('log in first')", "did not print valid credentials"),
        ("sys.stdout.buffer.write(b'\\xff')", "did not print valid credentials"),
        ("sys.stderr.buffer.write(b'\\xff'); sys.exit(1)", "did not print valid credentials"),
        ("print('{}')", "Unsupported version"),
        ("print('{\"Version\": 1}')", "Missing required key"),
        (printed(AccessKeyId=5), "did not print valid credentials"),
        (printed(AccessKeyId="A\nB"), "did not print valid credentials"),
        (printed(Expiration=5), "did not print valid credentials"),
        (printed(Expiration="2026-01-01T00:00:00Z"), "the AWS credentials of profile 'work' have expired"),
    ],
)
def test_credential_process_that_fails_is_reported_on_one_line(user: User, text: str, message: str) -> None:
    program(user, text)
    user.refused(message, "log in again for the credential_process of profile 'work'")
    (line,) = [line for line in user.run("ls").err.splitlines() if message in line]
    assert len(line) < 600
    assert "ASIA" not in line


def test_credential_process_that_cannot_run_is_a_usage_error(user: User) -> None:
    user.config(f"[profile work]\ncredential_process = /nonexistent/get-keys {SECRET}\n")
    message = "cannot run the credential_process of profile 'work' (/nonexistent/get-keys): No such file"
    user.refused(message, "~/.aws/config", code=2, AWS_PROFILE="work")


# Web identity and containers


def test_web_identity_works_and_a_missing_token_is_named(
    user: User, faults: Any, tmp_path: Path, conditions: Callable[..., Any]
) -> None:
    token = tmp_path / "token"
    env = {"AWS_WEB_IDENTITY_TOKEN_FILE": str(token), "AWS_ROLE_ARN": ROLE}
    message = "cannot read the web identity token "
    user.refused(f"{message}{token}: No such file", "check", code=2, **env)
    with token.open("wb") as file:
        file.truncate(1 << 33)
    user.refused(f"{message}{token}: it is 8.0 GiB long", "check", code=2, **env)
    user.config(f"[profile ci]\nrole_arn = {ROLE}\nweb_identity_token_file = /dev/zero\n")
    user.refused(f"{message}/dev/zero: not a regular file", "check", code=2, AWS_PROFILE="ci")
    token.write_text("a.b.c")
    user.works(**env)
    user.config(f"[profile ci]\nrole_arn = {ROLE}\nweb_identity_token_file = {token}\n")
    user.works(AWS_PROFILE="ci")
    assert faults.count("AssumeRoleWithWebIdentity") == 1  # the same role: the AWS CLI's cache
    conditions(roles={ROLE: {"refuse": True}})
    user.cache[0].unlink()
    user.refused(f"assume {ROLE} (AssumeRoleWithWebIdentity): AccessDenied", "trust policy", **env)


def test_container_credentials(owner: User, identity: Identity) -> None:
    env = {
        "AWS_CONTAINER_CREDENTIALS_FULL_URI": f"{identity.url}/container",
        "AWS_CONTAINER_AUTHORIZATION_TOKEN": SECRET,
        "AWS_METADATA_SERVICE_NUM_ATTEMPTS": "1",
    }
    keys = {"AccessKeyId": "A", "SecretAccessKey": SECRET, "Token": "t", "Expiration": iso(hours=1)}
    identity.replies["/container"] = Reply(keys)
    assert "credentials end" not in owner.works("status", **env)
    assert identity.requests[0][1]["Authorization"] == SECRET
    hint = "check the container's credentials endpoint"
    identity.replies["/container"] = Reply({"AccessKeyId": "A"})
    owner.refused("the container's endpoint did not return valid credentials", hint, **env)
    identity.replies["/container"] = Reply("no", 400)
    owner.refused("cannot load AWS credentials", hint, **env)


# Partitions


@pytest.mark.parametrize("region", ["us-east-1", "eusc-de-east-1", "us-gov-west-1", "cn-north-1"])
def test_endpoints_of_aws_are_recognised(monkeypatch: pytest.MonkeyPatch, region: str) -> None:
    """The partitions have domains of their own; a cluster of any other endpoint is a simulated one."""
    for name, value in {"AWS_EC2_METADATA_DISABLED": "true", "AWS_CONFIG_FILE": "/dev/null"}.items():
        monkeypatch.setenv(name, value)
    for name in ("AWS_ENDPOINT_URL", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    assert AWS(region=region).endpoint == ""
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:1")
    assert AWS(region=region).endpoint == "http://127.0.0.1:1"
