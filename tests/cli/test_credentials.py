"""Every way to get AWS credentials: it works, and what goes wrong is explained."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support.identity import SECRET, Identity, Reply, User, identity_server, iso

from cloudddp.aws.client import AWS
from cloudddp.errors import CloudDDPError

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


@pytest.fixture
def refusal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., CloudDDPError]:
    """Load credentials in this process, as every command does before its first call; return the error."""
    for name in [name for name in os.environ if name.startswith(("AWS_", "CLOUDDDP_"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path / "user"))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    folder = tmp_path / "user" / ".aws"
    folder.mkdir(parents=True)

    def load(config: str = "", *, credentials: str = "", **env: str) -> CloudDDPError:
        (folder / "config").write_text(config.replace("{ROLE}", ROLE))
        (folder / "credentials").write_text(credentials)
        with monkeypatch.context() as here, pytest.raises(CloudDDPError) as caught:
            for name, value in env.items():
                here.setenv(name, value)
            aws = AWS(region="us-east-1")
            aws.client("ec2")
            aws.credentials.get_frozen_credentials()
        assert SECRET not in f"{caught.value.message} {caught.value.hint}"
        return caught.value

    return load


def usage_error(found: CloudDDPError, message: str, hint: str) -> None:
    assert (found.exit_code, message in found.message, hint in found.hint) == (2, True, True), (
        found.message,
        found.hint,
    )


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
    message = "the AWS credentials in the environment have expired"
    user.refused(message, "AWS_", "ls", AWS_CREDENTIAL_EXPIRATION=iso(minutes=-1), **env)


KEYS = {"AWS_ACCESS_KEY_ID": "A", "AWS_SECRET_ACCESS_KEY": SECRET, "AWS_SESSION_TOKEN": "t"}


@pytest.mark.parametrize(
    ("end", "message", "code"),
    [
        ("soon", "are not valid", 2),
        ("0001-01-01T00:00:00+14:00", "have expired", 1),
    ],  # before the year 1 in UTC
)
def test_end_that_is_no_time_of_this_era_is_explained(
    refusal: Any, end: str, message: str, code: int
) -> None:
    found = refusal(AWS_CREDENTIAL_EXPIRATION=end, **KEYS)
    assert found.message == f"the AWS credentials in the environment {message}"
    assert (found.exit_code, "AWS_" in found.hint) == (code, True)


@pytest.mark.parametrize(
    ("env", "message", "hint"),
    [
        (
            {"AWS_PROFILE": "half"},
            "missing: aws_secret_access_key",
            "fix ~/.aws/config or ~/.aws/credentials",
        ),
        ({"AWS_ACCESS_KEY_ID": "A"}, "missing: AWS_SECRET_ACCESS_KEY", "fix ~/.aws/config or"),
        ({"AWS_PROFILE": "wrok"}, "AWS profile 'wrok' does not exist", "did you mean 'work'?"),
        ({"AWS_PROFILE": "elsewhere"}, "AWS profile 'elsewhere' does not exist", "your profiles: "),
    ],
)
def test_incomplete_keys_and_unknown_profiles_are_usage_errors(
    refusal: Any, env: dict[str, str], message: str, hint: str
) -> None:
    keys = f"[work]\naws_access_key_id = A\naws_secret_access_key = {SECRET}\n[half]\naws_access_key_id = A\n"
    usage_error(refusal(credentials=keys, **env), message, hint)


def test_refused_keys_are_reported(user: User, faults: Any) -> None:
    """EC2's code for an access key that does not exist."""
    faults.fail("DescribeInstances", "AuthFailure", times=9)
    env = {"AWS_ACCESS_KEY_ID": "A", "AWS_SECRET_ACCESS_KEY": SECRET}
    user.refused("AWS refused ec2:DescribeInstances: AuthFailure", "run `aws configure`", **env)


def test_wrong_clock_is_reported(user: User, simulator: Any, conditions: Callable[..., Any]) -> None:
    """Directly at the simulator, whose responses have AWS's time."""
    env = {"AWS_ACCESS_KEY_ID": "A", "AWS_SECRET_ACCESS_KEY": SECRET, "AWS_ENDPOINT_URL": simulator.endpoint}
    conditions(clock={"ahead": -1200})
    user.refused(
        "the clock of this computer is 20 minutes ahead of AWS's clock", "timedatectl set-ntp", **env
    )
    conditions(clock={"ahead": 1200})
    text = "the clock of this computer is 20 minutes behind AWS's clock"
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


