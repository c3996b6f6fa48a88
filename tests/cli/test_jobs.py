"""Jobs on simulated nodes: sync, launch, logs, failure, cancel, results. Ranks are plain scripts, without torch."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.harness import TIMEOUT, interrupt, wait_for
from support.terminal import Terminal

ENVIRONMENT = """
import json, os
names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "CLOUDDDP_NODE_RANK",
         "NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME", "GREETING", "CLOUDDDP_JOB_ID")
print("ENV " + json.dumps({name: os.environ.get(name) for name in names}))
"""

SLEEPERS = """
import os, sys, time
rank = int(os.environ["RANK"])
print(f"rank {rank} began", flush=True)
while not os.path.exists("go"):
    time.sleep(0.05)
if rank == 3:
    print("about to fail", flush=True)
    sys.exit(7)
time.sleep(600)
"""


def up_without_torchrun(cli: Any, *, nodes: int = 2, ranks: int | str = 2) -> None:
    """Start nodes, and configure jobs to run without torchrun."""
    cli.env.update(CLOUDDDP_RENDEZVOUS="direct", CLOUDDDP_NPROC_PER_NODE=str(ranks), CLOUDDDP_STOP_GRACE="1")
    cli.nodes(nodes, "g5.12xlarge")


def lines_by_rank(text: str) -> dict[int, list[str]]:
    """Return the lines of each rank from merged logs."""
    logs: dict[int, list[str]] = {}
    for line in text.splitlines():
        if found := re.match(r"\[rank (\d+) \| node (\d+)\] (.*)", line):
            logs.setdefault(int(found.group(1)), []).append(found.group(3))
    return logs


def processes(cli: Any) -> int:
    """Return how many processes run on the cluster's nodes, as the simulator counts them."""
    ids = {
        n["instance_id"]
        for c in json.loads(cli.ok("ls", "--json"))
        if c["cluster"] == cli.cluster
        for n in c["nodes"]
    }
    shown = json.loads(cli.ok("sim", "status", "--json"))["nodes"]
    return sum(len(node["processes"]) for node in shown if node["instance_id"] in ids)


def still_running(cli: Any, word: str) -> list[str]:
    """Return the command lines on the cluster's nodes that contain a word, of ranks or of setup commands."""
    ids = {node["instance_id"] for node in json.loads(cli.ok("status", "--json"))[0]["nodes"]}
    nodes = [n for n in json.loads(cli.ok("sim", "status", "--json"))["nodes"] if n["instance_id"] in ids]
    lines = []
    for pid in (pid for node in nodes for pid in node["processes"]):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            lines.append(Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode())
    return [line for line in lines if word in line]


def test_ranks_get_their_environment(cli: Any) -> None:
    up_without_torchrun(cli, ranks="2,1")
    cli.write("show.py", ENVIRONMENT)
    out = cli.ok("launch", "--env", "GREETING=two words; $HOME", "show.py")
    env = {rank: json.loads(lines[0].removeprefix("ENV ")) for rank, lines in lines_by_rank(out).items()}
    assert sorted(env) == [0, 1, 2]
    assert [env[r]["LOCAL_RANK"] for r in (0, 1, 2)] == ["0", "1", "0"]
    assert [env[r]["CLOUDDDP_NODE_RANK"] for r in (0, 1, 2)] == ["0", "0", "1"]
    assert {e["WORLD_SIZE"] for e in env.values()} == {"3"}
    assert [env[r]["LOCAL_WORLD_SIZE"] for r in (0, 1, 2)] == ["2", "2", "1"]
    assert len({(e["MASTER_ADDR"], e["MASTER_PORT"]) for e in env.values()}) == 1
    assert {e["NCCL_SOCKET_IFNAME"] for e in env.values()} == {"=lo"}
    assert {e["GLOO_SOCKET_IFNAME"] for e in env.values()} == {"lo"}
    assert {e["GREETING"] for e in env.values()} == {"two words; $HOME"}


