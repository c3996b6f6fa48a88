"""Sessions of `aws sso login` and `aws login`: they are renewed, their end and its remedy are shown."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec
from support.harness import TIMEOUT
from support.identity import SECRET, Identity, Reply, User, identity_server, iso

SSO = """
[profile work]
sso_session = company
sso_account_id = 123456789012
sso_role_name = researcher
[sso-session company]
sso_region = us-east-1
sso_start_url = https://company.awsapps.com/start
[profile old]
sso_start_url = https://old.awsapps.com/start
sso_region = us-east-1
sso_account_id = 123456789012
sso_role_name = researcher
[profile "above it"]
role_arn = arn:aws:iam::123456789012:role/watcher
source_profile = work
"""
PORTAL = "/federation/credentials"
EXPIRED = "the SSO session of profile 'work' has expired, or there is none"


@pytest.fixture
def cluster(cli: Any, faults: Any) -> None:
    """A cluster, of which `status` shows when the credentials end."""
    cli.nodes(1)


@pytest.fixture
def user(cli: Any, faults: Any, tmp_path: Path) -> User:
    return User(cli, tmp_path / "user", cold=True)


@pytest.fixture
def identity(user: User) -> Iterator[Identity]:
    """The SSO portal, SSO's OIDC, AWS Sign-In and a container's endpoint."""
    with identity_server() as found:
        for service in ("SSO", "SSO_OIDC", "SIGNIN"):
            user.cli.env[f"AWS_ENDPOINT_URL_{service}"] = found.url
        keys = {"accessKeyId": "SSOKEY", "secretAccessKey": SECRET, "sessionToken": "t"}
        found.replies[PORTAL] = Reply({"roleCredentials": {**keys, "expiration": 4_102_444_800_000}})
        yield found


def test_sso_session_works_and_its_end_is_shown(user: User, identity: Identity) -> None:
    user.config(SSO)
    user.token("sso", "company", accessToken=SECRET, expiresAt=iso(hours=8))
    user.works(AWS_PROFILE="work")
    user.works(AWS_PROFILE="above it")
    assert identity.paths() == [PORTAL]  # the role's credentials are cached
    assert identity.requests[0][1]["x-amz-sso_bearer_token"] == SECRET


@pytest.mark.usefixtures("cluster")
def test_sso_session_without_refresh_token_ends_with_its_role_credentials(
    user: User, identity: Identity
) -> None:
    user.config(SSO)
    identity.replies[PORTAL].body["roleCredentials"]["expiration"] = 1000 * _seconds(iso(minutes=60))
    user.token("sso", "https://old.awsapps.com/start", accessToken=SECRET, expiresAt=iso(minutes=30))
    assert "your AWS credentials end in 59 min" in user.works("status", AWS_PROFILE="old")


def _seconds(text: str) -> int:
    return int(datetime.fromisoformat(text).timestamp())


@pytest.mark.usefixtures("cluster")
def test_sso_session_with_refresh_token_is_renewed(user: User, identity: Identity) -> None:
    user.config(SSO)
    client = {"clientId": "c", "clientSecret": "s", "registrationExpiresAt": iso(hours=2)}
    token = {"accessToken": "old", "expiresAt": iso(minutes=-1), "refreshToken": SECRET, **client}
    path = user.token("sso", "company", **token)
    identity.replies["/token"] = Reply({"accessToken": "new", "expiresIn": 3600, "refreshToken": "r2"})
    user.works(AWS_PROFILE="work")
    assert identity.paths() == ["/token", PORTAL]
    assert json.loads(path.read_text())["accessToken"] == "new"
    assert "your AWS credentials end in 1 h 59 min" in user.works("status", AWS_PROFILE="work")


def test_expired_sso_session_names_the_command_that_renews_it(
    user: User, identity: Identity, faults: Any
) -> None:
    user.config(SSO)
    command = "`aws sso login --profile work`, then repeat the command"
    user.refused(EXPIRED, command, AWS_PROFILE="work")
    path = user.token("sso", "company", accessToken=SECRET, expiresAt=iso(minutes=-1))
    user.refused(EXPIRED, command, AWS_PROFILE="above it")
    user.refused(EXPIRED.replace("work", "old"), "`aws sso login --profile old`", "ls", "--profile", "old")
    for text in ("[]", '{"accessToken": 1, "expiresAt": 5}'):
        path.write_text(text)
        user.refused("of profile 'work'", command, AWS_PROFILE="work")
    assert faults.calls == []


def test_sso_refuses(user: User, identity: Identity) -> None:
    user.config(SSO)
    user.token("sso", "company", accessToken=SECRET, expiresAt=iso(hours=1))
    identity.replies[PORTAL] = Reply({"message": "Session token not found"}, 401, "UnauthorizedException")
    user.refused(EXPIRED, "`aws sso login --profile work`", AWS_PROFILE="work")
    identity.replies[PORTAL] = Reply({"message": "No access"}, 403, "ForbiddenException")
    message = "AWS refused the SSO role of profile 'work': ForbiddenException: No access"
    user.refused(message, "sso_role_name", AWS_PROFILE="work")


def test_teardown_with_an_expired_sso_session_names_nodes_deadline_and_commands(
    user: User, identity: Identity, remains: Any
) -> None:
    user.config(SSO)
    path = user.token("sso", "company", accessToken=SECRET, expiresAt=iso(hours=1))
    user.works("up", "-n", "1", AWS_PROFILE="work")
    path.unlink()
    for cached in user.cache:
        cached.unlink()
    done = user.run("down", "-y", AWS_PROFILE="work")
    (node,) = remains().instances
    assert done.code == 3
    assert EXPIRED in done.err
    assert f"{node}, until 20" in done.err
    assert "`aws sso login --profile work`, then `cloudddp down`" in done.err


LOGIN = "[profile work]\nlogin_session = arn:aws:iam::123456789012:user/alice\nregion = us-east-1\n"


def test_aws_login_without_its_package_names_the_command_that_installs_it(user: User) -> None:
    user.config(LOGIN)
    user.refused(
        "uses `aws login`, which needs a package", "pip install 'botocore[crt]", code=2, AWS_PROFILE="work"
    )


@pytest.fixture(scope="module")
def crt(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the AWS Common Runtime, which is an optional dependency, for PYTHONPATH."""
    folder = tmp_path_factory.mktemp("crt")
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet", "install"]
    subprocess.run([*pip, "--no-deps", "--target", folder, "awscrt"], check=True, timeout=TIMEOUT)
    return folder


