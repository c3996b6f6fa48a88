"""`launch`: what ranks get, which rank failed first, and what is refused. Most ranks are plain scripts."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from support.harness import finished, wait_for
from support.jobs import SLEEPERS, direct, homes, lines_by_rank, nodes_of, processes

from cloudddp.job.job_request import Script, find_script

SHOW = """
import json, os, sys
names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "NODE_RANK", "NNODES",
         "CLOUDDDP_NODE_RANK", "NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME", "GREETING", "CLOUDDDP_JOB_ID")
print(json.dumps([{name: os.environ.get(name) for name in names}, sys.argv[1:]]))
"""  # noqa: E501


def test_ranks_get_their_environment_and_arguments(cli: Any) -> None:
    direct(cli, nodes=2, ranks="2,1")
    cli.write("cloudddp.toml", "[job]\npositional_ranks = true\n")
    cli.write("sub/show.py", SHOW)
    words = ["--dry-run", "two words", "$HOME", "'quoted'", "a;b", "--", "-x", "ünï", "*", ""]
    out = cli.ok("launch", "--env", "GREETING=two words; $HOME", "--", "./sub/show.py", *words)
    shown = {rank: json.loads(lines[0]) for rank, lines in lines_by_rank(out).items()}
    env = [shown[rank][0] for rank in (0, 1, 2)]
    assert [one["RANK"] for one in env] == ["0", "1", "2"]
    assert [one["LOCAL_RANK"] for one in env] == ["0", "1", "0"]
    assert [one["NODE_RANK"] for one in env] == [one["CLOUDDDP_NODE_RANK"] for one in env] == ["0", "0", "1"]
    assert [one["LOCAL_WORLD_SIZE"] for one in env] == ["2", "2", "1"]
    assert len({(one["MASTER_ADDR"], one["MASTER_PORT"], one["CLOUDDDP_JOB_ID"]) for one in env}) == 1
    same = {"WORLD_SIZE": "3", "NNODES": "2", "NCCL_SOCKET_IFNAME": "=lo", "GLOO_SOCKET_IFNAME": "lo"}
    assert all(one.items() >= {**same, "GREETING": "two words; $HOME"}.items() for one in env)
    assert [shown[rank][1] for rank in (0, 1, 2)] == [
        [*words, "0", "0"],
        [*words, "1", "1"],
        [*words, "2", "0"],
    ]


@pytest.mark.parametrize(
    "form", ["./sub/train.py", "{root}/sub/train.py", "sub/../sub/train.py", "link/train.py"]
)
def test_script_may_be_named_by_any_path(project: Path, form: str) -> None:
    (project / "sub").mkdir()
    (project / "sub" / "train.py").write_text("")
    (project / "link").symlink_to("sub")
    script, file = find_script(project, project, Script(form.format(root=project)), [])
    assert (project / file).samefile(project / "sub" / "train.py")
    assert script.target == file


def test_missing_python_is_reported(cli: Any) -> None:
    direct(cli)
    cli.write("ok.py", "")
    assert "no /nowhere/python" in cli.fails(1, "launch", "ok.py", CLOUDDDP_PYTHON="/nowhere/python")


def test_script_that_is_a_part_of_a_package_gets_the_way_to_start_it(cli: Any) -> None:
    direct(cli)
    cli.write("src/own/train.py", "from . import other")
    assert "start it as `-m own.train`, and add [job] env" in cli("launch", "src/own/train.py").stderr
    cli.write("away.py", "def save(*_): open('../model.pt', 'w').close()\nsave({}, '../model.pt')")
    err = cli("launch", "away.py").stderr
    assert "away.py saves to ../model.pt, outside the project: that is lost" in err
    assert "no new file is in the project; files that a script writes elsewhere are not pulled" in err
    refused = "job.notify runs ./notfy.sh, which is not among the files that are sent"
    assert refused in cli.fails(2, "launch", "away.py", CLOUDDDP_NOTIFY="./notfy.sh --to me")


def test_first_failing_rank_is_named_and_sets_the_exit_code(cli: Any) -> None:
    direct(cli, nodes=2, ranks=2)
    cli.write("fail.py", SLEEPERS)
    cli.write("go", "")
    err = cli.fails(7, "launch", "fail.py")
    assert "failed: rank 3 on node 1 exited with code 7\n" in err
    assert "about to fail" in err  # its last lines are shown again
    assert re.search(
        r"the cluster is still up; `cloudddp pull --job \S+` copies logs, verdict and stacks, `cloudddp "
        r"down` stops",
        err,
    )
    wait_for(lambda: processes(cli) == 0, "the other ranks are stopped")
    (job,) = json.loads(cli.ok("jobs", "--json"))
    assert (job["state"], job["exit_code"]) == ("failed", 7)


def test_node_that_dies_stops_the_job_and_is_named(cli: Any, ec2: Any) -> None:
    """Another launch is refused then."""
    direct(cli, nodes=2)
    cli.write("wait.py", "import time; print('began', flush=True); time.sleep(600)")
    process = cli.start("launch", "wait.py", CLOUDDDP_TIME_SCALE="0.2")
    for _ in range(2):
        assert "began" in process.stdout.readline()
    ec2.terminate_instances(InstanceIds=[nodes_of(cli)[1]["instance_id"]])
    _, err = finished(process, 1)
    assert "node 1: the agent of cloudddp has ended there" in err
    assert "AWS reports" in err
    assert "may still run" not in err
    wait_for(lambda: len(json.loads(cli.ok("status", "--json"))[0]["nodes"]) == 1, "the node is gone")
    assert "1 of 2 nodes" in cli.fails(1, "launch", "wait.py")


@pytest.mark.torch
def test_shell_script_runs_once_per_rank_and_is_followed_when_torchrun_restarts_it(cli: Any) -> None:
    pytest.importorskip("torch")
    cli.nodes(1)
    cli.write(
        "run.sh",
        'echo "$RANK of $WORLD_SIZE at ${MASTER_ADDR:+an address} on $NODE_RANK, $1 $2"\n'
        '[ "$TORCHELASTIC_RESTART_COUNT" = 1 ] || exit 4\n',
    )
    words = ("-d", "--rendezvous", "static", "--nproc-per-node", "2", "run.sh", "a b", "$LOCAL_RANK")
    cli.ok("launch", *words, CLOUDDDP_MAX_RESTARTS="1")
    shown = lines_by_rank(cli.ok("logs", "-f"))
    assert {rank: lines[-1] for rank, lines in shown.items() if rank in (0, 1)} == {
        rank: f"{rank} of 2 at an address on 0, a b $LOCAL_RANK" for rank in (0, 1)
    }


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
    done = cli("launch", "--nproc-per-node", "1", "pkg/t.py")
    assert "] pkg project" in done.stdout, done.stderr


@pytest.mark.torch
def test_torchrun_across_nodes_trains_and_names_the_failing_rank(cli: Any) -> None:
    pytest.importorskip("torch")
    cli.nodes(2)
    cli.write(
        "reduce.py",
        "import os, torch, torch.distributed as dist\n"
        "dist.init_process_group('gloo')\n"
        "x = torch.ones(1) * dist.get_rank()\n"
        "dist.all_reduce(x)\n"
        "print('sum', int(x), 'of', dist.get_world_size(), flush=True)\n"
        "dist.barrier()\n"
        # os._exit: gloo's threads, torn down with the interpreter, now and then abort it (signal 6)
        "if dist.get_rank() == 1: os._exit(7)\n"
        "dist.barrier()\n",
    )
    done = cli.exits(7, "launch", "--rendezvous", "c10d", "--nproc-per-node", "1", "reduce.py")
    shown = lines_by_rank(done.stdout)
    assert {rank: lines[0] for rank, lines in shown.items()} == dict.fromkeys(range(2), "sum 1 of 2")
    # torch numbers the ranks by the nodes' addresses
    (node,) = set(re.findall(r"\[rank 1 \| node ([01])\]", done.stdout))
    assert f"failed: rank 1 on node {node} exited with code 7\n" in done.stderr
    wait_for(lambda: processes(cli) == 0, "every process is stopped")


def test_started_ranks_are_stopped_when_another_node_cannot_start(cli: Any) -> None:
    """On node 1 a file is where the agent needs a folder; the ranks that node 0 has started must be
    stopped."""
    direct(cli, nodes=2)
    cli.write("wait.py", "import time; time.sleep(600)")
    blocked = homes(cli)[1] / ".cloudddp/jobs"
    blocked.parent.mkdir(exist_ok=True)
    blocked.touch()
    assert "node 1" in cli.fails(1, "launch", "wait.py")
    wait_for(lambda: processes(cli) == 0, "node 0 ends its ranks")


def test_ranks_that_do_not_fit_are_refused_before_the_sync(cli: Any) -> None:
    cli.nodes(1)
    cli.write("cloudddp.toml", '[setup]\nrun = ["touch ../set-up"]\n')
    cli.write("train.py", "")
    assert "4 GPUs, fewer than the 5 ranks" in cli.fails(2, "launch", "--nproc-per-node", "5", "train.py")
    (home,) = homes(cli)
    assert not (home / "project/train.py").exists()
    assert not (home / "set-up").exists()


# -- in containers of the simulator's nodes ------------------------------------------------------------------


def calls(home: Path, verb: str) -> list[list[str]]:
    lines = (home / ".simulated-docker").read_text().splitlines()
    return [words for words in map(json.loads, lines) if words[0] == verb]


IN_CONTAINER = (
    "import os; print('rank', os.environ['RANK'], os.environ['TOKEN'], 'SSH_CONNECTION' in os.environ)\n"
)
WITHOUT_TORCH = '#!/bin/sh\nexec python3 -IS "$@"\n'


def test_job_in_a_container(cli: Any) -> None:
    """Setup, ranks, environment, and what is refused."""
    direct(cli, nodes=2)
    cli.write("cloudddp.toml", '[setup]\nrun = ["echo set up in $HOME"]\n[job]\ncontainer = "train:1"\n')
    cli.write("ok.py", IN_CONTAINER)
    done = cli.exits(0, "launch", "--rendezvous", "direct", "-e", "TOKEN=s3cret", "ok.py")
    assert "rank 0 s3cret False" in done.stdout
    assert "rank 1 s3cret False" in done.stdout
    assert "pulling train:1 where it is missing" in done.stderr
    for home in homes(cli):
        assert len(calls(home, "pull")) == 1
        assert not any("s3cret" in word for words in calls(home, "run") for word in words)
    cli.write("bare", WITHOUT_TORCH)
    (cli.cwd / "bare").chmod(0o755)
    cli.write("cloudddp.toml", '[job]\ncontainer = "train:1"\npython = "./bare"\n')
    err = cli.fails(1, "launch", "--rendezvous", "c10d", "ok.py")
    assert "node 0: train:1: it has no torch, and torchrun needs it" in err
    assert json.loads(cli.ok("jobs", "--json"))[-1]["state"] == "failed"
