"""Roles that need an MFA code: it is asked once for a session, on the terminal, and never by a command that
has none."""

from __future__ import annotations

import hashlib
import json
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support.account import post_conditions
from support.harness import TIMEOUT
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
def conditions(simulator: Any) -> Iterator[Callable[..., None]]:
    def change(**body: Any) -> None:
        status, answer = post_conditions(simulator.endpoint, body)
        assert status == 200, answer

    yield change
    change(roles={ROLE: None}, clock={"ahead": None})


@pytest.fixture
def user(cli: Any, faults: Any, tmp_path: Path, conditions: Callable[..., None]) -> User:
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
        tty.answer(f"MFA code for {SERIAL}", "111111")
        done = tty.end()
    assert done.code == 0, done.err
    assert "MFA" not in done.out + done.err
    assert "111111" not in done.out + done.err + done.screen
    again = user.run("ls")  # the code is used up
    assert again.code == 0, again.err


def test_session_is_in_the_file_that_the_aws_cli_reads(user: User) -> None:
    log_in(user)
    (path,) = user.cache
    arguments = {"RoleArn": ROLE, "SerialNumber": SERIAL}
    text = json.dumps(arguments, sort_keys=True).encode()
    digest = hashlib.sha1(text, usedforsecurity=False).hexdigest()
    assert path.name == f"{digest}.json"
    assert path.stat().st_mode & 0o777 == 0o600
    assert set(json.loads(path.read_text())["Credentials"]) >= {
        "AccessKeyId",
        "SecretAccessKey",
        "SessionToken",
        "Expiration",
    }
    assert "assumed-role/trainer" in as_the_cli(user, code="000000")


