"""`launch`: what ranks get, which rank failed first, and what is refused. Ranks are plain scripts unless a
test says torch."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from support.harness import TIMEOUT, wait_for
from support.jobs import SLEEPERS, direct, lines_by_rank, processes

ENVIRONMENT = """
import json, os
names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "CLOUDDDP_NODE_RANK",
         "NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME", "GREETING", "CLOUDDDP_JOB_ID")
print("ENV " + json.dumps({name: os.environ.get(name) for name in names}))
"""  # noqa: E501


def test_ranks_get_their_environment(cli: Any) -> None:
    direct(cli, nodes=2, ranks="2,1")
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


@pytest.mark.parametrize("rendezvous", ["c10d", "direct"])
def test_shell_script_gets_the_variables_that_programs_read(cli: Any, rendezvous: str) -> None:
    direct(cli, nodes=2)
    cli.env["CLOUDDDP_RENDEZVOUS"] = rendezvous
    cli.write("train.sh", 'echo "node $NODE_RANK of $NNODES, rank $RANK of $WORLD_SIZE, $GROUP_RANK"\n')
    logs = lines_by_rank(cli.ok("launch", "train.sh"))
    assert sorted(logs[0] + logs[1]) == [f"node {node} of 2, rank {node} of 2, {node}" for node in range(2)]


def test_arguments_reach_the_script_unchanged(cli: Any) -> None:
    direct(cli)
    cli.write("args.py", "import sys, json; print(json.dumps(sys.argv[1:]))")
    words = ["--flag", "two words", "$HOME", "'quoted'", "a;b", "--", "-x", "ünï", "*", ""]
    logs = lines_by_rank(cli.ok("launch", "args.py", *words))
    assert json.loads(logs[0][0]) == words


def test_rank_and_local_rank_can_be_positional(cli: Any) -> None:
    direct(cli, nodes=2, ranks=2)
    cli.write("cloudddp.toml", "[job]\npositional_ranks = true\n")
    cli.write("main.py", "import sys; print(sys.argv[1:])")
    logs = lines_by_rank(cli.ok("launch", "main.py", "x"))
    assert logs == {
        0: ["['x', '0', '0']"],
        1: ["['x', '1', '1']"],
        2: ["['x', '2', '0']"],
        3: ["['x', '3', '1']"],
    }


def test_words_after_double_dash_are_script_arguments(cli: Any) -> None:
    direct(cli)
    cli.write("args.py", "import sys; print(sys.argv[1:])")
    assert "['--dry-run']" in cli.ok("launch", "--", "args.py", "--dry-run")


@pytest.mark.parametrize("option", ["--sim", "--dry-run", "--detach"])
def test_option_after_the_script_is_refused(cli: Any, faults: Any, option: str) -> None:
    cli.write("train.py", "")
    done = cli("launch", "train.py", option)
    assert done.returncode == 2
    assert "put it before train.py" in done.stderr
    assert faults.calls == []


@pytest.mark.parametrize("form", ["./sub/train.py", "{cwd}/sub/train.py", "sub/../sub/train.py"])
def test_script_may_be_named_by_any_path(cli: Any, form: str) -> None:
    direct(cli)
    cli.write("sub/train.py", "print('ran')")
    assert "ran" in cli.ok("launch", form.format(cwd=cli.cwd))


def test_config_path_with_dots_or_links_works(cli: Any) -> None:
    direct(cli)
    cli.write("cloudddp.toml", "")
    cli.write("sub/train.py", "print('ran')")
    (cli.cwd / "link").symlink_to(cli.cwd / "sub")
    root, cli.cwd = cli.cwd, cli.cwd / "sub"
    assert "ran" in cli.ok("launch", "--config", "../cloudddp.toml", "train.py")
    cli.cwd = root
    assert "ran" in cli.ok("launch", "--config", "sub/../cloudddp.toml", "sub/train.py")


def test_missing_python_is_reported(cli: Any) -> None:
    direct(cli)
    cli.write("ok.py", "")
    done = cli("launch", "ok.py", CLOUDDDP_PYTHON="/nowhere/python")
    assert done.returncode == 1
    assert "no /nowhere/python" in done.stderr


def test_first_failing_rank_is_named_and_sets_the_exit_code(cli: Any) -> None:
    direct(cli, nodes=2, ranks=2)
    cli.write("fail.py", SLEEPERS)
    cli.write("go", "")
    done = cli("launch", "fail.py")
    assert done.returncode == 7
    assert "failed: rank 3 on node 1 exited with code 7\n" in done.stderr
    assert "about to fail" in done.stderr  # its last lines are shown again
    wait_for(lambda: processes(cli) == 0, "the other ranks are stopped")
    (job,) = json.loads(cli.ok("jobs", "--json"))
    assert (job["state"], job["exit_code"]) == ("failed", 7)


def test_signal_that_killed_a_rank_is_named(cli: Any) -> None:
    direct(cli, ranks=2)
    cli.write(
        "die.py", "import os, time\nif os.environ['RANK'] == '1': os.kill(os.getpid(), 9)\ntime.sleep(600)"
    )
    done = cli("launch", "die.py")
    assert done.returncode == 137
    assert "failed: rank 1 on node 0 was killed by SIGKILL\n" in done.stderr


def test_failed_job_leaves_the_cluster_up(cli: Any) -> None:
    direct(cli, nodes=2, ranks=2)
    cli.write("fail.py", "raise SystemExit(7)")
    done = cli("launch", "fail.py")
    assert done.returncode == 7
    assert re.search(
        r"the cluster is still up; `cloudddp pull --job \S+` copies logs, verdict and stacks, `cloudddp "
        r"down` stops",
        done.stderr,
    )


def test_node_that_dies_stops_the_job_and_is_named(cli: Any, ec2: Any) -> None:
    direct(cli, nodes=2)
    cli.write("wait.py", "import time; print('began', flush=True); time.sleep(600)")
    process = cli.start("launch", "wait.py", CLOUDDDP_TIME_SCALE="0.2")
    assert process.stdout is not None
    for _ in range(2):
        assert "began" in process.stdout.readline()
    (cluster,) = json.loads(cli.ok("status", "--json"))
    ec2.terminate_instances(InstanceIds=[cluster["nodes"][1]["instance_id"]])
    _, err = process.communicate(timeout=TIMEOUT)
    assert process.returncode == 1
    assert "node 1: the agent of cloudddp has ended there" in err
    assert "AWS reports" in err
    assert "may still run" not in err


def test_missing_module_of_a_rank_names_the_setup(cli: Any) -> None:
    direct(cli)
    cli.write("requirements.txt", "")
    cli.write("needs.py", "import not_installed_anywhere\n")
    done = cli("launch", "needs.py")
    assert done.returncode == 1
    assert 'run = ["pip install -r requirements.txt"]' in " ".join(done.stderr.split())


@pytest.mark.torch
@pytest.mark.parametrize("rendezvous", ["c10d", "direct"])
def test_shell_script_runs_once_per_rank(cli: Any, rendezvous: str) -> None:
    pytest.importorskip("torch")
    cli.nodes(1)
    cli.write("run.sh", 'echo "$RANK of $WORLD_SIZE at ${MASTER_ADDR:+an address}, $1 $2"; exit 4\n')
    done = cli("launch", "--rendezvous", rendezvous, "--nproc-per-node", "2", "run.sh", "a b", "$LOCAL_RANK")
    expected = {rank: [f"{rank} of 2 at an address, a b $LOCAL_RANK"] for rank in range(2)}
    assert lines_by_rank(done.stdout).items() <= expected.items()
    assert lines_by_rank(done.stdout)
    assert done.returncode == 4


@pytest.mark.torch
def test_modules_of_the_project_do_not_replace_those_of_the_launcher(cli: Any) -> None:
    pytest.importorskip("torch")
    cli.nodes(1)
    for name in ("queue.py", "typing.py", "sitecustomize.py", "torch/__init__.py", "random.py"):
        cli.write(name, "raise SystemExit('the project replaces ' + __file__)\n")
    cli.write("pkg/__init__.py", "")
    cli.write(
        "pkg/t.py", "import sys, os\nprint(os.path.basename(sys.path[0]), os.path.basename(os.getcwd()))\n"
    )
    script = cli("launch", "--nproc-per-node", "1", "pkg/t.py")
    assert "] pkg project" in script.stdout, script.stderr
    # As plain `python -m`: the project comes first.
    module = cli("launch", "--nproc-per-node", "1", "-m", "pkg.t")
    assert "the project replaces" in module.stdout or "] project project" in module.stdout, module.stderr
    assert "the launcher" not in module.stderr


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
    # With c10d torch numbers the ranks by the nodes' addresses: which node has rank 2 is known from the first
    # job.
    (node,) = set(re.findall(r"\[rank 2 \| node ([01])\]", good.stdout))
    assert f"failed: rank 2 on node {node} exited with code 7\n" in bad.stderr
    wait_for(lambda: processes(cli) == 0, "every process is stopped")


def test_started_ranks_are_stopped_when_another_node_cannot_start(cli: Any) -> None:
    """On node 1 a file is where the agent needs a folder; the ranks that node 0 has started must be
    stopped."""
    direct(cli, nodes=2)
    cli.write("wait.py", "import time; time.sleep(600)")
    cli.ok("exec", "--node", "1", "mkdir -p ~/.cloudddp && touch ~/.cloudddp/jobs")
    done = cli("launch", "wait.py")
    assert done.returncode == 1
    assert "node 1" in done.stderr
    wait_for(lambda: processes(cli) == 0, "node 0 ends its ranks")


def test_launch_without_a_cluster_suggests_up(cli: Any) -> None:
    cli.write("ok.py", "")
    done = cli("launch", "ok.py")
    assert done.returncode == 1
    assert f"there is no cluster '{cli.cluster}'" in done.stderr
    assert "up" in done.stderr


def test_launch_is_refused_when_a_node_is_gone(cli: Any, ec2: Any) -> None:
    direct(cli, nodes=2)
    cli.write("ok.py", "")
    (cluster,) = json.loads(cli.ok("status", "--json"))
    ec2.terminate_instances(InstanceIds=[cluster["nodes"][0]["instance_id"]])
    wait_for(lambda: len(json.loads(cli.ok("status", "--json"))[0]["nodes"]) == 1, "the node is gone")
    done = cli("launch", "ok.py")
    assert done.returncode == 1
    assert "1 of 2 nodes" in done.stderr


@pytest.mark.parametrize(
    ("count", "message"),
    [("2", "1 GPU, fewer than the 2 ranks"), ("1,1", "lists 2 nodes, the cluster has 1")],
)
def test_ranks_that_do_not_fit_are_refused_before_the_sync(cli: Any, count: str, message: str) -> None:
    cli.ok("up", "-n", "1", "-t", "g5.xlarge")
    assert "GPU 0: " in cli.ok("exec", "nvidia-smi -L")
    cli.write("cloudddp.toml", '[setup]\nrun = ["touch ../set-up"]\n')
    cli.write("train.py", "")
    done = cli("launch", "--nproc-per-node", count, "train.py")
    assert done.returncode == 2, done.stderr
    assert message in done.stderr
    assert "train.py" not in cli.ok("exec", "ls")
    assert cli.ok("exec", "ls ..; pwd").count("set-up") == 0


def test_type_without_gpus_does_not_limit_ranks(cli: Any) -> None:
    cli.env.update(CLOUDDDP_RENDEZVOUS="direct", CLOUDDDP_STOP_GRACE="1")
    cli.ok("up", "-n", "1", "-t", "c5.xlarge", "--allow-cpu", "--price", "0.17")
    cli.write("hi.py", "print('hi')")
    assert cli.ok("launch", "--nproc-per-node", "3", "hi.py").count("hi") == 3


def test_refused_launch_does_not_touch_files_of_the_running_job(cli: Any) -> None:
    direct(cli)
    cli.write("wait.py", "import time; time.sleep(600)")
    cli.ok("launch", "-d", "wait.py")
    cli.write("wait.py", "print('changed')")
    assert cli("launch", "wait.py").returncode == 1
    assert "time.sleep" in cli.ok("exec", "cat wait.py")


def test_concurrent_launches_start_one_job(cli: Any) -> None:
    direct(cli)
    cli.write("wait.py", "import time; time.sleep(600)")
    cli.ok("sync")
    both = [cli.start("launch", "-d", "wait.py") for _ in range(2)]
    for process in both:
        process.communicate(timeout=TIMEOUT)
    assert sorted(process.returncode for process in both) == [0, 1]
    states = [job["state"] for job in json.loads(cli.ok("jobs", "--json"))]
    assert states.count("running") == 1


# With the same time and the same random digits in both launches.
SAME_ID = """
import random
from datetime import datetime
from cloudddp.job import job_request

class Moment(datetime):
    @classmethod
    def now(cls, tz=None):
        return datetime(2026, 1, 31, 23, 59, 59, 500_000, tz)

job_request.datetime, job_request.secrets = Moment, random.Random(0)
from cloudddp.__main__ import main
main()
"""


def test_concurrent_launches_with_the_same_id_start_one_job(cli: Any) -> None:
    """A launch that is refused ends its own job by its id."""
    direct(cli)
    cli.write("wait.py", "import time; time.sleep(600)")
    cli.ok("sync")
    both = [cli.start_code(SAME_ID, "launch", "-d", "wait.py") for _ in range(2)]
    outputs = [process.communicate(timeout=TIMEOUT) for process in both]
    assert sorted(process.returncode for process in both) == [0, 1]
    (started,) = (out.strip() for out, _ in outputs if out)
    (refused,) = (err for out, err in outputs if not out)
    assert f"another launch began at the same moment and has the id {started}; nothing was started" in refused
    (job,) = json.loads(cli.ok("jobs", "--json"))
    assert (job["id"], job["state"]) == (started, "running")
    cli.ok("cancel", started)
    assert json.loads(cli.ok("jobs", "--json"))[0]["state"] == "cancelled"
