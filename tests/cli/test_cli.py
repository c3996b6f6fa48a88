"""The command line itself: what it imports, how it fails, what it prints for programs."""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.commands import commands
from support.harness import ROOT, cannot, clean_environment

from cloudddp.cli.main import main

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
        timeout=60,
        env=clean_environment(),
        check=True,
    )
    return set(done.stdout.splitlines()[-1].split()[1:])


def test_help_imports_no_command() -> None:
    modules = imported(("--help",), ("--version",))
    assert not modules & set(HEAVY)
    assert not {name for name in modules if name.startswith("cloudddp.cli.") and name.count(".") > 2}
    assert "cloudddp.config.spec" not in modules


def test_help_of_every_verb_imports_nothing_heavy() -> None:
    lines = [(*path.split()[1:], "--help") for path, _ in commands()]
    modules = imported(*lines)
    assert not modules & set(HEAVY)
    assert not {name for name in modules if name.startswith("cloudddp.cli.actions")}


def test_init_and_bad_settings_import_neither_boto3_nor_paramiko(tmp_path: Path) -> None:
    modules = imported(("init", str(tmp_path / "p")), ("up", "-n", "0"))
    assert not modules & {"boto3", "botocore", "paramiko", "moto", "rich", "torch"}


def sources(*folders: str) -> Iterator[tuple[Path, str, ast.Module]]:
    """Yield (path, text, syntax tree) of the modules in folders of the package."""
    for path in sorted(path for folder in folders for path in (ROOT / "cloudddp" / folder).rglob("*.py")):
        yield path.relative_to(ROOT), path.read_text(), ast.parse(path.read_text())


def imports_in_functions(tree: ast.Module) -> set[int]:
    """Return the lines of imports inside functions."""
    functions = [node for node in ast.walk(tree) if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))]
    inner = [node for function in functions for node in ast.walk(function)]
    return {node.lineno for node in inner if isinstance(node, (ast.Import, ast.ImportFrom))}


def strings(tree: ast.Module) -> Iterator[ast.Constant]:
    """Yield the string literals of a module that are not docstrings."""
    documentation = {node.value for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and node not in documentation:
            yield node


def test_imports_inside_functions_are_explained() -> None:
    """A heavy third-party library may be imported where it is used, under a comment that says why."""
    unexplained = [
        f"{path}:{line}"
        for path, text, tree in sources("cli", "config")
        for line in sorted(imports_in_functions(tree))
        if not text.splitlines()[line - 2].strip().startswith("#")
    ]
    assert unexplained == []


def test_commands_in_messages_are_data() -> None:
    """A command in a string would lack the user's global options. Help texts are not messages."""
    verbs = "|".join(sorted(set(main.table) - {"init", "sim"}))
    spelled = re.compile(rf"\bcloudddp ({verbs})\b")
    found = [
        f"{path}:{node.lineno}: {node.value}"
        for path, _, tree in sources("")
        if path.parent.name != "commands" and path.name not in ("main.py", "reference.py")
        for node in strings(tree)
        if spelled.search(str(node.value))
    ]
    assert found == []


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["lauch", "train.py"], "No such command 'lauch'. Did you mean 'launch' or 'watch'?"),
        (["sim", "strt"], "No such command 'strt'. Did you mean 'start' or 'status'?"),
        (["xyzzy"], "No such command 'xyzzy'."),
    ],
)
def test_similar_verbs_are_suggested(words: list[str], message: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "cloudddp", *words], capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stderr.splitlines()[-1]) == (2, f"Error: {message}")


def test_status_is_one_call(cli: Any, faults: Any) -> None:
    cli.ok("up", "-n", "2")
    faults.calls.clear()
    shown = json.loads(cli.ok("status", "--json"))
    assert faults.calls == ["DescribeInstances"]
    assert [node["node"] for node in shown[0]["nodes"]] == [0, 1]
    assert set(shown[0]) == set(
        """
            cluster cluster_id region owner yours created expires usd_per_hour usd_so_far
            usd_so_far_is_at_most usd_per_hour_is_at_most credentials_end nodes ends_after_job
            ends_after_job_minutes idle_minutes
        """.split()
    )


def test_status_of_no_cluster_exits_1(cli: Any) -> None:
    done = cli("status", "--json")
    assert done.returncode == 1
    assert json.loads(done.stdout) == []


def test_ls_lists_clusters(cli: Any) -> None:
    cli.ok("up", "-n", "1")
    assert cli.cluster in cli.ok("ls")


def test_unreachable_endpoint_is_reported(cli: Any) -> None:
    done = cli("status", AWS_ENDPOINT_URL="http://127.0.0.1:1")
    assert done.returncode == 1
    assert "cannot reach AWS" in done.stderr
    assert "Traceback" not in done.stderr


