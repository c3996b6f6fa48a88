"""The whole product on namespace nodes, which have their own network, processes and disk, and with faults."""

from __future__ import annotations

import json
from typing import Any

import pytest
from support.harness import CommandLine, finished, lines_until, listed_nodes, wait_for
from support.jobs import direct, processes, written


@pytest.fixture
def cli(lab_cli: CommandLine) -> CommandLine:
    return lab_cli


IDLE = 7  # processes of a node without a job: machine, init, sshd and its starter, and those of a connection
FAILS = "EC2's instance status check has been failing since 20"
WAIT = "import time\nprint('began', flush=True)\nwhile True: time.sleep(0.05)\n"


def running(cli: CommandLine, script: str = "wait.py", **env: str) -> Any:
    """Start a job in the foreground, one rank on each of two nodes; return its process once both ranks
    run."""
    process = cli.start("launch", script, **env)
    # The ranks print it themselves: a process count would include those that prepare the job.
    lines_until(process.stdout, "began", count=2)
    return process


@pytest.mark.torch
def test_torchrun_across_hosts_with_different_interface_names(cli: CommandLine) -> None:
    pytest.importorskip("torch")
    cli.nodes(2)
    cli.write(
        "reduce.py",
        "import os, socket, torch, torch.distributed as dist\n"
        "dist.init_process_group('gloo')\n"
        "x = torch.ones(1) * dist.get_rank()\n"
        "dist.all_reduce(x)\n"
        "print(int(x), socket.gethostname(), os.environ['GLOO_SOCKET_IFNAME'], "
        "os.environ['NCCL_SOCKET_IFNAME'],"
        " torch.cuda.is_available(), flush=True)\n"
        "dist.barrier()\n"
        "os._exit(0)\n",  # gloo's threads sometimes abort the interpreter's shutdown
    )
    output = cli.ok("launch", "--nproc-per-node", "2", "reduce.py")
    names = {node["private_ip"]: f"ip-{node['private_ip'].replace('.', '-')}" for node in listed_nodes(cli)}
    for name, interface in zip(sorted(names.values()), interfaces(cli), strict=True):
        assert output.count(f"6 {name} {interface} ={interface} False") == 2, output
    assert set(interfaces(cli)) == {"ens5", "enp71s0"}


def interfaces(cli: CommandLine) -> list[str]:
    """The name of each node's interface, in the order of host names."""
    host, found = {}, {}
    # Lines of the nodes are mixed.
    for line in cli.ok("exec", "--", "hostname; ls /sys/class/net").splitlines():
        node, word = line.split("] ", 1)
        if word.startswith(("ip-", "en")):
            (host if word.startswith("ip-") else found)[node] = word
    return [found[node] for node in sorted(host, key=host.__getitem__)]


def test_failed_machine_ends_the_job(cli: CommandLine) -> None:
    direct(cli, nodes=2)
    cli.write("wait.py", WAIT)
    process = running(cli)
    cli.ok("sim", "fault", "kill", listed_nodes(cli)[1]["instance_id"])
    _, err = finished(process, 1, 240)
    assert "node 1 was lost: it sent nothing to node 0" in err
    assert "node 1: AWS reports that i-" in err
    assert "is terminated: Server.InternalError" in err
    assert "status`; with the remaining nodes: " in err
    wait_for(lambda: processes(cli) <= IDLE, "nothing of the job on the other node")
    refused = cli.fails(1, "launch", "-d", "--down", "wait.py")
    assert "1 of 2 nodes" in refused
    assert "so its --down does not end the nodes: " in refused
    (job,) = json.loads(cli.ok("jobs", "--json"))
    # The exit code of the verdict: the remaining rank did not fail.
    assert (job["state"], job["exit_code"]) == ("failed", 1)


def test_verbs_with_a_frozen_node(cli: CommandLine) -> None:
    direct(cli, nodes=2)
    cli.write("wait.py", "open('model.pt', 'w').write('w')\n" + WAIT)
    process = running(cli, CLOUDDDP_TIME_SCALE="0.5")
    assert process.stderr is not None
    for act, message in (
        ("freeze", "node 1 is not responding; retrying"),
        ("heal", "node 1 is responding again"),
    ):
        cli.ok("sim", "fault", act, "1")
        assert any(message in line for line in process.stderr)
    cli.ok("cancel")
    finished(process, 130)

    # The job is not to end because of the frozen node.
    job = cli.ok("launch", "-d", "wait.py", CLOUDDDP_HEARTBEAT="600").strip()
    written(cli, "began")
    cli.ok("sim", "fault", "freeze", "1")
    cli.env["CLOUDDDP_TIME_SCALE"] = "0.4"  # the test above has the limits that users have
    for verb, shown in {"jobs": " running ", "logs": "[rank 0 | node 0] began"}.items():
        done = cli(verb)
        assert done.returncode == 1, (verb, done)
        assert shown in done.stdout
        assert "rank 1" not in done.stdout
        assert f"node 1 ({listed_nodes(cli)[1]['instance_id']}) at " in done.stderr
        assert "node 1 could not be queried" in done.stderr
        assert "the node itself" in done.stderr
        assert "booting" not in done.stderr
        assert FAILS in done.stderr
    refused = cli.fails(1, "launch", "wait.py")
    assert "the node itself" in refused
    assert FAILS in refused
    out, err = cli.patient(15, "down")
    assert f"job {job} is running on node 0" in err
    assert f"not pulled from node 0: model.pt (1 byte) of job {job}" in err
    assert f"node 1 did not answer ({FAILS}" in err
    assert "nothing is left" in out


def test_cancel_ends_a_setup_with_sudo(cli: CommandLine) -> None:
    direct(cli, nodes=2)
    cli.write("cloudddp.toml", "[setup]\nrun = [\"sudo sh -c 'sleep 987; true'\"]\n")
    cli.write("wait.py", WAIT)
    process = cli.start("launch", "wait.py")
    sleeping = "pgrep -x sleep -a || true"
    wait_for(lambda: cli.ok("exec", sleeping).count("987") == 2, "the setup has begun on both nodes")
    assert "its setup was stopped" in cli.ok("cancel")
    finished(process, 130)
    assert "987" not in cli.ok("exec", sleeping)


def test_addresses_that_may_connect_are_named_while_no_node_answers(cli: CommandLine) -> None:
    """SSH can leave by another address than the HTTPS request that asked for it: split VPNs, pools of NAT
    addresses."""
    short = {"CLOUDDDP_TIME_SCALE": "0.04", "CLOUDDDP_READY_MINUTES": "2"}
    err = cli.fails(1, "up", "-n", "2", "--ssh-from", "192.0.2.7/32", **short)
    (line,) = [one for one in err.splitlines() if "no answer from node" in one and "SSH is open" in one]
    assert "SSH is open to 192.0.2.7/32" in line
    assert "allow-me" in line
    assert "--ssh-from" in line
