"""The whole product on simulated hosts: their own networks, processes, disks and clocks, and what breaks there."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from typing import Any

import pytest
from harness import CommandLine, cannot, wait_for

from cloudddp.sim import control, ground


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[control.Simulator]:
    if why := ground.obstacle():
        cannot(why)
    home = tmp_path_factory.mktemp("lab")
    yield control.start(home, nodes="namespace", interfaces=("ens5", "enp71s0"))
    control.stop(home)


@pytest.fixture
def cli(lab_cli: CommandLine) -> CommandLine:
    return lab_cli


def nodes(cli: CommandLine) -> list[dict[str, Any]]:
    return list(json.loads(cli.ok("status", "--json"))[0]["nodes"])


def direct(cli: CommandLine, *options: str) -> None:
    """Two nodes, and jobs whose ranks are started without torchrun."""
    cli.write("cloudddp.toml", '[job]\nrendezvous = "direct"\nnproc_per_node = 1\n')
    cli.ok("up", "-n", "2", "-t", "g5.12xlarge", *options)


IDLE = 7  # processes of a node without a job: its machine, init, sshd, who starts it; and what a connection takes
WAIT = "import time\nprint('began', flush=True)\nwhile True: time.sleep(0.05)\n"


def running(cli: CommandLine, script: str = "wait.py") -> Any:
    """A job of one rank on each of two nodes, in the foreground, as a process, once both ranks have begun."""
    process = cli.start("launch", script)
    assert process.stdout is not None
    begun: set[str] = set()
    # The ranks report it themselves: a process count would include the processes that set the job up.
    while len(begun) < 2:
        line = process.stdout.readline()
        assert line, process.communicate()
        begun |= {line} if "began" in line else set()
    return process


def counted(cli: CommandLine) -> list[dict[str, Any]]:
    listed = json.loads(cli.ok("sim", "status", "--json"))["nodes"]
    mine = {node["instance_id"] for node in nodes(cli)}
    return [{**n, "processes": len(n["processes"])} for n in listed if n["instance_id"] in mine]


@pytest.mark.torch
def test_torchrun_trains_across_hosts_whose_interfaces_have_different_names(cli: CommandLine) -> None:
    pytest.importorskip("torch")
    cli.ok("up", "-n", "2", "-t", "g5.12xlarge")
    cli.write(
        "reduce.py",
        "import os, socket, torch, torch.distributed as dist\n"
        "dist.init_process_group('gloo')\n"
        "x = torch.ones(1) * dist.get_rank()\n"
        "dist.all_reduce(x)\n"
        "print(int(x), socket.gethostname(), os.environ['GLOO_SOCKET_IFNAME'], os.environ['NCCL_SOCKET_IFNAME'],"
        " torch.cuda.is_available(), flush=True)\n"
        "dist.barrier()\n"
        "os._exit(0)\n",  # gloo's threads, torn down with the interpreter, now and then abort it
    )
    said = cli.ok("launch", "--nproc-per-node", "2", "reduce.py")
    names = {node["private_ip"]: f"ip-{node['private_ip'].replace('.', '-')}" for node in nodes(cli)}
    for name, interface in zip(sorted(names.values()), interfaces(cli), strict=True):
        assert said.count(f"6 {name} {interface} ={interface} False") == 2, said
    assert set(interfaces(cli)) == {"ens5", "enp71s0"}


def interfaces(cli: CommandLine) -> list[str]:
    """The name of each node's interface, in the order of host names."""
    host, found = {}, {}
    for line in cli.ok(
        "exec", "--", "hostname; ls /sys/class/net"
    ).splitlines():  # the nodes' lines come mixed
        node, word = line.split("] ", 1)
        if word.startswith(("ip-", "en")):
            (host if word.startswith("ip-") else found)[node] = word
    return [found[node] for node in sorted(host, key=host.__getitem__)]


def test_files_go_there_and_results_come_back(cli: CommandLine) -> None:
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


def test_a_machine_that_fails_ends_the_job_and_is_named(cli: CommandLine) -> None:
    direct(cli)
    cli.write("wait.py", WAIT)
    process = running(cli)
    cli.ok("sim", "fault", "kill", nodes(cli)[1]["instance_id"])
    _, err = process.communicate(timeout=240)
    assert process.returncode == 1
    assert "node 1 was lost: nothing has been heard of it for " in err
    assert "node 1: AWS says that i-" in err
    assert "is terminated: Server.InternalError" in err
    assert "status; with the nodes that are left: " in err
    wait_for(
        lambda: [n["processes"] <= IDLE for n in counted(cli)] == [True],
        "nothing of the job on the other node",
    )
    refused = cli("launch", "wait.py")
    assert refused.returncode == 1
    assert "1 of 2 nodes" in refused.stderr
    (job,) = json.loads(cli.ok("jobs", "--json"))
    assert (job["state"], job["exit_code"]) == (
        "failed",
        None,
    )  # what is left was told to stop, and did not fail