def test_arguments_reach_the_script_unchanged(cli: Any) -> None:
    up_without_torchrun(cli, nodes=1, ranks=1)
    cli.write("args.py", "import sys, json; print(json.dumps(sys.argv[1:]))")
    words = ["--flag", "two words", "$HOME", "'quoted'", "a;b", "--", "-x", "ünï", "*", ""]
    logs = lines_by_rank(cli.ok("launch", "args.py", *words))
    assert json.loads(logs[0][0]) == words


def test_rank_and_local_rank_can_be_positional(cli: Any) -> None:
    up_without_torchrun(cli, nodes=2, ranks=2)
    cli.write("cloudddp.toml", "[job]\npositional_ranks = true\n")
    cli.write("main.py", "import sys; print(sys.argv[1:])")
    logs = lines_by_rank(cli.ok("launch", "main.py", "x"))
    assert logs == {
        0: ["['x', '0', '0']"], 1: ["['x', '1', '1']"], 2: ["['x', '2', '0']"], 3: ["['x', '3', '1']"],
    }  # fmt: skip


def test_no_line_is_lost_at_the_end(cli: Any) -> None:
    up_without_torchrun(cli, nodes=2, ranks=2)
    cli.write(
        "flood.py",
        "for i in range(20000): print(i)\nimport sys; sys.stdout.write('the end'); sys.stdout.flush()",
    )
    logs = lines_by_rank(cli.ok("launch", "flood.py"))
    expected = [str(i) for i in range(20000)] + ["the end"]
    assert sorted(logs) == [0, 1, 2, 3]
    for lines in logs.values():
        assert lines == expected


def test_first_failing_rank_is_named_and_sets_the_exit_code(cli: Any) -> None:
    up_without_torchrun(cli)
    cli.write("fail.py", SLEEPERS)
    cli.write("go", "")
    done = cli("launch", "fail.py")
    assert done.returncode == 7
    assert "rank 3 on node 1 exited with code 7 first" in done.stderr
    assert "about to fail" in done.stderr  # its last lines are shown again
    wait_for(lambda: processes(cli) == 0, "the other ranks are stopped")
    (job,) = json.loads(cli.ok("jobs", "--json"))
    assert (job["state"], job["exit_code"]) == ("failed", 7)


def test_signal_that_killed_a_rank_is_named(cli: Any) -> None:
    up_without_torchrun(cli, nodes=1, ranks=2)
    cli.write(
        "die.py", "import os, time\nif os.environ['RANK'] == '1': os.kill(os.getpid(), 9)\ntime.sleep(600)"
    )
    done = cli("launch", "die.py")
    assert done.returncode == 137
    assert "rank 1 on node 0 was killed by SIGKILL first" in done.stderr


def test_missing_python_is_reported(cli: Any) -> None:
    up_without_torchrun(cli, nodes=1, ranks=1)
    cli.write("ok.py", "")
    done = cli("launch", "ok.py", CLOUDDDP_PYTHON="/nowhere/python")
    assert done.returncode == 1
    assert "no /nowhere/python" in done.stderr


def test_detached_job_is_followed_and_cancelled_from_other_processes(cli: Any) -> None:
    up_without_torchrun(cli)
    cli.write("wait.py", SLEEPERS)
    job = cli.ok("launch", "-d", "wait.py").strip()
    assert re.fullmatch(r"\d{8}-\d{6}-[0-9a-f]{4}", job)
    wait_for(lambda: len(lines_by_rank(cli.ok("logs"))) == 4, "all ranks have written a line")
    (shown,) = json.loads(cli.ok("jobs", "--json"))
    assert (shown["id"], shown["state"], shown["nodes"]) == (job, "running", [0, 1])
    busy = cli("launch", "wait.py")
    assert busy.returncode == 1
    assert f"job {job} is still running" in busy.stderr
    follower = cli.start("logs", "-f", job)
    assert "4 ranks stopped" in cli.ok("cancel", job)
    follower.communicate(timeout=TIMEOUT)
    assert follower.returncode == 130
    assert still_running(cli, "wait.py") == []
    wait_for(lambda: processes(cli) == 0, "the supervisors end")
    assert "had already ended" in cli.ok("cancel", job)
    assert len(json.loads(cli.ok("status", "--json"))[0]["nodes"]) == 2  # the cluster stays


