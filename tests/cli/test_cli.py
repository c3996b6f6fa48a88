"""The command line itself: what it imports, how it fails, what it prints for programs."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from support.commands import commands
from support.harness import CommandLine, clean_environment
from support.jobs import direct

HEAVY = set("boto3 botocore paramiko cryptography moto asyncssh rich torch msgspec asyncio".split())


def imported(*lines: tuple[str, ...]) -> set[str]:
    """Return the modules that a process has imported after running command lines, one after the other."""
    program = (
        "import sys\n"
        "from cloudddp.cli.entry_point import run\n"
        f"for words in {lines!r}: run(words)\n"
        "print('MODULES', *sys.modules)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        timeout=300,
        env=clean_environment(),
        check=True,
    )
    return set(done.stdout.splitlines()[-1].split()[1:])


def test_help_imports_no_command() -> None:
    modules = imported(("--help",), ("--version",))
    assert not modules & HEAVY
    assert not {name for name in modules if name.startswith("cloudddp.cli.") and name.count(".") > 2}
    assert "cloudddp.config.spec" not in modules


def test_help_of_every_verb_imports_nothing_heavy() -> None:
    lines = [(*path.split()[1:], "--help") for path, _ in commands()]
    modules = imported(*lines)
    assert not modules & HEAVY
    assert not {name for name in modules if name.startswith("cloudddp.cli.actions")}


def test_init_and_bad_settings_import_neither_boto3_nor_paramiko(tmp_path: Path) -> None:
    modules = imported(("init", str(tmp_path / "p")), ("up", "-n", "0"))
    assert not modules & {"boto3", "botocore", "paramiko", "moto", "rich", "torch"}


def test_similar_verbs_are_suggested(line: CommandLine) -> None:
    for words, message in (
        ("sim strt", "No such command 'strt'. Did you mean 'start' or 'status'?"),
        ("xyzzy", "No such command 'xyzzy'."),
        ("help lanch", "No such command 'lanch'. Did you mean 'launch' or 'watch'?"),
        ("down mine", "Got unexpected extra argument (mine). -c NAME names a cluster."),
    ):
        done = line(*words.split())
        assert (done.returncode, done.stderr.splitlines()[-1]) == (2, f"Error: {message}")
    assert line("help", "up").stdout == line("up", "--help").stdout
    assert line("help").stdout == line("--help").stdout


def test_up_status_and_allow_me_act_on_the_named_cluster(cli: Any, faults: Any, ec2: Any) -> None:
    """Progress goes to stderr, and data to stdout; global options stand before or after the verb."""
    del cli.env["CLOUDDDP_CLUSTER"]
    done = cli("-c", cli.cluster, "up", "-n", "2")
    assert "creating the nodes" in done.stderr
    assert "creating the nodes" not in done.stdout
    assert "is ready" in done.stdout
    assert cli.cluster in cli.ok("ls")
    faults.calls.clear()
    shown = json.loads(cli.ok("status", "--json", "-c", cli.cluster))
    assert faults.calls == ["DescribeInstances"]
    assert [node["node"] for node in shown[0]["nodes"]] == [0, 1]
    assert set(shown[0]) == set(
        """
            cluster cluster_id region owner yours created expires usd_per_hour usd_so_far
            usd_so_far_is_at_most usd_per_hour_is_at_most credentials_end nodes ended ends_after_job
            ends_after_job_minutes idle_minutes
        """.split()
    )
    # `allow-me` replaces the earlier address of this computer, and keeps another user's
    where = [{"Name": "tag:cloudddp:cluster", "Values": [cli.cluster]}]
    (group,) = ec2.describe_security_groups(Filters=where)["SecurityGroups"]
    port = int(cli.env["CLOUDDDP_SSH_PORT"])
    blocks = [("203.0.113.7/32", "cloudddp caller"), ("203.0.113.8/32", "a colleague")]
    ranges = [{"CidrIp": block, "Description": why} for block, why in blocks]
    ec2.authorize_security_group_ingress(
        GroupId=group["GroupId"],
        IpPermissions=[{"IpProtocol": "tcp", "FromPort": port, "ToPort": port, "IpRanges": ranges}],
    )
    cli.ok("allow-me", "-c", cli.cluster)
    (group,) = ec2.describe_security_groups(Filters=where)["SecurityGroups"]
    allowed = [r["CidrIp"] for p in group["IpPermissions"] for r in p["IpRanges"]]
    assert sorted(allowed) == ["127.0.0.1/32", "203.0.113.8/32"]
    cli.env["CLOUDDDP_CLUSTER"] = cli.cluster


def test_unreachable_endpoint_is_reported(cli: Any) -> None:
    assert "cannot reach AWS" in cli.fails(1, "status", AWS_ENDPOINT_URL="http://127.0.0.1:1")


def test_sim_option_starts_the_simulator_and_stop_ends_it(line: CommandLine) -> None:
    pytest.importorskip("moto")
    pytest.importorskip("asyncssh")
    try:
        assert line("sim", "status").returncode == 1
        assert "no clusters" in line("--sim", "ls").stderr
        shell = ["bash", "-c", f"{line.ok('sim', 'env')}\nenv"]
        exported = subprocess.run(shell, env=line.env, capture_output=True, text=True, check=True).stdout
        inside = line.ok("sim", "exec", "--", "sh", "-c", "echo AWS_ENDPOINT_URL=$AWS_ENDPOINT_URL")
        assert inside.startswith("AWS_ENDPOINT_URL=http://127.0.0.1:")
        assert inside in exported
    finally:
        assert "stopped" in line.ok("sim", "stop")
    assert line("sim", "status").returncode == 1


def test_later_global_options_win(cli: Any) -> None:
    """Those before the verb over the environment, and those after it over those before it."""
    cli.write("given.toml", "")
    words = ("--config", "given.toml", "-c", "first", "status", "-c", "second", "--region", "us-east-1")
    assert "no cluster 'second'" in cli(*words, CLOUDDDP_CONFIG="missing.toml").stderr


# -- --timings: where the seconds of a command went, on stderr ----------------------------------------------


def spans(text: str) -> list[str]:
    """Return what the lines of the waterfall are about, in order."""
    lines = text.splitlines()
    (head,) = (number for number, line in enumerate(lines) if line.split() == ["begin", "took", "(seconds)"])
    return [line.split(None, 2)[2].rstrip(" #").partition(" (")[0] for line in lines[head + 1 :]]


def test_launch_shows_every_step_until_the_first_line(cli: Any) -> None:
    """And a command that fails its steps until then."""
    direct(cli, nodes=2, ranks=1)
    cli.write("hello.py", "print('hello')")
    cli.ok("sync")
    done = cli.exits(0, "--timings", "launch", "hello.py")
    assert "begin" not in done.stdout
    found = spans(done.stderr)
    assert {"start of Python", "imports: launch"} <= set(found)
    assert {"on the node: mesh", "on the node: preflight"} <= {name.strip() for name in found}
    steps = ["AWS ec2 describe_instances", "SSH connect", "agent: probe", "agent: start", "first line"]
    assert [name for name in found if name in steps] == steps
    assert [found.count(name) for name in ("imports: boto3", "AWS client: ec2")] == [1, 1]
    failed = cli.fails(1, "exec", "--timings", "-c", "absent", "--region", "us-east-1", "--", "true")
    assert "AWS ec2 describe_instances" in spans(failed)