def test_invalid_answer_of_the_endpoint_is_reported(cli: Any, faults: Any) -> None:
    faults.rewrite("DescribeInstances", lambda _: b"<html>a proxy's login page")
    done = cli("status")
    assert done.returncode == 1
    assert "DescribeInstances" in done.stderr or "describe_instances" in done.stderr
    assert "Traceback" not in done.stderr


def test_progress_goes_to_stderr_and_data_to_stdout(cli: Any) -> None:
    done = cli("up", "-n", "1")
    assert "creating the nodes" in done.stderr
    assert "creating the nodes" not in done.stdout
    assert "is ready" in done.stdout


def test_global_options_work_before_and_after_the_verb(cli: Any) -> None:
    cli.ok("-c", cli.cluster, "up", "-n", "1")
    assert cli.ok("status", "-c", cli.cluster) != ""
    assert cli.ok("-c", cli.cluster, "status") != ""


def test_ssh_reaches_a_node_with_strict_host_key_checking(cli: Any) -> None:
    if not any((Path(folder) / "ssh").exists() for folder in ("/usr/bin", "/usr/local/bin", "/bin")):
        cannot("OpenSSH's client is not installed")
    cli.ok("up", "-n", "2")
    done = cli("ssh", "1", "echo reached; pwd")
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[0] == "reached"


def test_ssh_works_with_a_state_folder_of_any_name(cli: Any, tmp_path: Path) -> None:
    """OpenSSH splits the value of an option at spaces and expands `%`. macOS has a space in every state
    folder."""
    cli.ok("up", "-n", "1")
    home = tmp_path / 'Application Support "100%d"'
    home.symlink_to(cli.env["CLOUDDDP_HOME"])
    done = cli("ssh", "0", "echo reached", CLOUDDDP_HOME=str(home))
    assert (done.returncode, done.stdout) == (0, "reached\n"), done.stderr


def test_init_writes_a_valid_configuration(cli: Any) -> None:
    cli.ok("init", "here")
    text = (cli.cwd / "here" / "cloudddp.toml").read_text()
    uncommented = "\n".join(
        line[2:] if line.startswith("# ") and " = " in line and not line.endswith("=") else line
        for line in text.splitlines()
    )
    (cli.cwd / "here" / "cloudddp.toml").write_text(uncommented)
    from cloudddp.config import settings

    read = settings.resolve([settings.read_toml(cli.cwd / "here" / "cloudddp.toml")])
    assert read == settings.resolve([settings.Layer("name", {"cluster": {"name": "here"}})])
    assert cli("init", "here").returncode == 2


def test_allow_me_replaces_only_the_address_of_this_computer(cli: Any, ec2: Any) -> None:
    cli.ok("up", "-n", "1")
    where = [{"Name": "tag:cloudddp:cluster", "Values": [cli.cluster]}]
    (group,) = ec2.describe_security_groups(Filters=where)["SecurityGroups"]
    ours = {
        "IpProtocol": "tcp",
        "FromPort": int(cli.env["CLOUDDDP_SSH_PORT"]),
        "ToPort": int(cli.env["CLOUDDDP_SSH_PORT"]),
    }
    # The earlier address of this computer, and another user's.
    blocks = [("203.0.113.7/32", "cloudddp caller"), ("203.0.113.8/32", "a colleague")]
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


def test_sim_option_starts_the_simulator_and_stop_ends_it(tmp_path: Path, project: Path) -> None:
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
            [
                "bash",
                "-c",
                f"{exports}\n{sys.executable} -c 'import boto3; "
                'print(boto3.client("ec2").describe_instances()["Reservations"])\'',
            ],
            env=env,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert shell.stdout.strip() == "[]", shell.stderr
        inside = run("sim", "exec", "--", "sh", "-c", "echo $AWS_ENDPOINT_URL")
        assert inside.stdout.startswith("http://127.0.0.1:")
    finally:
        assert "stopped" in run("sim", "stop").stdout
    assert run("sim", "status").returncode == 1


def test_option_before_the_verb_wins_over_the_environment(cli: Any) -> None:
    cli.write("given.toml", "")
    done = cli("--config", "given.toml", "status", CLOUDDDP_CONFIG="missing.toml")
    assert "missing.toml" not in done.stderr
    assert done.returncode == 1  # no such cluster


def test_option_after_the_verb_wins_over_the_one_before_it(cli: Any) -> None:
    assert "no cluster 'second'" in cli("-c", "first", "status", "-c", "second").stderr


def test_traceback_of_a_bug_is_written_to_a_file(tmp_path: Path) -> None:
    program = (
        "import sys\nfrom cloudddp.cli import entry_point\n"
        "def broken(*a, **k): raise ZeroDivisionError('by the test')\n"
        "entry_point.main.main = broken\nsys.exit(entry_point.run([]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=clean_environment(CLOUDDDP_HOME=str(tmp_path)),
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    assert "ZeroDivisionError" in (tmp_path / "debug.log").read_text()