def test_logs_can_be_limited_to_a_rank(cli: Any) -> None:
    up_without_torchrun(cli, nodes=2, ranks=1)
    cli.write("hi.py", "print('hi')")
    cli.ok("launch", "hi.py")
    assert sorted(lines_by_rank(cli.ok("logs", "--rank", "1"))) == [1]
    assert sorted(lines_by_rank(cli.ok("logs", "-f"))) == [0, 1]
    for words in (("--rank", "9"), ("-f", "--rank", "0", "--rank", "2")):
        done = cli("logs", *words)
        assert done.returncode == 2
        assert f"has no rank {words[-1]}" in done.stderr
        assert "its ranks are 0 to 1" in done.stderr


def test_job_that_failed_before_its_cancel_stays_failed(cli: Any) -> None:
    """The job is not followed, so the rank on the other node runs until the cancel."""
    up_without_torchrun(cli, nodes=2, ranks=1)
    cli.write(
        "half.py",
        "import os, sys, time\nif os.environ['RANK'] == '1': sys.exit(9)\nprint('on', flush=True)\ntime.sleep(600)",
    )
    cli.ok("launch", "-d", "half.py")
    wait_for(lambda: "ls-ranks-done" in cli.ok("exec", "--node", "1", ENDED), "rank 1 has ended")
    wait_for(lambda: lines_by_rank(cli.ok("logs")).get(0) == ["on"], "rank 0 has begun")
    assert "1 rank stopped" in cli.ok("cancel")
    (job,) = json.loads(cli.ok("jobs", "--json"))
    assert (job["state"], job["exit_code"]) == ("failed", 9)
    done = cli("logs", "-f")
    assert (done.returncode, "rank 1 on node 1 exited with code 9 first" in done.stderr) == (9, True)


ENDED = "grep -l '\"exit_code\": 9' ~/.cloudddp/jobs/*/ranks/1.json && echo ls-ranks-done; true"


def test_ctrl_c_cancels_the_job_and_keeps_the_cluster(cli: Any) -> None:
    up_without_torchrun(cli)
    cli.write("wait.py", SLEEPERS)
    process = cli.start("launch", "wait.py")
    begun = [process.stdout.readline() for _ in range(4)]  # a line of each rank
    assert all(begun), process.communicate()
    assert len(still_running(cli, "wait.py")) >= 4
    code, _, err = interrupt(process)
    assert code == 130, err
    assert "the cluster is still up" in err
    assert still_running(cli, "wait.py") == []
    wait_for(lambda: processes(cli) == 0, "the supervisors end")
    assert len(json.loads(cli.ok("status", "--json"))[0]["nodes"]) == 2


def interrupted_at(cli: Any, moment: str, *words: str) -> subprocess.CompletedProcess[str]:
    """Run a command that gets Ctrl-C at an exact moment: as the named function returns."""
    owner, _, name = moment.rpartition(".")
    code = (
        "import os, signal\n"
        "from cloudddp import __main__\nfrom cloudddp.cli import progress\nfrom cloudddp.cli.actions import follow\n"
        "from cloudddp.job import launch\nfrom cloudddp.job.follow import follower\n"
        f"real = {moment}\n"
        "def then_interrupted(*args, **kwargs):\n"
        "    real(*args, **kwargs)\n"
        "    os.kill(os.getpid(), signal.SIGINT)\n"
        f"setattr({owner}, {name!r}, then_interrupted)\n"
        "__main__.main()\n"
    )
    return subprocess.run(
        [sys.executable, "-c", code, *words],
        cwd=cli.cwd, env=cli.env, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=100,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )  # fmt: skip


