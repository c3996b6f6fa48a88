"""`cloudddp sim`: node names, faults, options of a simulator that is already running, and invalid input."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.harness import CommandLine, clean_environment, wait_for

from cloudddp.sim import control
from cloudddp.sim.linux import processes

LATENCY = '{"latency": {"*": 0.2}}'


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


def test_rank_is_unique_per_cluster(own: CommandLine) -> None:
    own.ok("up", "-n", "1", "-c", "alpha")
    own.ok("up", "-n", "8", "-c", "beta")  # enough for addresses that sort differently as text
    shown = [(node["cluster"], node["rank"], node["instance_id"]) for node in listed(own)]
    beta = ids(own, "beta")
    assert shown == [("alpha", 0, ids(own, "alpha")[0]), *(("beta", n, one) for n, one in enumerate(beta))]
    assert own.ok("sim", "fault", "freeze", "7", "-c", "beta") == f"freeze: {beta[7]}\n"
    assert own.ok("-c", "beta", "sim", "fault", "freeze", "0") == f"freeze: {beta[0]}\n"
    assert broken(own) == {("beta", 0), ("beta", 7)}
    own.write("cloudddp.toml", '[cluster]\nname = "alpha"\n')
    own.ok("sim", "fault", "freeze", "0")
    assert broken(own) == {("alpha", 0), ("beta", 0), ("beta", 7)}
    rows = [line.split() for line in own.ok("sim", "status").splitlines()[1:]]
    assert rows[0][:2] == ["CLUSTER", "NODE"]
    assert [(row[0], row[1], row[-1]) for row in rows[1:4]] == [
        ("alpha", "0", "frozen"),
        ("beta", "0", "frozen"),
        ("beta", "1", "-"),
    ]


def test_unknown_node_name_lists_the_candidates(own: CommandLine) -> None:
    for cluster in ("alpha", "beta"):
        own.ok("up", "-n", "1", "-c", cluster)
    first = ids(own, "alpha")[0]
    for verb in (("fault", "freeze"), ("interrupt",)):
        assert "node 0 of which cluster? clusters: alpha, beta" in refused(own, "sim", *verb, "0")
        assert "clusters: alpha, beta" in refused(own, "sim", *verb, "0", "-c", "gamma")
        assert f"nodes: 0 ({first})" in refused(own, "sim", *verb, "1", "-c", "alpha")
        message = refused(own, "sim", *verb, "i-")
        assert "several nodes match i-: " in message
        assert f"alpha 0 ({first})" in message
        assert f"alpha 0 ({first})" in refused(own, "sim", *verb, "unknown")
    own.write("cloudddp.toml", "[cluster]\nnodse = 2\n")  # not read, because the node is given by its id
    assert own.ok("sim", "fault", "freeze", first[:12]) == f"freeze: {first}\n"


def test_rank_identifies_a_node_of_the_only_cluster_and_heal_lists_faults(
    own: CommandLine,
) -> None:
    own.ok("up", "-n", "2", "-c", "alpha")
    own.ok("sim", "fault", "freeze", "1")
    assert listed(own)[1]["faults"] == ["freeze"]
    assert "(freeze)" in own.ok("sim", "fault", "heal", "1")
    assert "it had no fault" in own.ok("sim", "fault", "heal", "1")
    assert broken(own) == set()
    assert "namespace nodes" in refused(own, "sim", "fault", "cut", "1")
    own.ok("sim", "fault", "kill", "1")
    wait_for(lambda: len(listed(own)) == 1, "the killed node is gone")
    assert "1 node of it has ended" in own.ok("status", "-c", "alpha")


def test_interruption_time_of_a_spot_node_is_shown(own: CommandLine) -> None:
    own.ok("up", "-n", "1", "--spot")
    own.ok("sim", "interrupt", "0", "--seconds", "500")
    (node,) = listed(own)
    assert f"interrupted at {node['interruption']}" in own.ok("sim", "status")


# -- starting ------------------------------------------------------------------------------------------------


def test_running_simulator_with_other_options_is_refused(
    own: CommandLine,
) -> None:
    own.ok("sim", "start", "--pending-seconds", "0.5", "--nodes", "process")
    port = json.loads(own.ok("sim", "status", "--json"))["endpoint"].rpartition(":")[2]
    for same in ((), ("--port", port), ("--pending-seconds", "0.5", "--booting-seconds", "0")):
        assert "is already running" in own.ok("sim", "start", *same)
    for other, runs in (
        (("--port", "9"), f"with --port {port}"),
        (("--pending-seconds", "1"), "with --pending-seconds 0.5"),
        (("--shutting-down-seconds", "2"), "with --shutting-down-seconds 0"),
        (("--interface", "e0"), "with --interface ens5"),
        (("--nodes", "namespace"), "with process nodes"),
    ):
        done = own("sim", "start", *other)
        assert done.returncode == 1
        assert f"the simulator is already running, {runs}\n" in done.stderr
        assert "cloudddp sim stop" in done.stderr


@pytest.mark.parametrize("name", ["", "a b", "a/b", "a:b", "lo", ".", "..", "x" * 16, "all", "eth%d", "-e"])
def test_invalid_interface_name_is_refused(own: CommandLine, name: str) -> None:
    message = refused(own, "sim", "start", f"--interface={name}")
    assert repr(name) in message
    assert "1 to 15 letters" in message
    assert not (Path(own.env["CLOUDDDP_HOME"]) / "sim" / "sim.json").exists()


def test_process_nodes_take_no_interface_names(own: CommandLine) -> None:
    assert "no interface of their own" in refused(
        own, "sim", "start", "--nodes", "process", "--interface", "e0"
    )


@pytest.mark.parametrize("seconds", ["nan", "inf", "-inf", "-1", "601"])
def test_seconds_out_of_range_are_refused(own: CommandLine, seconds: str) -> None:
    for option in ("pending", "booting", "shutting-down", "unknown"):
        assert f"--{option}-seconds" in refused(own, "sim", "start", f"--{option}-seconds={seconds}")
    assert "--seconds" in refused(own, "sim", "interrupt", "0", f"--seconds={seconds}")


def test_unknown_node_kind_is_refused(own: CommandLine) -> None:
    own.env["CLOUDDDP_SIM_NODES"] = "virtual"
    assert "CLOUDDDP_SIM_NODES: auto, namespace, process" in refused(own, "up", "-n", "1")


def test_port_in_use_is_reported_in_one_line(own: CommandLine) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        done = own("sim", "start", "--port", str(port), "--nodes", "process")
    assert done.returncode == 1
    first, second = done.stderr.splitlines()
    assert first == f"cloudddp: the simulator cannot start: port {port} of 127.0.0.1 is in use"
    assert "cloudddp sim stop" in second
    assert "--port" in second


# -- missing programs and privileges -------------------------------------------------------------------------


def without(program: str) -> list[str]:
    """Return a command prefix that hides a program, in a mount namespace."""
    places = [
        f"{folder}/{program}" for folder in ("/usr/sbin", "/usr/bin", "/usr/local/sbin", "/usr/local/bin")
    ]
    hide = "".join(f"[ ! -e {place} ] || mount --bind /dev/null {place}; " for place in places)
    return ["unshare", "--mount", "sh", "-ec", f'{hide}exec "$@"', "sh"]


MISSING = [
    (without("sshd"), "openssh-server not installed (apt-get install openssh-server)"),
    (without("nft"), "nftables not installed (apt-get install nftables)"),
    (["setpriv", "--bounding-set=-sys_admin"], "namespaces are refused: unshare: Operation not permitted"),
]


@pytest.mark.skipif(os.getuid() != 0, reason="needs root")
@pytest.mark.parametrize(("shell", "why"), MISSING, ids=["sshd", "nft", "namespaces"])
def test_missing_requirement_is_fatal_only_for_a_forced_kind(
    own: CommandLine, shell: list[str], why: str
) -> None:
    if not all(map(shutil.which, ("unshare", "setpriv"))):
        pytest.skip("needs unshare and setpriv (util-linux)")

    def start(*options: str) -> subprocess.CompletedProcess[str]:
        words = [*shell, sys.executable, "-m", "cloudddp", "sim", "start", *options]
        return subprocess.run(
            words, cwd=own.cwd, env=own.env, capture_output=True, text=True, timeout=120, check=False
        )

    forced = start("--nodes", "namespace")
    assert forced.returncode == 1
    assert f"namespace nodes are not available here: {why}" in forced.stderr
    assert "--nodes process" in forced.stderr
    fallback = start("--interface", "e0")
    assert fallback.returncode == 0, fallback.stderr
    assert f"nodes are processes of this computer ({why}" in fallback.stdout
    assert "--interface has no effect" in fallback.stderr


# -- conditions ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ("{", "not JSON"),
        ("[]", "not a JSON object: []"),
        ("3", "not a JSON object: 3"),
        ("null", "not a JSON object"),
        ('"x"', "not a JSON object"),
        (
            '{"latency": 0.2}',
            f"latency: expected an object with a key per action, not 0.2; for example {LATENCY}",
        ),
        ('{"latency": {"*": NaN}}', "latency: *: expected seconds from 0 to 3600, not NaN; for example"),
        ('{"throtle": {}}', "unknown condition 'throtle'; known: throttle, "),
        ('{"throttle": {"RunInstance": 2}}', "throttle: unknown action 'RunInstance'; known: RunInstances, "),
        ('{"quota": {"on-demand-x": 2}}', "quota: unknown quota 'on-demand-x'; known: on-demand-"),
        ('{"capacity": []}', "capacity: expected an object with a key per zone, not []"),
        (
            '{"capacity": {"us-east-1a": 0}}',
            "capacity: expected an object with a key per instance type, not 0",
        ),
        ('{"capacity": {"us-east-9z": {}}}', "capacity: unknown zone 'us-east-9z'; known: us-east-"),
        ('{"capacity": {"us-east-1a": {"p5.48xlarg": 1}}}', "'p5.48xlarg'; known: p5.48xlarge, "),
    ],
)
def test_invalid_condition_is_a_usage_error_with_an_example(
    cli: CommandLine, changes: str, message: str
) -> None:
    error = refused(cli, "sim", "conditions", changes)
    assert message in error
    assert "for example" in error or "known: throttle" in error


def test_long_list_of_names_is_shortened_in_errors(
    cli: CommandLine,
) -> None:
    error = refused(cli, "sim", "conditions", '{"lose": {"TerminateInstance": 1}}')
    names, _, rest = error.partition("known: ")[2].partition(" and ")
    assert names.split(", ")[0] == "TerminateInstances"
    assert int(rest.split()[0]) > 100
    assert "more" in rest


def test_example_in_the_error_is_valid(cli: CommandLine) -> None:
    hint = refused(cli, "sim", "conditions", "[]").splitlines()[1]
    changes = hint[hint.index("'") + 1 : hint.rindex("'")]
    assert json.loads(cli.ok("sim", "conditions", changes))["latency"] == {"*": 0.2}
    assert json.loads(cli.ok("sim", "conditions", "--clear"))["latency"] == {}


# -- policies ------------------------------------------------------------------------------------------------


def test_policies_of_start(own: CommandLine) -> None:
    everything = {"Version": "2012-10-17", "Statement": {"Effect": "Allow", "Action": "*", "Resource": "*"}}
    policy = own.write("policy.json", json.dumps(everything))
    started = own.ok("sim", "start", "--nodes", "process", "--policy", "policy.json")
    assert f"calls are limited by --policy {policy} (sha256 " in started
    assert f"calls are limited by --policy {policy} (sha256 " in own.ok("sim", "status")
    assert str(policy) in json.loads(own.ok("sim", "status", "--json"))["policies"]["policy"]
    done = own("sim", "start", "--scp", "policy.json")
    assert done.returncode == 1
    assert "the simulator is already running, with no --scp" in done.stderr
    again = f"`cloudddp sim stop && cloudddp sim start --scp {policy}`"
    assert again in done.stderr
    policy.write_text(json.dumps({**everything, "Id": "edited"}))
    done = own("sim", "start", "--policy", "policy.json")
    assert done.returncode == 1
    assert done.stderr.count("sha256") == 2
    assert ", and the file has changed since (sha256 " in done.stderr
    own.write("broken.json", "{")
    for name, words in (
        ("broken.json", "broken.json is not a policy: not valid JSON"),
        ("none.json", "cannot read the policy none.json"),
    ):
        assert words in refused(own, "sim", "start", "--policy", name)


def test_policy_that_allows_nothing_is_named_at_the_start(own: CommandLine) -> None:
    """AWS attaches FullAWSAccess to every account: a file with the rules of an organization that only deny is
    not enough."""
    deny = {"Effect": "Deny", "Action": "ec2:RunInstances", "Resource": "*"}
    allow = {"Effect": "Allow", "Action": "*", "Resource": "*"}
    for statements, warned in (([deny], True), ([deny, allow], False)):
        own.write("scp.json", json.dumps({"Version": "2012-10-17", "Statement": statements}))
        started = own("sim", "start", "--nodes", "process", "--scp", "scp.json")
        assert started.returncode == 0, started.stderr
        assert ("--scp scp.json allows nothing, so every call is denied" in started.stderr) is warned
        assert ("replaces FullAWSAccess" in started.stderr) is warned
        own.ok("sim", "stop")