@pytest.mark.parametrize(
    ("config", "env", "message"),
    [
        *(
            ("", {"AWS_ENDPOINT_URL": url}, "AWS_ENDPOINT_URL is not a URL")
            for url in ("http://[::1", "http://a..b")
        ),
        ("[default]\nendpoint_url = http://localhost:abc\n", {}, "AWS configuration: "),
        (
            "[profile up]\nrole_arn = {ROLE}\ncredential_source = Environment\n",
            {"AWS_PROFILE": "up", "AWS_ENDPOINT_URL_STS": "http://127.0.0.1:1x"},
            "AWS_ENDPOINT_URL",
        ),
    ],
)
def test_endpoint_that_is_not_a_url_is_a_usage_error(
    refusal: Any, config: str, env: dict[str, str], message: str
) -> None:
    usage_error(refusal(config, **KEYS, **env), message, "")


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
def test_inconsistent_profile_is_a_usage_error(refusal: Any, config: str, message: str) -> None:
    usage_error(refusal(config, AWS_PROFILE="up"), message, "~/.aws/config")


# credential_process


def executable(folder: Path, text: str) -> Path:
    folder.mkdir(exist_ok=True)
    path = folder / "get-keys"
    path.write_text(f"#!{sys.executable}\nimport json, sys, time\n{text}\n")
    path.chmod(0o700)
    return path


def program(user: User, text: str) -> None:
    path = executable(user.home, text)
    user.config(f"[profile work]\ncredential_process = {path} --password {SECRET}\n")
    user.cli.env["AWS_PROFILE"] = "work"


def printed(**more: Any) -> str:
    keys = {"Version": 1, "AccessKeyId": "A", "SecretAccessKey": SECRET, "SessionToken": "t", **more}
    return f"print({json.dumps(json.dumps(keys))})"


def test_credential_process_works(owner: User) -> None:
    program(owner, printed(Expiration=iso(hours=1)))
    assert "credentials end" not in owner.works("status")  # the program gives new ones


def test_credential_process_that_fails_is_reported_on_one_line(user: User) -> None:
    program(user, f"sys.exit('no session\\n\\x1b[31mkey {SECRET} ASIAABCDEFGHIJKLMNOP\\n' + 'x ' * 9999)")
    message = "failed: no session \\x1b[31mkey **** **** x x"
    user.refused(message, "log in again for the credential_process of profile 'work'")
    (line,) = [line for line in user.run("ls").err.splitlines() if message in line]
    assert len(line) < 600
    assert "ASIA" not in line


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("sys.exit(1)", "failed: it printed no reason"),
        ("print('log in first')", "did not print valid credentials"),
        ("sys.stderr.buffer.write(b'\\xff'); sys.exit(1)", "did not print valid credentials"),
        ("print('{}')", "Unsupported version"),
        ("print('{\"Version\": 1}')", "Missing required key"),
        (printed(AccessKeyId=5), "did not print valid credentials"),
        (printed(AccessKeyId="A\nB"), "did not print valid credentials"),
        (printed(Expiration=5), "did not print valid credentials"),
        (printed(Expiration="2026-01-01T00:00:00Z"), "the AWS credentials of profile 'work' have expired"),
    ],
)
def test_what_a_credential_process_prints_is_checked(
    refusal: Any, tmp_path: Path, text: str, message: str
) -> None:
    path = executable(tmp_path, text)
    found = refusal(f"[profile work]\ncredential_process = {path} {SECRET}\n", AWS_PROFILE="work")
    assert message in found.message
    assert "log in again for the credential_process of profile 'work'" in found.hint


def test_credential_process_that_cannot_run_is_a_usage_error(refusal: Any) -> None:
    config = f"[profile work]\ncredential_process = /nonexistent/get-keys {SECRET}\n"
    message = "cannot run the credential_process of profile 'work' (/nonexistent/get-keys): No such file"
    usage_error(refusal(config, AWS_PROFILE="work"), message, "~/.aws/config")


# Web identity and containers


def test_web_identity_token_that_cannot_be_read_is_a_usage_error(refusal: Any, tmp_path: Path) -> None:
    token = tmp_path / "token"
    message = "cannot read the web identity token "
    env = {"AWS_WEB_IDENTITY_TOKEN_FILE": str(token), "AWS_ROLE_ARN": ROLE}
    usage_error(refusal(**env), f"{message}{token}: No such file", "check")
    with token.open("wb") as file:
        file.truncate(1 << 33)
    usage_error(refusal(**env), f"{message}{token}: it is 8.0 GiB long", "check")
    env["AWS_WEB_IDENTITY_TOKEN_FILE"] = "/dev/zero"
    usage_error(refusal(**env), f"{message}/dev/zero: not a regular file", "check")


def test_web_identity_works(user: User, faults: Any, tmp_path: Path, conditions: Callable[..., Any]) -> None:
    token = tmp_path / "token"
    env = {"AWS_WEB_IDENTITY_TOKEN_FILE": str(token), "AWS_ROLE_ARN": ROLE}
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