@pytest.mark.parametrize(
    "moment", ["launch.launch", "follower.JobFollower.__init__", "progress.Progress.stop"]
)
def test_ctrl_c_right_after_the_start_stops_the_job(cli: Any, moment: str) -> None:
    up_without_torchrun(cli)
    cli.write("wait.py", SLEEPERS)
    done = interrupted_at(cli, moment, "launch", "wait.py")
    assert done.returncode == 130, done.stderr
    assert "it was ended; the cluster is still up" in done.stderr
    assert still_running(cli, "wait.py") == []
    wait_for(lambda: processes(cli) == 0, "the supervisors end")


def test_ctrl_c_while_the_end_is_reported_does_not_report_a_start(cli: Any) -> None:
    up_without_torchrun(cli, nodes=1, ranks=1)
    cli.write("ok.py", "print('ran')")
    done = interrupted_at(cli, "follow._report_outcome", "launch", "ok.py")
    assert done.returncode == 130, done.stderr
    assert "finished: 1 rank" in done.stderr
    assert "being started" not in done.stderr
    assert "it was ended" not in done.stderr


def test_ctrl_c_on_a_terminal_asks_first(cli: Any) -> None:
    up_without_torchrun(cli, nodes=1, ranks=1)
    cli.write(
        "wait.py",
        "import time, os\nprint('began', flush=True)\nwhile not os.path.exists('go'): time.sleep(0.05)\nprint('continued', flush=True)",
    )
    window = Terminal(cli, "launch", "wait.py", term="dumb")
    try:
        window.read_until(b"began")
        window.process.send_signal(signal.SIGINT)
        window.read_until(b"Cancel the job on every node?")
        os.write(window.ours, b"n\n")
        cli.ok("exec", "--node", "0", "--", "touch", "go")
        window.read_until(b"continued")
        assert window.process.wait(TIMEOUT) == 0
    finally:
        window.close()


def test_setup_commands_run_once_per_content(cli: Any) -> None:
    up_without_torchrun(cli, nodes=1, ranks=1)
    cli.write("cloudddp.toml", '[setup]\nrun = ["date +%s%N >> ../setup"]\ninputs = ["needs.txt"]\n')
    cli.write("needs.txt", "a")
    cli.write("count.py", "print(len(open('../setup').readlines()))")
    assert lines_by_rank(cli.ok("launch", "count.py"))[0] == ["1"]
    assert lines_by_rank(cli.ok("launch", "count.py"))[0] == ["1"]
    cli.write("needs.txt", "b")
    assert lines_by_rank(cli.ok("launch", "count.py"))[0] == ["2"]


def test_output_of_a_failed_setup_command_is_shown(cli: Any) -> None:
    up_without_torchrun(cli, nodes=1, ranks=1)
    cli.write("cloudddp.toml", '[setup]\nrun = ["echo the cause; exit 9"]\n')
    cli.write("ok.py", "print('not reached')")
    done = cli("launch", "ok.py")
    assert done.returncode == 1
    assert "exited with code 9" in done.stderr
    assert "the cause" in done.stderr
    assert "not reached" not in done.stdout


WAITING = '[setup]\nrun = ["touch ../began; trap \\"\\" TERM; while [ ! -e ../go ]; do sleep 0.1; done"]\n'


def launch_in_setup(cli: Any) -> Any:
    """Start a launch, and return its process once setup commands run on both nodes."""
    up_without_torchrun(cli, nodes=2, ranks=1)
    cli.write("cloudddp.toml", WAITING)
    cli.write("ok.py", "print('ran')")
    process = cli.start("launch", "ok.py")
    wait_for(lambda: cli.ok("exec", "ls ..").count("began") == 2, "the setup runs on both nodes")
    return process


