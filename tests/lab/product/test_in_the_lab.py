"""The whole product on namespace nodes, which have their own network, processes and disk, and with faults."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from typing import Any

import pytest
from support.harness import CommandLine, cannot, listed_nodes, wait_for
from support.jobs import written

from cloudddp.sim import control
from cloudddp.sim.hosts import lab_namespaces


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[control.Simulator]:
    if why := lab_namespaces.unavailable_reason():
        cannot(why)
    home = tmp_path_factory.mktemp("lab")
    yield control.start(home, nodes="namespace", interfaces=("ens5", "enp71s0"))
    control.stop(home)


@pytest.fixture
def cli(lab_cli: CommandLine) -> CommandLine:
    return lab_cli


def direct(cli: CommandLine, *options: str, shared: bool = True) -> None:
    """Have two nodes, not `shared` if the test damages them, and let jobs start ranks without torchrun."""
    cli.write("cloudddp.toml", '[job]\nrendezvous = "direct"\nnproc_per_node = 1\n')
    if options or not shared:
        cli.ok("up", "-n", "2", "-t", "g5.12xlarge", *options)
    else:
        cli.nodes(2)


def impatient(cli: CommandLine) -> None:
    """Shorten every time limit for silence. `test_failed_machine_ends_the_job` has the limits that users
    have."""
    cli.env["CLOUDDDP_TIME_SCALE"] = "0.4"


IDLE = 7  # processes of a node without a job: machine, init, sshd and its starter, and those of a connection
FAILS = "EC2's instance status check has been failing since 20"
WAIT = "import time\nprint('began', flush=True)\nwhile True: time.sleep(0.05)\n"


def running(cli: CommandLine, script: str = "wait.py") -> Any:
    """Start a job in the foreground, one rank on each of two nodes; return its process once both ranks
    run."""
    process = cli.start("launch", script)
    assert process.stdout is not None
    begun: set[str] = set()
    # The ranks print it themselves: a process count would include those that prepare the job.
    while len(begun) < 2:
        line = process.stdout.readline()
        assert line, process.communicate()
        begun |= {line} if "began" in line else set()
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


def test_sync_and_pull(cli: CommandLine) -> None:
    direct(cli)
    cli.write(
        "make.py",
        "import os, pathlib\n"
        "pathlib.Path('runs').mkdir(exist_ok=True)\n"
        "pathlib.Path('runs/' + os.environ['RANK']).write_text(pathlib.Path('data.txt').read_text())\n",
    )
    cli.write("data.txt", "seven")
    cli.ok("launch", "make.py")
    cli.ok("pull")
    (brought,) = (cli.cwd / "results").rglob("runs/0")
    assert brought.read_text() == "seven"


def test_failed_machine_ends_the_job(cli: CommandLine) -> None:
    direct(cli)
    cli.write("wait.py", WAIT)
    process = running(cli)
    cli.ok("sim", "fault", "kill", listed_nodes(cli)[1]["instance_id"])
    _, err = process.communicate(timeout=240)
    assert process.returncode == 1
    assert "node 1 was lost: it sent nothing to node 0" in err
    assert "node 1: AWS reports that i-" in err
    assert "is terminated: Server.InternalError" in err
    assert "status`; with the remaining nodes: " in err
    wait_for(
        lambda: [n["processes"] <= IDLE for n in counted(cli)] == [True],
        "nothing of the job on the other node",
    )
    refused = cli("launch", "wait.py")
    assert refused.returncode == 1
    assert "1 of 2 nodes" in refused.stderr
    (job,) = json.loads(cli.ok("jobs", "--json"))
    # The exit code of the verdict: the remaining rank did not fail.
    assert (job["state"], job["exit_code"]) == ("failed", 1)


def test_silent_node_is_reported_before_it_is_lost(cli: CommandLine) -> None:
    direct(cli)
    cli.env["CLOUDDDP_TIME_SCALE"] = "0.5"
    cli.write("wait.py", WAIT)
    process = running(cli)
    assert process.stderr is not None
    shown = []
    for act, message in (
        ("freeze", "node 1 is not responding; retrying"),
        ("heal", "node 1 is responding again"),
    ):
        cli.ok("sim", "fault", act, "1")
        shown.append(act)
        while message not in shown[-1]:
            shown.append(process.stderr.readline())
            assert shown[-1], shown
    cli.ok("cancel")
    process.communicate(timeout=110)
    assert process.returncode == 130


def test_lost_node_is_found_after_the_other_has_finished(cli: CommandLine) -> None:
    direct(cli)
    impatient(cli)
    cli.write(
        "until.py",
        "import os, time\nprint('began', flush=True)\n"
        "while not os.path.exists('enough'): time.sleep(0.05)\nraise SystemExit(3)\n",
    )
    process = running(cli, "until.py")
    cli.ok("sim", "fault", "kill", listed_nodes(cli)[1]["instance_id"])
    cli.ok("exec", "--node", "0", "touch enough")
    _, err = process.communicate(timeout=110)  # a regression: the loss was once detected only after minutes
    assert process.returncode == 1
    assert "node 1 was lost" in err
    assert "agent" not in err


def test_spot_interruption_without_a_notice_ends_the_job(cli: CommandLine) -> None:
    direct(cli, "--spot")
    impatient(cli)
    cli.write("wait.py", WAIT)
    process = running(cli)
    cli.ok("sim", "interrupt", listed_nodes(cli)[0]["instance_id"], "--seconds", "0")
    _, err = process.communicate(timeout=110)
    assert process.returncode == 1, err
    assert "node 0: the agent of cloudddp has ended there" in err
    ended = (
        r"is (shutting-down|terminated): AWS has interrupted this spot instance "
        r"\(Server.SpotInstanceTermination"
    )
    assert re.search(ended, err)
    assert "nothing is left" in cli.ok("down")


def test_full_disk_is_reported_at_launch(cli: CommandLine) -> None:
    direct(cli)
    cli.ok("sim", "fault", "fill-disk", listed_nodes(cli)[0]["instance_id"])
    (cli.cwd / "data.bin").write_bytes(os.urandom(1 << 20))
    cli.write("wait.py", WAIT)
    done = cli("launch", "wait.py")
    assert done.returncode == 1
    assert "node 0: " in done.stderr
    assert "node 0: not enough disk space for the project: 0 MiB free" in done.stderr


def test_node_that_does_not_answer_does_not_hold_back_the_results_of_the_others(cli: CommandLine) -> None:
    direct(cli)
    impatient(cli)
    cli.write(
        "make.py",
        "import os, pathlib\n"
        "pathlib.Path('runs').mkdir(exist_ok=True)\n"
        "pathlib.Path('runs/' + os.environ['RANK']).write_text('made')\n",
    )
    cli.ok("launch", "make.py")
    cli.ok("sim", "fault", "cut", "1")
    assert cli.ok("exec", "--node", "0", "echo there") == "[node 0] there\n"
    assert cli("exec", "--node", "1", "echo there").returncode == 1
    cli.ok("pull", "--node", "0", "--to", "one")
    cli.ok("pull", "--to", "two")
    everything = cli("pull", "--all-nodes", "--to", "three")
    assert everything.returncode == 1
    assert "node 1 could not be queried" in everything.stderr
    assert cli("pull", "--node", "1", "--to", "four").returncode == 1
    for folder in ("one/runs", "two/runs", "three/node0/runs"):
        assert (cli.cwd / folder / "0").read_text() == "made"
    cli.ok("sim", "fault", "cut", "0")
    cli.ok("sim", "fault", "heal", "1")
    alone = cli("pull", "--to", "five")
    assert alone.returncode == 1
    assert "node 0" in alone.stderr
    cli.ok("sim", "fault", "heal", "0")


@pytest.mark.parametrize(("kind", "verbs"), [("freeze", ("jobs", "logs", "cancel")), ("cut", ("jobs",))])
def test_job_commands_with_a_silent_node(cli: CommandLine, kind: str, verbs: tuple[str, ...]) -> None:
    direct(cli)
    cli.write("wait.py", WAIT)
    cli.ok("launch", "-d", "wait.py", CLOUDDDP_HEARTBEAT="600")  # the job is not to end because of it
    written(cli, "began")
    cli.ok("sim", "fault", kind, "1")
    impatient(cli)
    shown = {"jobs": " running ", "logs": "[rank 0 | node 0] began", "cancel": "stopped\n"}
    for verb in verbs:
        done = cli(verb)
        assert done.returncode == 1, (verb, done)
        assert shown[verb] in done.stdout
        assert "rank 1" not in done.stdout
        assert f"node 1 ({listed_nodes(cli)[1]['instance_id']}) at " in done.stderr
        assert "node 1 could not be queried" in done.stderr
        assert "the node itself" in done.stderr
        assert "booting" not in done.stderr
        assert FAILS in done.stderr
    refused = cli("launch", "wait.py")
    assert refused.returncode == 1
    assert "the node itself" in refused.stderr
    assert FAILS in refused.stderr
    cli.ok("sim", "fault", "heal", "1")
    done = cli.ok("cancel")
    # The other node's agent has told the frozen one of the cancel, or this cancel has reached it first.
    assert "stopped" in done or ("cancel" in verbs and "already ended (cancelled)" in done)
    wait_for(lambda: all(n["processes"] <= IDLE for n in counted(cli)), "nothing of the job is left")


def test_down_reports_unpulled_results_without_a_silent_node(cli: CommandLine) -> None:
    direct(cli)
    cli.write("wait.py", "open('model.pt', 'w').write('w')\n" + WAIT)
    job = cli.ok("launch", "-d", "wait.py").strip()
    written(cli, "began")
    cli.ok("sim", "fault", "freeze", "1")
    done = cli.patient(15, "down")
    assert done.returncode == 0, done.stderr
    assert f"job {job} is running on node 0" in done.stderr
    assert f"not pulled from node 0: model.pt (1 byte) of job {job}" in done.stderr
    assert f"node 1 did not answer ({FAILS}" in done.stderr
    assert "nothing is left" in done.stdout


def test_cancel_ends_a_setup_with_sudo(cli: CommandLine) -> None:
    direct(cli)
    cli.write("cloudddp.toml", "[setup]\nrun = [\"sudo sh -c 'sleep 987; true'\"]\n")
    cli.write("wait.py", WAIT)
    process = cli.start("launch", "wait.py")
    sleeping = "pgrep -x sleep -a || true"
    wait_for(lambda: cli.ok("exec", sleeping).count("987") == 2, "the setup has begun on both nodes")
    assert "its setup was stopped" in cli.ok("cancel")
    process.communicate(timeout=110)
    assert process.returncode == 130
    assert "987" not in cli.ok("exec", sleeping)


def test_jobs_of_a_node_with_full_disk(cli: CommandLine) -> None:
    direct(cli)
    cli.write("quick.py", "print('seen')\n")
    cli.ok("launch", "quick.py")
    cli.ok("sim", "fault", "fill-disk", "1")
    assert " succeeded " in cli.ok("jobs")
    assert "[rank 1 | node 1] seen" in cli.ok("logs")


def test_rank_that_fails_on_a_full_disk_is_named(cli: CommandLine) -> None:
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
    _, err = process.communicate(timeout=110)
    assert process.returncode == 1
    assert "rank 1 on node 1 failed with code 1: no space is left on a disk of node 1" in err


def test_sim_status_shows_faults_until_healed(cli: CommandLine) -> None:
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
    assert first["faults"] == ["freeze", "drop-ssh", f"cut-between {second['instance_id']}"]
    assert second["faults"] == ["fill-disk", "slow-ssh", f"cut-between {first['instance_id']}"]
    table = cli.ok("sim", "status")
    assert "frozen, no ssh, cut from node 1\n" in table
    assert "disk full, slow ssh, cut from node 0\n" in table
    for rank in ("0", "1"):
        cli.ok("sim", "fault", "heal", rank)
    assert [node["faults"] for node in counted(cli)] == [[], []]


def test_reboot_ends_a_freeze(cli: CommandLine, lab: control.Simulator) -> None:
    boto3 = pytest.importorskip("boto3")
    direct(cli)
    cli.ok("sim", "fault", "freeze", "0")
    (node, _) = counted(cli)
    where = {"region_name": lab.region, "aws_access_key_id": "x", "aws_secret_access_key": "x"}
    boto3.client("ec2", endpoint_url=lab.endpoint, **where).reboot_instances(
        InstanceIds=[node["instance_id"]]
    )
    wait_for(lambda: counted(cli)[0]["faults"] == [], "the frozen machine is gone")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("fault", "explode", "0"), "faults: kill, cut"),
        (("fault", "cut", "i-nowhere"), "nodes: "),
        (("interrupt", "i-nowhere"), "nodes: "),
        (("conditions", "{"), "not JSON"),
    ],
)
def test_unknown_fault_or_node_is_a_usage_error(
    cli: CommandLine, words: tuple[str, ...], message: str
) -> None:
    done = cli("sim", *words)
    assert done.returncode == 2
    assert message in done.stderr


def test_sim_start_refuses_another_node_kind(cli: CommandLine, tmp_path: Any) -> None:
    done = cli("sim", "start", "--nodes", "process")
    assert done.returncode == 1
    assert "is already running, with namespace nodes" in done.stderr


def test_deadline_holds_without_the_supervisor(cli: CommandLine, lab: control.Simulator) -> None:
    direct(cli, shared=False)
    cli.write("wait.py", WAIT)
    cli.ok("launch", "-d", "wait.py")
    cli.ok(
        "exec",
        "--",
        'pkill -9 -f "[s]upervise --job"; while pgrep -f "[s]upervise --job"; do sleep 0.05; done',
    )
    ours = {node["instance_id"] for node in listed_nodes(cli)}
    moment = "$(date -u -d '+3 seconds' '+%F %T UTC')"
    timer = "/etc/systemd/system/cloudddp-deadline.timer"
    arm = f'sudo sed -i "s/^OnCalendar=.*/OnCalendar={moment}/" {timer}'
    # a node that takes longer shuts down before it has answered
    cli("exec", "--", f"{arm} && sudo systemctl restart cloudddp-deadline.timer")
    wait_for(lambda: not ours & {n["instance_id"] for n in control.nodes(lab)}, "the nodes end")


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
    _, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    assert re.search("finished: (all|2) ranks", err), err  # it may have ended before it said how many it has
    assert "node 1 does not respond: its ranks have finished, but the end of its logs may be missing" in err
    assert "may still run" not in err
    assert "--replace" not in err


# sshd's process of the connection is the parent of the shell that runs a command.
BREAKS = 'case "$BASH_EXECUTION_STRING" in *" jobs "*) kill -9 $PPID;; esac\n'


def test_jobs_are_listed_also_if_a_connection_breaks(cli: CommandLine) -> None:
    direct(cli, shared=False)
    cli.write("works.py", "")
    cli.write("breaks", BREAKS)
    job = cli.ok("launch", "-d", "works.py").strip()
    cli.ok("exec", "--node", "1", "--", "cat breaks > ~/.bashrc")
    done = cli("jobs", "--json")
    assert done.returncode == 1
    assert [one["id"] for one in json.loads(done.stdout)] == [job]
    assert "the SSH connection broke (connection closed), in step 'jobs' of the agent" in done.stderr
    assert "umask" not in done.stderr


def test_start_files_that_print_do_not_reach_any_verb(cli: CommandLine) -> None:
    direct(cli, shared=False)
    script = "import os\nos.makedirs('out', exist_ok=True)\nopen('out/a', 'w').write('a')\nprint('trained')\n"
    cli.write("works.py", script)
    cli.write("cloudddp.toml", '[job]\nrendezvous = "direct"\nnproc_per_node = 1\noutputs = ["out"]\n')
    cli.write("noise", "echo environment ready\nprintf 'no line break'\nset -x\n")
    cli.ok("sync")
    cli.ok("exec", "--", "cp noise ~/.bashrc && mkdir -p ~/.ssh && echo 'echo from rc' > ~/.ssh/rc")
    done = cli("launch", "works.py")
    assert done.returncode == 0, done.stderr
    assert "trained" in done.stdout
    assert done.stderr.count("~/.bashrc") == 1
    assert "'from rc'" in done.stderr or "'environment ready'" in done.stderr
    assert "trained" in cli.ok("logs")
    assert cli.ok("exec", "--node", "1", "--", "printf '\\0x'; echo") == "[node 1] \\x00x\n"
    assert "1 file" in cli.ok("pull", "--node", "0")


def test_nodes_that_decide_apart_give_one_answer(cli: CommandLine) -> None:
    """Node 1 hears nothing of node 0, which hears it until it has ended its ranks: each has lost the
    other."""
    cli.env["CLOUDDDP_HEARTBEAT"] = "4"
    direct(cli)
    cli.write("wait.py", WAIT)
    cli.ok("launch", "-d", "wait.py")
    written(cli, "began")
    cli.ok("sim", "fault", "cut-from", "1", "0")
    answers: list[tuple[str, str | None]] = []

    def answer() -> bool:
        found = json.loads(cli("jobs", "--json").stdout or "[{}]")[-1]
        answers.append((found.get("state"), found.get("cause")))
        return answers[-1][0] == "failed"

    wait_for(answer, "the job has ended")
    for _ in range(3):
        answer()
    ended = [one for one in answers if one[0] not in ("running", None)]
    assert set(ended) == {("failed", "node 1 was lost: it sent nothing to node 0")}, answers
    cli.ok("sim", "fault", "kill", "0")  # the other node gives the same answer
    wait_for(lambda: cli("jobs").stderr.count("is gone") > 0, "node 0 has gone")
    answer()
    assert answers[-1] == ended[0]
