"""The command line itself: what it imports, how it fails, what it prints for programs."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from harness import ROOT, cannot, clean_environment

HEAVY = (
    "boto3",
    "botocore",
    "paramiko",
    "cryptography",
    "moto",
    "asyncssh",
    "rich",
    "torch",
    "msgspec",
    "asyncio",
)


def loaded(*words: str) -> set[str]:
    """Return which heavy modules a command line imports."""
    program = (
        "import sys\n"
        f"sys.argv = ['cloudddp', *{list(words)!r}]\n"
        "from cloudddp.__main__ import run\n"
        "run()\n"
        f"print('MODULES', *[m for m in {HEAVY!r} if m in sys.modules])\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        timeout=60,
        env=clean_environment(),
        check=True,
    )
    return set(done.stdout.splitlines()[-1].split()[1:])


@pytest.mark.parametrize(
    "words", [("--help",), ("--version",), ("up", "--help"), ("launch", "--help"), ("sim", "--help")]
)
def test_help_imports_nothing_heavy(words: tuple[str, ...]) -> None:
    assert loaded(*words) == set()


def test_init_and_bad_settings_reach_neither_boto3_nor_paramiko(tmp_path: Path) -> None:
    assert not loaded("init", str(tmp_path / "p")) & {"boto3", "paramiko", "moto", "rich", "torch"}
    assert not loaded("up", "-n", "0") & {"boto3", "paramiko", "moto", "rich", "torch"}


def test_status_is_one_call(cli: Any, faults: Any) -> None:
    cli.ok("up", "-n", "2")
    faults.calls.clear()
    shown = json.loads(cli.ok("status", "--json"))
    assert faults.calls == ["DescribeInstances"]
    assert [node["node"] for node in shown[0]["nodes"]] == [0, 1]
    assert set(shown[0]) == {
        "cluster", "cluster_id", "region", "owner", "yours", "created", "expires", "usd_per_hour", "usd_so_far",
        "usd_so_far_is_at_most", "nodes",
    }  # fmt: skip


def test_status_of_no_cluster_exits_1(cli: Any) -> None:
    done = cli("status", "--json")
    assert done.returncode == 1
    assert json.loads(done.stdout) == []


def test_ls_lists_clusters(cli: Any) -> None:
    cli.ok("up", "-n", "1")
    assert cli.cluster in cli.ok("ls")


def test_an_endpoint_that_does_not_answer_is_said_in_a_sentence(cli: Any) -> None:
    done = cli("status", AWS_ENDPOINT_URL="http://127.0.0.1:1")
    assert done.returncode == 1
    assert "AWS cannot be reached" in done.stderr
    assert "Traceback" not in done.stderr


def test_an_endpoint_that_talks_nonsense_is_said_in_a_sentence(cli: Any, faults: Any) -> None:
    faults.rewrite("DescribeInstances", lambda _: b"<html>a proxy's login page")
    done = cli("status")
    assert done.returncode == 1
    assert "DescribeInstances" in done.stderr or "describe_instances" in done.stderr
    assert "Traceback" not in done.stderr


def test_progress_goes_to_stderr_and_data_to_stdout(cli: Any) -> None:
    done = cli("up", "-n", "1")
    assert "making the nodes" in done.stderr
    assert "making the nodes" not in done.stdout
    assert "is ready" in done.stdout


def test_global_options_work_before_and_after_the_verb(cli: Any) -> None:
    cli.ok("-c", cli.cluster, "up", "-n", "1")
    assert cli.ok("status", "-c", cli.cluster) != ""
    assert cli.ok("-c", cli.cluster, "status") != ""


def test_ssh_reaches_a_node_with_a_strictly_checked_key(cli: Any) -> None:
    if not any((Path(folder) / "ssh").exists() for folder in ("/usr/bin", "/usr/local/bin", "/bin")):
        cannot("OpenSSH's client is not installed")
    cli.ok("up", "-n", "2")
    done = cli("ssh", "1", "echo reached; pwd")
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[0] == "reached"


def test_init_writes_a_file_that_it_can_read_back(cli: Any) -> None:
    cli.ok("init", "here")
    text = (cli.cwd / "here" / "cloudddp.toml").read_text()
    uncommented = "\n".join(
        line[2:] if line.startswith("# ") and " = " in line and not line.endswith("=") else line
        for line in text.splitlines()
    )
    (cli.cwd / "here" / "cloudddp.toml").write_text(uncommented)
    from cloudddp import settings

    read = settings.resolve([settings.read_toml(cli.cwd / "here" / "cloudddp.toml")])
    assert read == settings.resolve([settings.Layer("name", {"cluster": {"name": "here"}})])
    assert cli("init", "here").returncode == 2


def test_allow_me_replaces_the_address_that_may_use_ssh(cli: Any, ec2: Any) -> None:
    cli.ok("up", "-n", "1")
    where = [{"Name": "tag:cloudddp:cluster", "Values": [cli.cluster]}]
    (group,) = ec2.describe_security_groups(Filters=where)["SecurityGroups"]
    ours = {
        "IpProtocol": "tcp",
        "FromPort": int(cli.env["CLOUDDDP_SSH_PORT"]),
        "ToPort": int(cli.env["CLOUDDDP_SSH_PORT"]),
    }
    blocks = [
        ("203.0.113.7/32", "cloudddp caller"),
        ("203.0.113.8/32", "a colleague"),
    ]  # where we were; a guest
    ec2.authorize_security_group_ingress(
        GroupId=group["GroupId"],
        IpPermissions=[{**ours, "IpRanges": [{"CidrIp": b, "Description": why}]} for b, why in blocks],
    )
    cli.ok("allow-me")
    (group,) = ec2.describe_security_groups(
        Filters=[{"Name": "tag:cloudddp:cluster", "Values": [cli.cluster]}]
    )["SecurityGroups"]
    blocks = [r["CidrIp"] for p in group["IpPermissions"] for r in p["IpRanges"]]
    assert sorted(blocks) == ["127.0.0.1/32", "203.0.113.8/32"]


def test_the_simulator_is_started_by_the_option_and_ended_by_stop(tmp_path: Path, project: Path) -> None:
    pytest.importorskip("moto")
    pytest.importorskip("asyncssh")
    env = clean_environment(CLOUDDDP_HOME=str(tmp_path / "home"))

    def run(*words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "cloudddp", *words],
            cwd=project,
            env=env,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )

    try:
        assert run("sim", "status").returncode == 1
        assert "no clusters" in run("--sim", "ls").stderr
        exports = run("sim", "env").stdout
        shell = subprocess.run(
            ["bash", "-c", f"{exports}\n{sys.executable} -c 'import boto3; print(boto3.client(\"ec2\").describe_instances()[\"Reservations\"])'"],
            env=env, capture_output=True, text=True, timeout=60, check=False,
        )  # fmt: skip
        assert shell.stdout.strip() == "[]", shell.stderr
        inside = run("sim", "exec", "--", "sh", "-c", "echo $AWS_ENDPOINT_URL")
        assert inside.stdout.startswith("http://127.0.0.1:")
    finally:
        assert "stopped" in run("sim", "stop").stdout
    assert run("sim", "status").returncode == 1


def test_a_bug_of_ours_leaves_its_traceback_in_a_file(tmp_path: Path) -> None:
    program = (
        "import sys\nfrom cloudddp import __main__, cli\n"
        "def broken(*a, **k): raise ZeroDivisionError('by the test')\n"
        "cli.main.main = broken\nsys.exit(__main__.run())"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], env=clean_environment(CLOUDDDP_HOME=str(tmp_path)), cwd=ROOT,
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    assert "ZeroDivisionError" in (tmp_path / "debug.log").read_text()
