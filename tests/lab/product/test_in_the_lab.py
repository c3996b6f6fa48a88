"""The whole product on namespace nodes, which have their own network, processes and disk, and with faults."""

from __future__ import annotations

import hashlib
import json
import os
import re
from typing import Any

import pytest
from support.harness import CommandLine, finished, lines_until, listed_nodes, wait_for
from support.jobs import written

from cloudddp.simulator import control


@pytest.fixture
def cli(lab_cli: CommandLine) -> CommandLine:
    return lab_cli


def direct(cli: CommandLine, *, shared: bool = True) -> None:
    """Have two nodes, not `shared` if the test damages them, and let jobs start ranks without torchrun."""
    cli.write("cloudddp.toml", '[job]\nrendezvous = "direct"\nnproc_per_node = 1\n')
    if shared:
        cli.nodes(2)
    else:
        cli.ok("up", "-n", "2", "-t", "g5.12xlarge")


def impatient(cli: CommandLine) -> None:
    """Shorten every time limit for silence. `test_failed_machine_ends_the_job` has the limits that users
    have."""
    cli.env["CLOUDDDP_TIME_SCALE"] = "0.4"


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


def counted(cli: CommandLine) -> list[dict[str, Any]]:
    listed = json.loads(cli.ok("sim", "status", "--json"))["nodes"]
    mine = {node["instance_id"] for node in listed_nodes(cli)}
    return [{**n, "processes": len(n["processes"])} for n in listed if n["instance_id"] in mine]


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


def test_sync_over_a_link_that_loses_packets(cli: CommandLine, lab: control.Simulator) -> None:
    direct(cli)
    weights = os.urandom(4_000_000)
    (cli.cwd / "weights.bin").write_bytes(weights)
    control.conditions(lab, {"link": {"loss": 5, "latency": 0.01}})
    try:
        assert "warning" not in cli.messages("sync")
    finally:
        control.conditions(lab, {"link": None})
    assert cli.ok("exec", "sha256sum weights.bin").count(hashlib.sha256(weights).hexdigest()) == 2


def test_failed_machine_ends_the_job(cli: CommandLine) -> None:
    direct(cli)
    cli.write("wait.py", WAIT)
    process = running(cli)
    cli.ok("sim", "fault", "kill", listed_nodes(cli)[1]["instance_id"])
    _, err = finished(process, 1, 240)
    assert "node 1 was lost: it sent nothing to node 0" in err
    assert "node 1: AWS reports that i-" in err
    assert "is terminated: Server.InternalError" in err
    assert "status`; with the remaining nodes: " in err
    wait_for(
        lambda: [n["processes"] <= IDLE for n in counted(cli)] == [True],
        "nothing of the job on the other node",
    )
    refused = cli.fails(1, "launch", "-d", "--down", "wait.py")
    assert "1 of 2 nodes" in refused
    assert "so its --down does not end the nodes: " in refused
    (job,) = json.loads(cli.ok("jobs", "--json"))
    # The exit code of the verdict: the remaining rank did not fail.
    assert (job["state"], job["exit_code"]) == ("failed", 1)


def test_verbs_with_a_frozen_node(cli: CommandLine) -> None:
    direct(cli, shared=False)
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
    impatient(cli)
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
    direct(cli)
    cli.write("cloudddp.toml", "[setup]\nrun = [\"sudo sh -c 'sleep 987; true'\"]\n")
    cli.write("wait.py", WAIT)
    process = cli.start("launch", "wait.py")
    sleeping = "pgrep -x sleep -a || true"
    wait_for(lambda: cli.ok("exec", sleeping).count("987") == 2, "the setup has begun on both nodes")
    assert "its setup was stopped" in cli.ok("cancel")
    finished(process, 130)
    assert "987" not in cli.ok("exec", sleeping)


def test_full_disk_is_named_and_no_job_starts_on_it(cli: CommandLine) -> None:
    """A rank that fails because of it is named, its job is listed, and no other one starts."""
    direct(cli)
    cli.write("mark", "")
    cli.write(
        "fill.py",
        "import os, time\nprint('began', flush=True)\n"
        "while os.path.exists('mark') or os.environ['RANK'] == '0': time.sleep(0.05)\nopen('model.pt', 'wb', "
        "0).write(bytes(9))\n",
    )
    process = running(cli, "fill.py")
    cli.ok("sim", "fault", "fill-disk", "1")
    cli.ok("exec", "--node", "1", "rm mark; dd if=/dev/zero of=rest bs=4096 2>&- || true")
    _, err = finished(process, 1)
    assert "rank 1 on node 1 failed with code 1: no space is left on a disk of node 1" in err
    assert " failed " in cli.ok("jobs")
    assert "[rank 1 | node 1] began" in cli.ok("logs")
    (cli.cwd / "data.bin").write_bytes(os.urandom(1 << 20))
    assert "node 1: not enough disk space for the project: 0 MiB free" in cli.fails(1, "launch", "fill.py")