@pytest.mark.parametrize("how", ["interrupt", "cancel"])
def test_interrupted_setup_stops_on_every_node(cli: Any, how: str) -> None:
    process = launch_in_setup(cli)
    assert len(still_running(cli, "../began")) >= 2
    (job,) = json.loads(cli.ok("jobs", "--json"))
    assert job["state"] == "setup"
    if how == "interrupt":
        code, _, err = interrupt(process)
        assert "it was ended; the cluster is still up" in err
    else:
        assert cli.ok("cancel") == f"job {job['id']}: its setup was stopped\n"
        err = process.communicate(timeout=TIMEOUT)[1]
        code = process.returncode
        assert f"job {job['id']} was cancelled during its setup" in err
    assert code == 130
    assert still_running(cli, "../began") == []
    wait_for(lambda: processes(cli) == 0, "the setup's parent ends")
    assert json.loads(cli.ok("jobs", "--json")) == []
    cli.ok("exec", "touch ../go")
    assert cli.ok("launch", "ok.py").count("] ran") == 2


def test_launch_and_logs_are_refused_during_setup(cli: Any) -> None:
    process = launch_in_setup(cli)
    busy = cli("launch", "ok.py")
    assert busy.returncode == 1
    assert "is still running on node" in busy.stderr
    silent = cli("logs")
    assert silent.returncode == 1
    assert "still in its setup" in silent.stderr
    cli.ok("exec", "touch ../go")
    assert process.communicate(timeout=TIMEOUT)[0].count("] ran") == 2
    assert process.returncode == 0


def test_pulled_results_are_not_sent_back(cli: Any) -> None:
    up_without_torchrun(cli, nodes=2, ranks=1)
    cli.write(
        "write.py",
        "import os, pathlib\nif os.environ['RANK'] == '0':\n p = pathlib.Path('runs/a b'); p.mkdir(parents=True); (p / 'x').write_bytes(bytes(range(256)) * 1000)\n",
    )
    cli.ok("launch", "write.py")
    out = cli.ok("pull")
    assert "node 0: 1 file," in out
    (job,) = (cli.cwd / "results").iterdir()
    assert (job / "runs" / "a b" / "x").read_bytes() == bytes(range(256)) * 1000
    again = cli("sync")
    assert "up to date" in again.stderr
    cli.ok("pull", "--all-nodes", "--to", "out", "write.py")
    assert (cli.cwd / "out" / "node1" / "write.py").read_text() == (cli.cwd / "write.py").read_text()


def test_pull_works_without_tarfile_filters(cli: Any) -> None:
    """Debian 12's own is 3.11.2; extraction filters came with 3.11.4."""
    up_without_torchrun(cli, nodes=1, ranks=1)
    cli.write(
        "make.py",
        "import os\nos.makedirs('runs')\nopen('runs/a', 'w').close()\nos.symlink('/etc', 'runs/out')\n",
    )
    cli.ok("launch", "make.py")
    code = (
        "import sys, tarfile\n"
        "tarfile._NAMED_FILTERS = {}\n"
        "for name in ('FilterError', 'data_filter'): vars(tarfile).pop(name, None)\n"
        "from cloudddp import __main__\n"
        "sys.argv = ['cloudddp', 'pull']\n"
        "__main__.main()\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=cli.cwd,
        env=cli.env,
        capture_output=True,
        text=True,
        timeout=TIMEOUT,
    )
    assert done.returncode == 0, done.stderr
    assert "left out" in done.stderr
    (brought,) = (cli.cwd / "results").rglob("runs/*")
    assert brought.name == "a"


def test_pull_refuses_paths_outside_the_project(cli: Any) -> None:
    up_without_torchrun(cli, nodes=1, ranks=1)
    cli.write("ok.py", "")
    cli.ok("launch", "ok.py")
    assert cli("pull", "../.cloudddp").returncode == 2
    assert cli("pull", "/etc/passwd").returncode == 2


def test_sync_sends_changes_and_deletes(cli: Any) -> None:
    up_without_torchrun(cli, nodes=2, ranks=1)
    cli.write("one.py", "print(1)")
    cli.write("sub/two words.py", "print(2)")
    cli.ok("sync")
    (cli.cwd / "one.py").unlink()
    cli.write("three.py", "print(3)")
    cli.ok("sync")
    listed = cli.ok("exec", "find . -type f | sort")
    assert Counter(line.split("] ")[1] for line in listed.splitlines()) == {
        "./sub/two words.py": 2,
        "./three.py": 2,
    }