def test_a_node_that_falls_silent_is_told_of_before_it_counts_as_lost(cli: CommandLine) -> None:
    direct(cli)
    cli.write("wait.py", WAIT)
    process = running(cli)
    assert process.stderr is not None
    shown = []
    for act, said in (("freeze", "nothing is heard of node 1; trying on"), ("heal", "node 1 is heard again")):
        cli.ok("sim", "fault", act, "1")
        shown.append(act)
        while said not in shown[-1]:
            shown.append(process.stderr.readline())
            assert shown[-1], shown
    cli.ok("cancel")
    process.communicate(timeout=110)
    assert process.returncode == 130


def test_a_lost_node_is_found_also_when_the_other_has_ended_by_itself(cli: CommandLine) -> None:
    direct(cli)
    cli.write(
        "until.py",
        "import os, time\nprint('began', flush=True)\n"
        "while not os.path.exists('enough'): time.sleep(0.05)\nraise SystemExit(3)\n",
    )
    process = running(cli, "until.py")
    cli.ok("sim", "fault", "kill", nodes(cli)[1]["instance_id"])
    cli.ok("exec", "--node", "0", "touch enough")
    _, err = process.communicate(timeout=110)  # it gave up only when contact with all had been lost for long
    assert process.returncode == 1
    assert "node 1 was lost" in err
    assert "agent" not in err


def test_a_spot_node_that_is_taken_back_ends_the_job_and_down_finds_nothing_left(cli: CommandLine) -> None:
    direct(cli, "--spot")
    cli.write("wait.py", WAIT)
    process = running(cli)
    cli.ok("sim", "interrupt", nodes(cli)[0]["instance_id"], "--seconds", "1")
    _, err = process.communicate(timeout=110)
    assert process.returncode == 1
    assert "node 0 was lost" in err
    assert "is terminated: Server.SpotInstanceTermination" in err
    assert "nothing is left" in cli.ok("down")


def test_a_node_without_room_says_so(cli: CommandLine) -> None:
    direct(cli)
    cli.ok("sim", "fault", "fill-disk", nodes(cli)[0]["instance_id"])
    (cli.cwd / "data.bin").write_bytes(os.urandom(1 << 20))
    cli.write("wait.py", WAIT)
    done = cli("launch", "wait.py")
    assert done.returncode == 1
    assert "node 0: " in done.stderr
    assert "0 MiB free, too little for the project" in done.stderr


@pytest.mark.parametrize(("kind", "verbs"), [("freeze", ("jobs", "logs", "cancel")), ("cut", ("jobs",))])
def test_of_a_job_with_a_silent_node_the_others_tell_and_it_is_named(
    cli: CommandLine, kind: str, verbs: tuple[str, ...]
) -> None:
    direct(cli)
    cli.write("wait.py", WAIT)
    cli.ok("launch", "-d", "wait.py")
    wait_for(lambda: cli("logs").stdout.count("began") == 2, "both ranks have begun")
    cli.ok("sim", "fault", kind, "1")
    shown = {"jobs": " running ", "logs": "[rank 0 | node 0] began", "cancel": "ended\n"}
    for verb in verbs:
        done = cli(verb)
        assert done.returncode == 1, (verb, done)
        assert shown[verb] in done.stdout
        assert "rank 1" not in done.stdout
        assert f"node 1 ({nodes(cli)[1]['instance_id']}) at " in done.stderr
        assert "node 1 could not be asked" in done.stderr
        assert "the node itself" in done.stderr
        assert "booting" not in done.stderr
    refused = cli("launch", "wait.py")
    assert refused.returncode == 1
    assert "the node itself" in refused.stderr
    cli.ok("sim", "fault", "heal", "1")
    assert "ended" in cli.ok("cancel")


