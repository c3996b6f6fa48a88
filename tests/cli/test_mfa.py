"""Roles that need an MFA code: it is asked once for a session, and only on a terminal."""

from __future__ import annotations

import hashlib
import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.identity import User, iso

ROLE = "arn:aws:iam::123456789012:role/trainer"
SERIAL = "arn:aws:iam::123456789012:mfa/alice"
CONFIG = f"""
[profile work]
role_arn = {ROLE}
mfa_serial = {SERIAL}
source_profile = keys
region = us-east-1
[profile keys]
aws_access_key_id = AKIAALICE
aws_secret_access_key = the-secret-of-alice
"""
# What the AWS CLI does to its session (awscli/customizations/assumerole.py).
AS_THE_CLI = """
import os, botocore.session
from botocore.credentials import JSONFileCache
session = botocore.session.Session(profile="work")
provider = session.get_component("credential_provider").get_provider("assume-role")
provider.cache = JSONFileCache(os.path.expanduser("~/.aws/cli/cache"))
provider._prompter = lambda _: os.environ["CODE"]
print(session.create_client("sts").get_caller_identity()["Arn"])
"""


@pytest.fixture
def user(cli: Any, faults: Any, tmp_path: Path, conditions: Callable[..., Any]) -> User:
    conditions(roles={ROLE: {"codes": ["111111", "222222"]}})
    found = User(cli, tmp_path / "user")
    found.config(CONFIG)
    found.cli.env["AWS_PROFILE"] = "work"
    return found


def log_in(user: User, code: str = "111111") -> None:
    with user.terminal("ls") as tty:
        tty.answer(f"MFA code for {SERIAL}", code)
        assert tty.end().code == 0


def age(user: User, **left: float) -> None:
    """Make the cached session end in this time."""
    (path,) = user.cache
    entry = json.loads(path.read_text())
    entry["Credentials"]["Expiration"] = iso(**left)
    path.write_text(json.dumps(entry))


def test_code_is_asked_on_the_terminal_and_the_session_is_kept_for_other_commands(user: User) -> None:
    with user.terminal("ls") as tty:
        tty.answer(f"MFA code for {SERIAL}", "12")
        tty.answer("an MFA code has 6 digits. MFA code for", "999999")
        tty.answer("wrong code. MFA code for", "111111")
        done = tty.end()
    assert done.code == 0, done.err
    assert "MFA" not in done.out + done.err
    assert "111111" not in done.out + done.err + done.screen
    again = user.run("ls")  # the code is used up
    assert again.code == 0, again.err


def test_sessions_are_shared_with_the_aws_cli(user: User) -> None:
    log_in(user)
    (path,) = user.cache
    arguments = {"RoleArn": ROLE, "SerialNumber": SERIAL}
    text = json.dumps(arguments, sort_keys=True).encode()
    digest = hashlib.sha1(text, usedforsecurity=False).hexdigest()
    assert path.name == f"{digest}.json"
    assert path.stat().st_mode & 0o777 == 0o600
    names = "AccessKeyId SecretAccessKey SessionToken Expiration"
    assert set(json.loads(path.read_text())["Credentials"]) >= set(names.split())
    assert "assumed-role/trainer" in as_the_cli(user, code="000000")
    path.unlink()
    as_the_cli(user, code="222222")  # and the other way round
    assert user.run("ls").code == 0


def as_the_cli(user: User, code: str) -> str:
    program = [sys.executable, "-c", AS_THE_CLI]
    done = subprocess.run(program, env={**user.cli.env, "CODE": code}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_without_a_terminal_the_error_says_what_to_do(user: User, faults: Any) -> None:
    done = user.run("ls")
    assert done.code == 1
    assert f"{ROLE} needs a code of MFA device {SERIAL}, and there is no terminal to ask on" in done.err
    assert (
        "`cloudddp status` in a terminal, where it asks for a new MFA code, then repeat the command"
        in done.err
    )
    assert faults.calls == []


@pytest.mark.parametrize(
    ("codes", "code", "message"),
    [
        (["999999"] * 3, 1, "AWS refused 3 MFA codes"),
        (["\x03"], 130, "interrupted while nothing was being created"),
    ],
)
def test_question_without_an_answer_ends_the_command(
    user: User, codes: list[str], code: int, message: str
) -> None:
    with user.terminal("up", "-n", "1") as tty:
        for typed in codes:
            tty.answer("MFA code for", typed)
        done = tty.end()
    assert (done.code, message in done.err) == (code, True), done


def test_last_minutes_of_a_session_are_used_with_and_without_a_terminal(user: User, remains: Any) -> None:
    """botocore refuses them for 10 minutes. A teardown asks for no code before the session has ended."""
    log_in(user)
    assert user.run("up", "-n", "1").code == 0
    age(user, minutes=5)
    done = user.run("status")
    assert done.code == 0, done.err
    with user.terminal("down", "-y") as tty:
        done = tty.end()
    assert done.code == 0, done.err
    assert "MFA" not in done.screen
    assert remains().nothing


def test_session_that_aws_refuses_is_replaced(user: User, faults: Any) -> None:
    log_in(user)
    faults.fail("DescribeInstances", "RequestExpired")
    with user.terminal("ls") as tty:
        tty.answer("MFA code for", "222222")
        done = tty.end()
    assert done.code == 0, done.err


def test_damaged_cache_counts_as_empty(user: User) -> None:
    log_in(user)
    (path,) = user.cache
    path.write_text("[" * 100_000)
    assert "there is no terminal to ask on" in user.run("ls").err
    path.unlink()
    path.mkdir()  # cannot be written either
    log_in(user, "222222")


def test_run_refuses_credentials_that_end_before_the_deadline(
    user: User, faults: Any, remains: Any, conditions: Any
) -> None:
    conditions(roles={ROLE: {"codes": ["111111"], "seconds": 3000}})
    log_in(user)
    del user.cli.env["CLOUDDDP_YES"]
    user.cli.write("train.py", "")
    done = user.run("run", "-n", "1", "train.py")
    assert done.code == 2
    assert "your AWS credentials end in 4" in done.err
    assert "before the cluster's deadline" in done.err
    (path,) = user.cache
    renew = (
        f"renew them now: `rm ~/.aws/cli/cache/{path.name}`, then `cloudddp status` in a terminal, "
        "where it asks"
    )
    for way in (renew, "; or `--max-hours 0.7", "--yes to run anyway"):
        assert way in done.err
    assert not {"CreateKeyPair", "ImportKeyPair", "RunInstances", "CreateSecurityGroup"} & set(faults.calls)
    assert remains().nothing
    (hours,) = re.findall(r"`--max-hours (0\.\d+)`", done.err)
    shorter = user.run("run", "-n", "1", "--max-hours", hours, "train.py")
    assert "there is no terminal to ask on; add -y" in shorter.err