def test_unchanged_sync_takes_one_round_trip(cli: Any, simulator: Any, monkeypatch: Any) -> None:
    """Each command on the connection is a round trip."""
    from cloudddp.aws.client import AWS
    from cloudddp.cluster import connect, inspect
    from cloudddp.config.spec import ClusterSpec, Config
    from cloudddp.job import sync
    from cloudddp.ssh.connection import Result
    from cloudddp.ssh.fleet import Fleet

    for k in range(2000):
        cli.write(f"d{k % 40}/f{k}.py", f"x = {k}\n")
    cli.ok("up", "-n", "1")
    for name, value in cli.env.items():
        monkeypatch.setenv(name, value)
    commands: list[str] = []

    class Counting(Fleet):
        def run(self, node: int, command: str, **rest: Any) -> Result:
            commands.append(command)
            return super().run(node, command, **rest)

    spec = ClusterSpec(name=cli.cluster, ssh_port=simulator.ssh_port)
    found = inspect.get(AWS(region=simulator.region), cli.cluster)
    with Counting(connect.targets(found, spec)) as fleet:
        fleet.connect()
        progress: Callable[[str], None] = lambda _: None  # noqa: E731
        sync.sync(fleet, found, Config(cluster=spec), root=cli.cwd, progress=progress)
        assert len(commands) == 2
        commands.clear()
        sync.sync(fleet, found, Config(cluster=spec), root=cli.cwd, progress=progress)
        assert len(commands) == 1


def test_exec_runs_on_all_nodes_and_returns_the_highest_code(cli: Any) -> None:
    up_without_torchrun(cli, nodes=2, ranks=1)
    done = cli("exec", "--", "sh", "-c", "echo $0 here; exit $CODE", "two words")
    assert done.returncode == 0
    assert sorted(done.stdout.splitlines()) == ["[node 0] two words here", "[node 1] two words here"]
    assert cli("exec", "--node", "1", "exit 4").returncode == 4
    assert cli("exec", "--node", "2", "true").returncode == 1


def test_launch_without_a_cluster_suggests_up(cli: Any) -> None:
    cli.write("ok.py", "")
    done = cli("launch", "ok.py")
    assert done.returncode == 1
    assert f"there is no cluster '{cli.cluster}'" in done.stderr
    assert "up" in done.stderr


def test_run_removes_the_cluster_and_returns_the_job_exit_code(cli: Any, remains: Any) -> None:
    cli.env.update(CLOUDDDP_RENDEZVOUS="direct", CLOUDDDP_STOP_GRACE="1")
    cli.write(
        "seven.py",
        "import pathlib, sys\npathlib.Path('runs').mkdir(exist_ok=True)\npathlib.Path('runs/made').write_text('x')\nsys.exit(7)",
    )
    done = cli("run", "-n", "2", "--nproc-per-node", "1", "seven.py")
    assert done.returncode == 7, done.stderr
    assert remains().nothing
    assert [path.read_text() for path in cli.cwd.glob("results/*/runs/made")] == ["x"]


def test_interrupted_run_removes_the_cluster(cli: Any, remains: Any) -> None:
    cli.env.update(CLOUDDDP_RENDEZVOUS="direct", CLOUDDDP_STOP_GRACE="1")
    cli.write("wait.py", "import time; print('began', flush=True); time.sleep(600)")
    process = cli.start("run", "-n", "1", "--nproc-per-node", "1", "wait.py")
    assert process.stdout is not None
    assert "began" in process.stdout.readline()
    code, _, err = interrupt(process)
    assert code == 130, err
    assert remains().nothing