def test_aws_login_is_renewed_until_its_session_ends(user: User, identity: Identity, crt: Path) -> None:
    user.config(LOGIN)
    env = {"AWS_PROFILE": "work", "PYTHONPATH": str(crt)}
    message = "the `aws login` session of profile 'work' has ended"
    command = "`aws login --profile work`, then repeat the command"
    user.refused(message, command, **env)
    key = ec.generate_private_key(ec.SECP256R1()).private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.TraditionalOpenSSL,
        serialization.NoEncryption(),
    )
    keys = {"accessKeyId": "A", "secretAccessKey": SECRET, "sessionToken": "t"}
    token = {
        "accessToken": {**keys, "accountId": "123456789012", "expiresAt": iso(minutes=-1)},
        "tokenType": "aws_sigv4",
        "refreshToken": "r",
        "clientId": "c",
        "dpopKey": key.decode(),
    }
    path = user.token("login", "arn:aws:iam::123456789012:user/alice", "sha256", **token)
    identity.replies["/v1/token"] = Reply(
        {"accessToken": keys, "tokenType": "aws_sigv4", "expiresIn": 900, "refreshToken": "r2"}
    )
    user.works(**env)
    stored = path.read_text()
    assert json.loads(stored)["refreshToken"] == "r2"
    assert identity.paths() == ["/v1/token"]
    ended = json.loads(stored)
    ended["accessToken"]["expiresAt"] = iso(minutes=-1)
    path.write_text(json.dumps(ended))
    identity.replies["/v1/token"] = Reply(
        {"error": "TOKEN_EXPIRED", "message": "expired"}, 400, "AccessDeniedException"
    )
    user.refused(message, command, **env)
    path.write_text("[]")
    user.refused(message, command, **env)
