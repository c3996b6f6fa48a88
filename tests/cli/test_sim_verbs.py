"""`cloudddp sim`: node names, faults, options of a simulator that is already running, and invalid input."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.harness import CommandLine, cannot, clean_environment, wait_for

from cloudddp.simulator import control
from cloudddp.simulator.linux import processes


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Path]:
    """The state folder of a separate simulator for the test."""
    yield tmp_path / "home"
    control.stop(tmp_path / "home")
    assert processes.belonging(tmp_path / "home") == []


@pytest.fixture
def own(home: Path, project: Path) -> Iterator[CommandLine]:
    """The command line without a cluster name, with process nodes if a simulator is started."""
    env = clean_environment(
        CLOUDDDP_HOME=str(home), CLOUDDDP_YES="1", CLOUDDDP_SIM="1", CLOUDDDP_SIM_NODES="process"
    )
    line = CommandLine(project, "project", env)
    yield line
    line.end()


def listed(cli: CommandLine) -> list[dict[str, Any]]:
    return list(json.loads(cli.ok("sim", "status", "--json"))["nodes"])


def broken(cli: CommandLine) -> set[tuple[str, int]]:
    return {(node["cluster"], node["rank"]) for node in listed(cli) if node["faults"]}


def ids(cli: CommandLine, cluster: str) -> list[str]:
    """The instances of a cluster in the order of node ranks, as `status` shows them."""
    (shown,) = json.loads(cli.ok("status", "--json", "-c", cluster))
    return [node["instance_id"] for node in shown["nodes"]]


def refused(cli: CommandLine, *words: str) -> str:
    done = cli(*words)
    assert (done.returncode, done.stdout) == (2, ""), (words, done)
    return done.stderr


# -- nodes ---------------------------------------------------------------------------------------------------


def test_fault_and_interrupt_take_a_rank_or_an_id(own: CommandLine) -> None:
    own.ok("up", "-n", "1", "-c", "alpha", "--spot")
    first = ids(own, "alpha")[0]
    own.ok("sim", "fault", "freeze", "0")  # of the only cluster
    own.ok("up", "-n", "2", "-c", "beta")
    beta = ids(own, "beta")
    shown = [(node["cluster"], node["rank"], node["instance_id"]) for node in listed(own)]
    assert shown == [("alpha", 0, first), ("beta", 0, beta[0]), ("beta", 1, beta[1])]
    assert own.ok("sim", "fault", "freeze", "1", "-c", "beta") == f"freeze: {beta[1]}\n"
    assert broken(own) == {("alpha", 0), ("beta", 1)}
    rows = [line.split() for line in own.ok("sim", "status").splitlines()[1:]]
    assert rows[0][:2] == ["CLUSTER", "NODE"]
    assert [(row[0], row[1], row[-1]) for row in rows[1:4]] == [
        ("alpha", "0", "frozen"),
        ("beta", "0", "-"),
        ("beta", "1", "frozen"),
    ]
    assert "node 0 of which cluster? clusters: alpha, beta" in refused(own, "sim", "interrupt", "0")
    project, own.cwd = own.cwd, own.cwd / "beta"  # the cluster of a folder of that name
    own.cwd.mkdir()
    assert own.ok("sim", "fault", "heal", "1") == f"heal: {beta[1]} (freeze)\n"
    own.cwd = project
    own.ok("sim", "fault", "freeze", "1", "-c", "beta")
    assert f"nodes: 0 ({first})" in refused(own, "sim", "fault", "freeze", "1", "-c", "alpha")
    for name, message in (("i-", "several nodes match i-: "), ("unknown", "")):
        error = refused(own, "sim", "fault", "freeze", name)
        assert message in error
        assert f"alpha 0 ({first})" in error
    own.write("cloudddp.toml", "[cluster]\nnodse = 2\n")  # not read, because the node is given by its id
    assert "(freeze)" in own.ok("sim", "fault", "heal", first[:12])
    assert "it had no fault" in own.ok("sim", "fault", "heal", first)
    own.ok("sim", "interrupt", first, "--seconds", "500")
    assert f"interrupted at {listed(own)[0]['interruption']}" in own.ok("sim", "status")
    own.ok("sim", "fault", "kill", beta[1])
    wait_for(lambda: len(listed(own)) == 2, "the killed node is gone")
    (own.cwd / "cloudddp.toml").unlink()
    assert "1 node of it has ended" in own.ok("status", "-c", "beta")


# -- starting ------------------------------------------------------------------------------------------------


def test_unknown_kind_of_nodes_is_refused(own: CommandLine) -> None:
    own.env["CLOUDDDP_SIM_NODES"] = "virtual"
    assert "CLOUDDDP_SIM_NODES: auto, namespace, machine, process" in refused(own, "up", "-n", "1")


def test_port_in_use_is_reported_in_one_line(own: CommandLine) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        err = own.fails(1, "sim", "start", "--port", str(port), "--nodes", "process")
    first, second = err.splitlines()
    assert first == f"cloudddp: the simulator cannot start: port {port} of 127.0.0.1 is in use"
    assert "cloudddp sim stop" in second
    assert "--port" in second


# -- missing programs and privileges -------------------------------------------------------------------------


# Takes one requirement of namespace nodes away, in a user namespace. lab/test_lab_*.py have the others.
WITHOUT = ("unshare", "--user", "--map-root-user", "setpriv", "--bounding-set=-sys_admin")
WHY = "namespaces are refused: unshare: Operation not permitted (root lacks the privilege"


def test_missing_requirement_is_fatal_only_for_a_forced_kind(own: CommandLine, tmp_path: Path) -> None:
    if subprocess.run([*WITHOUT, "true"], capture_output=True, check=False).returncode:
        cannot("user namespaces are refused")
    # Stubs for the other requirements.
    programs = tmp_path / "programs"
    programs.mkdir()
    for name in ("ip", "ssh-keygen", "nft", "sshd"):
        (programs / name).write_text("#!/bin/sh\n")
        (programs / name).chmod(0o755)
    own.env["PATH"] = f"{programs}{os.pathsep}{own.env['PATH']}"

    def start(*options: str) -> subprocess.CompletedProcess[str]:
        argv = [*WITHOUT, sys.executable, "-m", "cloudddp", "sim", "start", *options]
        return subprocess.run(argv, cwd=own.cwd, env=own.env, capture_output=True, text=True, timeout=300)

    forced = start("--nodes", "namespace")
    assert forced.returncode == 1
    assert f"namespace nodes are not available here: {WHY}" in forced.stderr
    assert "--nodes process" in forced.stderr
    fallback = start("--interface", "e0")
    assert fallback.returncode == 0, fallback.stderr
    assert f"nodes are processes of this computer ({WHY}" in fallback.stdout
    assert "--interface has no effect" in fallback.stderr
    own.write("ok.py", "")
    assert f"(now processes: {WHY}" in own.fails(2, "run", "-d", "-n", "1", "ok.py")


# -- conditions ----------------------------------------------------------------------------------------------


def test_invalid_condition_is_a_usage_error_with_an_example(cli: CommandLine) -> None:
    """The example is valid. tests/lab/test_sim_conditions.py has each condition."""
    error = refused(cli, "sim", "conditions", "[]")
    assert "not a JSON object: []" in error
    hint = error.splitlines()[1]
    changes = hint[hint.index("'") + 1 : hint.rindex("'")]
    assert json.loads(cli.ok("sim", "conditions", changes))["latency"] == {"*": 0.2}
    assert json.loads(cli.ok("sim", "conditions", "--clear"))["latency"] == {}
    assert "unknown condition 'throtle'; known: throttle, " in refused(
        cli, "sim", "conditions", '{"throtle": {}}'
    )


# -- policies ------------------------------------------------------------------------------------------------


def test_options_of_a_running_simulator_are_shown_and_cannot_change(own: CommandLine) -> None:
    """AWS attaches FullAWSAccess to every account: a file with the rules of an organization that only deny is
    not enough."""
    everything = {"Version": "2012-10-17", "Statement": {"Effect": "Allow", "Action": "*", "Resource": "*"}}
    policy = own.write("policy.json", json.dumps(everything))
    deny = {"Effect": "Deny", "Action": "ec2:RunInstances", "Resource": "*"}
    own.write("scp.json", json.dumps({"Version": "2012-10-17", "Statement": [deny]}))
    own.write("broken.json", "{")
    for name, words in (
        ("broken.json", "broken.json is not a policy: not valid JSON"),
        ("none.json", "cannot read the policy none.json"),
    ):
        assert words in refused(own, "sim", "start", "--policy", name)
    options = ("--nodes", "process", "--pending-seconds", "0.5")
    started = own("sim", "start", *options, "--policy", "policy.json", "--scp", "scp.json")
    assert f"calls are limited by --policy {policy} (sha256 " in started.stdout
    assert "--scp scp.json allows nothing, so every call is denied" in started.stderr
    assert "replaces FullAWSAccess" in started.stderr
    shown = json.loads(own.ok("sim", "status", "--json"))
    port = shown["endpoint"].rpartition(":")[2]
    assert str(policy) in shown["policies"]["policy"]
    assert "is already running" in own.ok("sim", "start", "--port", port, "--booting-seconds", "0")
    for other, runs in (
        (("--port", "9"), f"with --port {port}"),
        (("--pending-seconds", "1"), "with --pending-seconds 0.5"),
        (("--nodes", "namespace"), "with process nodes"),
    ):
        err = own.fails(1, "sim", "start", *other)
        assert f"the simulator is already running, {runs}\n" in err
        assert "cloudddp sim stop" in err
    policy.write_text(json.dumps({**everything, "Id": "edited"}))
    err = own.fails(1, "sim", "start", "--policy", "policy.json")
    assert err.count("sha256") == 2
    assert ", and the file has changed since (sha256 " in err