def test_sim_status_shows_faults_until_healed_or_rebooted(cli: CommandLine, ec2: Any) -> None:
    direct(cli)
    faults = (
        ("cut-between", "0", "1"),
        ("fill-disk", "1"),
        ("slow-ssh", "1"),
        ("drop-ssh", "0"),
        ("freeze", "0"),
    )
    for words in faults:
        cli.ok("sim", "fault", *words)
    first, second = counted(cli)
    cut = [f"cut-between {node['instance_id']}" for node in (second, first)]
    assert first["faults"] == ["freeze", "drop-ssh", cut[0]]
    assert second["faults"] == ["fill-disk", "slow-ssh", cut[1]]
    table = cli.ok("sim", "status")
    assert "frozen, no ssh, cut from node 1\n" in table
    assert "disk full, slow ssh, cut from node 0\n" in table
    ec2.reboot_instances(InstanceIds=[first["instance_id"]])
    wait_for(lambda: counted(cli)[0]["faults"] == ["drop-ssh", cut[0]], "the frozen machine is gone")
    for rank in ("0", "1"):
        cli.ok("sim", "fault", "heal", rank)
    assert [node["faults"] for node in counted(cli)] == [[], []]


NO_MORE_SSH = """
import os, subprocess, time
print("began", flush=True)
if os.environ["RANK"] == "1":
    subprocess.run(["sudo", "pkill", "-9", "sshd"], check=True)
    time.sleep(1)
"""


def test_success_counts_also_on_a_node_that_no_longer_answers(cli: CommandLine) -> None:
    impatient(cli)
    direct(cli, shared=False)
    cli.write("no_more_ssh.py", NO_MORE_SSH)
    process = cli.start("launch", "no_more_ssh.py")
    _, err = finished(process, 0)
    assert re.search("finished: (all|2) ranks", err), err  # it may have ended before it said how many it has
    assert "node 1 does not respond: its ranks have finished, but the end of its logs may be missing" in err
    assert "may still run" not in err
    assert "--replace" not in err


# sshd's process of the connection is the parent of the shell that runs a command.
BREAKS = 'case "$BASH_EXECUTION_STRING" in *" serve"*) kill -9 $PPID;; esac\n'


def test_start_files_that_print_or_break_the_connection(cli: CommandLine) -> None:
    direct(cli, shared=False)
    script = "import os\nos.makedirs('out', exist_ok=True)\nopen('out/a', 'w').write('a')\nprint('trained')\n"
    cli.write("works.py", script)
    cli.write("cloudddp.toml", '[job]\nrendezvous = "direct"\nnproc_per_node = 1\noutputs = ["out"]\n')
    cli.write("noise", "echo environment ready\nprintf 'no line break'\nset -x\ntrap 'echo bye' EXIT\n")
    cli.write("breaks", BREAKS)
    cli.ok("sync")
    cli.ok("exec", "--", "cp noise ~/.bashrc && mkdir -p ~/.ssh && echo 'echo from rc' > ~/.ssh/rc")
    done = cli.exits(0, "launch", "works.py")
    assert "trained" in done.stdout
    assert done.stderr.count("~/.bashrc") == 1
    assert "'from rc'" in done.stderr or "'environment ready'" in done.stderr
    assert "trained" in cli.ok("logs")
    assert cli.ok("exec", "--node", "1", "--", "printf '\\0x'; echo") == "\\x00x\n"
    assert "1 file" in cli.ok("pull", "--node", "0")
    cli.ok("extend", "--hours", "1")
    cli.ok("exec", "--node", "1", "--", "cp breaks ~/.bashrc; rm ~/.ssh/rc")
    done = cli.exits(1, "jobs", "--json")
    assert len(json.loads(done.stdout)) == 1
    assert "the SSH connection broke (connection closed), in step 'jobs' of the agent" in done.stderr
    assert "umask" not in done.stderr