def test_node_that_dies_stops_the_job_and_is_named(cli: Any, ec2: Any) -> None:
    up_without_torchrun(cli, nodes=2, ranks=1)
    cli.write("wait.py", "import time; print('began', flush=True); time.sleep(600)")
    process = cli.start("launch", "wait.py", CLOUDDDP_TIME_SCALE="0.2")
    assert process.stdout is not None
    for _ in range(2):
        assert "began" in process.stdout.readline()
    (cluster,) = json.loads(cli.ok("status", "--json"))
    ec2.terminate_instances(InstanceIds=[cluster["nodes"][1]["instance_id"]])
    _, err = process.communicate(timeout=TIMEOUT)
    assert process.returncode == 1
    assert "node 1 was lost" in err


@pytest.mark.torch
@pytest.mark.parametrize("rendezvous", ["c10d", "static"])
def test_torchrun_across_nodes_trains_and_names_the_failing_rank(cli: Any, rendezvous: str) -> None:
    pytest.importorskip("torch")
    cli.ok("up", "-n", "2", "-t", "g5.12xlarge")
    cli.write(
        "reduce.py",
        "import os, torch, torch.distributed as dist\n"
        "dist.init_process_group('gloo')\n"
        "x = torch.ones(1) * dist.get_rank()\n"
        "dist.all_reduce(x)\n"
        "print('sum', int(x), 'of', dist.get_world_size(), flush=True)\n"
        "dist.barrier()\n"
        # os._exit: gloo's threads, torn down with the interpreter, now and then abort it (signal 6)
        "if os.environ.get('FAIL') and dist.get_rank() == 2: os._exit(7)\n"
        "dist.barrier()\n"
        "dist.destroy_process_group()\n"
        "os._exit(0)\n",
    )
    good = cli("launch", "--rendezvous", rendezvous, "--nproc-per-node", "2", "reduce.py")
    assert good.returncode == 0, good.stderr
    assert lines_by_rank(good.stdout) == {rank: ["sum 6 of 4"] for rank in range(4)}
    bad = cli("launch", "--rendezvous", rendezvous, "--nproc-per-node", "2", "--env", "FAIL=1", "reduce.py")
    assert bad.returncode == 7, bad.stderr
    # With c10d torch numbers the ranks by the nodes' addresses: which node has rank 2 is known from the first job.
    (node,) = set(re.findall(r"\[rank 2 \| node ([01])\]", good.stdout))
    assert f"rank 2 on node {node} exited with code 7 first" in bad.stderr
    wait_for(lambda: processes(cli) == 0, "every process is stopped")


def test_started_ranks_are_stopped_when_another_node_cannot_start(cli: Any) -> None:
    """On node 1 a file is where the agent needs a folder; the ranks that node 0 has started must be stopped."""
    up_without_torchrun(cli, nodes=2, ranks=1)
    cli.write("wait.py", "import time; time.sleep(600)")
    cli.ok("exec", "--node", "1", "mkdir -p ~/.cloudddp && touch ~/.cloudddp/jobs")
    done = cli("launch", "wait.py")
    assert done.returncode == 1
    assert "node 1" in done.stderr
    wait_for(lambda: processes(cli) == 0, "node 0 ends its ranks")


def test_logs_and_jobs_show_the_same_duration(cli: Any) -> None:
    up_without_torchrun(cli)
    cli.write("done.py", "import time; time.sleep(1)")
    job = cli.ok("launch", "-d", "done.py").strip()
    (record,) = wait_for(
        lambda: [r for r in json.loads(cli.ok("jobs", "--json")) if r["ended"]], "the job has ended"
    )
    assert record["id"] == job
    time.sleep(2)  # must not be counted
    shown = next(line for line in cli.ok("jobs").splitlines() if job in line)
    messages = cli("logs", "-f").stderr
    assert f"job {job} finished: 4 ranks, {re.split('  +', shown)[3]}\n" in messages


def test_failed_job_leaves_the_cluster_up(cli: Any) -> None:
    up_without_torchrun(cli)
    cli.write("fail.py", "raise SystemExit(7)")
    done = cli("launch", "fail.py")
    assert done.returncode == 7
    assert "the cluster is still up; `cloudddp down` stops the bill" in done.stderr