def test_down_asks_what_is_at_stake_but_waits_for_no_silent_node(cli: CommandLine) -> None:
    direct(cli)
    cli.write("wait.py", "open('model.pt', 'w').write('w')\n" + WAIT)
    job = cli.ok("launch", "-d", "wait.py").strip()
    wait_for(lambda: cli("logs").stdout.count("began") == 2, "both ranks have begun")
    cli.ok("sim", "fault", "freeze", "1")
    done = cli.patient(15, "down")
    assert done.returncode == 0, done.stderr
    assert f"job {job} is running on node 0" in done.stderr
    assert f"not pulled from node 0: model.pt (1 byte) of job {job}" in done.stderr
    assert "node 1 did not answer" in done.stderr
    assert "nothing is left" in done.stdout


def test_a_set_up_that_uses_sudo_is_ended_by_a_cancel(cli: CommandLine) -> None:
    direct(cli)
    cli.write("cloudddp.toml", "[setup]\nrun = [\"sudo sh -c 'sleep 987; true'\"]\n")
    cli.write("wait.py", WAIT)
    process = cli.start("launch", "wait.py")
    sleeping = "pgrep -x sleep -a || true"
    wait_for(lambda: cli.ok("exec", sleeping).count("987") == 2, "the set-up has begun on both nodes")
    assert "its set-up was ended" in cli.ok("cancel")
    process.communicate(timeout=110)
    assert process.returncode == 130
    assert "987" not in cli.ok("exec", sleeping)


def test_a_node_whose_disk_is_full_still_tells_of_its_jobs(cli: CommandLine) -> None:
    direct(cli)
    cli.write("quick.py", "print('seen')\n")
    cli.ok("launch", "quick.py")
    cli.ok("sim", "fault", "fill-disk", "1")
    assert " succeeded " in cli.ok("jobs")
    assert "[rank 1 | node 1] seen" in cli.ok("logs")


def test_a_rank_that_fails_on_a_full_disk_is_the_one_that_is_named(cli: CommandLine) -> None:
    direct(cli)
    cli.write("mark", "")
    cli.write(
        "fill.py",
        "import os, time\nprint('began', flush=True)\n"
        "while os.path.exists('mark') or os.environ['RANK'] == '0': time.sleep(0.05)\nopen('model.pt', 'wb', 0).write(bytes(9))\n",
    )
    process = running(cli, "fill.py")
    cli.ok("sim", "fault", "fill-disk", "1")
    cli.ok("exec", "--node", "1", "rm mark; dd if=/dev/zero of=rest bs=4096 2>&- || true")
    _, err = process.communicate(timeout=110)
    assert process.returncode == 1
    assert "rank 1 on node 1 exited 1 first" in err


def test_what_is_broken_is_shown_until_it_is_healed(cli: CommandLine) -> None:
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


def test_a_node_that_was_frozen_and_boots_again_is_frozen_no_more(
    cli: CommandLine, lab: control.Simulator
) -> None:
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
    ("words", "said"),
    [
        (("fault", "explode", "0"), "faults: kill, cut"),
        (("fault", "cut", "i-nowhere"), "nodes: "),
        (("interrupt", "i-nowhere"), "nodes: "),
        (("conditions", "{"), "no JSON"),
    ],
)
def test_an_unknown_fault_or_node_is_a_usage_error(
    cli: CommandLine, words: tuple[str, ...], said: str
) -> None:
    done = cli("sim", *words)
    assert done.returncode == 2
    assert said in done.stderr


def test_a_kind_that_cannot_be_had_is_refused_and_auto_says_what_is_missing(
    cli: CommandLine, tmp_path: Any
) -> None:
    # A PATH with nothing of what the lab needs; the folders of system programs are looked at all the same.
    asked = cli("sim", "start", "--nodes", "process")
    assert asked.returncode == 1
    assert "runs already, with namespace nodes" in asked.stderr


def test_the_deadline_holds_for_a_node_whose_supervisor_is_dead(
    cli: CommandLine, lab: control.Simulator
) -> None:
    direct(cli)
    cli.write("wait.py", WAIT)
    cli.ok("launch", "-d", "wait.py")
    cli.ok(
        "exec",
        "--",
        'pkill -9 -f "[s]upervise --job"; while pgrep -f "[s]upervise --job"; do sleep 0.05; done',
    )
    ours = {node["instance_id"] for node in nodes(cli)}
    moment = "$(date -u -d '+3 seconds' '+%F %T UTC')"
    timer = "/etc/systemd/system/cloudddp-deadline.timer"
    arm = f'sudo sed -i "s/^OnCalendar=.*/OnCalendar={moment}/" {timer}'
    # a node that took longer than these seconds ends before it has answered
    cli("exec", "--", f"{arm} && sudo systemctl restart cloudddp-deadline.timer")
    wait_for(lambda: not ours & {n["instance_id"] for n in control.nodes(lab)}, "the nodes end")