def as_the_cli(user: User, code: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", AS_THE_CLI],
        env={**user.cli.env, "CODE": code},
        capture_output=True,
        text=True,
        timeout=TIMEOUT,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_session_of_the_aws_cli_is_used(user: User) -> None:
    as_the_cli(user, code="111111")
    done = user.run("ls")
    assert done.code == 0, done.err


def test_without_a_terminal_the_error_says_what_to_do(user: User, faults: Any) -> None:
    done = user.run("ls")
    assert done.code == 1
    assert f"{ROLE} needs a code of MFA device {SERIAL}, and there is no terminal to ask on" in done.err
    assert (
        "`cloudddp status` in a terminal, where it asks for a new MFA code, then repeat the command"
        in done.err
    )
    assert faults.calls == []


def test_wrong_code_is_asked_for_again(user: User) -> None:
    with user.terminal("ls") as tty:
        tty.answer("MFA code for", "12")
        tty.answer("an MFA code has 6 digits. MFA code for", "999999")
        tty.answer("wrong code. MFA code for", "111111")
        done = tty.end()
    assert done.code == 0, done.err


def test_three_wrong_codes_are_an_error(user: User) -> None:
    with user.terminal("ls") as tty:
        for _ in range(3):
            tty.answer("MFA code for", "999999")
        done = tty.end()
    assert done.code == 1
    assert "AWS refused 3 MFA codes" in done.err


def test_no_code_is_an_error(user: User) -> None:
    with user.terminal("ls") as tty:
        tty.answer("MFA code for", "")
        done = tty.end()
    assert done.code == 1
    assert "none was given" in done.err


def test_interrupt_at_the_question_ends_the_command(user: User) -> None:
    with user.terminal("up", "-n", "1") as tty:
        tty.answer("MFA code for", "\x03")
        done = tty.end()
    assert done.code == 130
    assert "interrupted while nothing was being created" in done.err


def test_session_in_its_last_minutes_is_used_for_a_whole_command(user: User, conditions: Any) -> None:
    """botocore refreshes credentials that end within 15 minutes before every call, which it cannot do with
    MFA: within 10 minutes it raises RefreshWithMFAUnsupportedError."""
    conditions(roles={ROLE: {"codes": ["111111"], "seconds": 500}})
    with user.terminal("up", "-n", "1") as tty:
        tty.answer("MFA code for", "111111")
        done = tty.end()
    assert done.code == 0, done.err
    assert user.run("down", "-y").code == 0


def test_last_minutes_of_a_session_are_used_without_a_terminal(user: User) -> None:
    """botocore refuses them for 10 minutes."""
    log_in(user)
    age(user, minutes=5)
    done = user.run("ls")
    assert done.code == 0, done.err


def test_teardown_does_not_ask_for_a_code_before_the_session_has_ended(user: User, remains: Any) -> None:
    log_in(user)
    assert user.run("up", "-n", "1").code == 0
    age(user, minutes=5)
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
    for text in ("[]", "{", '{"Credentials": {"Expiration": "soon"}}', '{"Credentials": 1}', "[" * 100_000):
        path.write_text(text)
        done = user.run("ls")
        assert done.code == 1
        assert "there is no terminal to ask on" in done.err, text
    path.unlink()
    path.mkdir()  # cannot be written either
    log_in(user, "222222")


def test_status_and_the_plan_show_when_the_session_ends(user: User, faults: Any, conditions: Any) -> None:
    conditions(roles={ROLE: {"codes": ["111111"], "seconds": 3000}})
    log_in(user)
    up = user.run("up", "-n", "1")
    assert "  login     credentials end in 4" in up.err
    assert "before the deadline: log in again by then" in up.err
    faults.calls.clear()
    status = user.run("status")
    assert "your AWS credentials end in 4" in status.out
    (cluster,) = json.loads(user.run("status", "--json").out)
    assert cluster["credentials_end"].endswith("+00:00")
    assert faults.calls == ["DescribeInstances"] * 2


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


@pytest.mark.parametrize(("seconds", "hours"), [(1145, "0.23"), (500, None)])
def test_both_ways_out_of_credentials_that_end_early_work(
    user: User, conditions: Any, seconds: int, hours: str | None
) -> None:
    """19 min 05 s: a deadline that leaves time to type the command again, and a code that is asked for now,
    although more than 15 minutes remain. Less than 15 minutes: a command on a terminal asks by itself."""
    conditions(roles={ROLE: {"codes": ["111111", "222222"], "seconds": seconds}})
    log_in(user)
    del user.cli.env["CLOUDDDP_YES"]
    user.cli.write("train.py", "")
    done = user.run("run", "-n", "1", "train.py")
    assert done.code == 2
    assert re.findall(r"--max-hours (0\.\d+)", done.err) == ([hours] if hours else [])
    removal = re.findall(r"`rm ~/(\S+)`", done.err)
    assert bool(removal) is (seconds > 900)
    for path in removal:
        (user.home / path).unlink()
    conditions(roles={ROLE: {"codes": ["222222"]}})
    with user.terminal("status") as tty:
        tty.answer("MFA code for", "222222")
        tty.end()
    again = user.run("run", "-n", "1", "--max-hours", "0.5", "train.py")
    assert "there is no terminal to ask on; add -y" in again.err


def test_run_whose_session_ends_reports_what_still_runs_and_how_to_remove_it(
    user: User, remains: Any, conditions: Any, tmp_path: Path
) -> None:
    user.cli.env.update(CLOUDDDP_RENDEZVOUS="direct", CLOUDDDP_STOP_GRACE="1")
    log_in(user)
    go = tmp_path / "go"
    user.cli.write(
        "wait.py",
        "import pathlib, sys, time\nprint('began', flush=True)\nwhile not "
        "pathlib.Path(sys.argv[1]).exists(): time.sleep(0.05)",
    )
    process = user.start("run", "-n", "1", "--nproc-per-node", "1", "wait.py", str(go))
    assert "began" in process.stdout.readline()
    conditions(roles={ROLE: {"codes": [], "seconds": 0}})
    go.touch()
    _, err = process.communicate(timeout=TIMEOUT)
    (node,) = remains().instances
    assert process.returncode == 3
    assert node in err
    assert "UTC" in err
    assert (
        "`cloudddp status` in a terminal, where it asks for a new MFA code, then repeat `cloudddp down`"
        in err
    )
    assert "Traceback" not in err

    blocked = user.run("down", "-y")
    assert blocked.code == 3
    assert f"this may still be running:\n  cluster {user.cli.cluster} " in blocked.err
    assert node in blocked.err
    assert "then `cloudddp down`" in blocked.err

    conditions(roles={ROLE: {"codes": ["333333"]}})
    with user.terminal("down", "-y") as tty:
        tty.answer("MFA code for", "333333")
        done = tty.end()
    assert done.code == 0, done.err
    assert remains().nothing
