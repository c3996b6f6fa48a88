"""User errors and interruptions: wrong folder, wrong order, closed terminal, two signals, expired credentials."""

from __future__ import annotations

import json
import os
import re
import signal
from pathlib import Path
from typing import Any

import pytest
from support.harness import TIMEOUT, interrupt, wait_for
from support.terminal import Terminal


def direct(cli: Any, *, nodes: int = 1) -> None:
    cli.env.update(CLOUDDDP_RENDEZVOUS="direct", CLOUDDDP_NPROC_PER_NODE="1", CLOUDDDP_STOP_GRACE="1")
    cli.nodes(nodes)


@pytest.fixture
def terminal(cli: Any) -> Any:
    opened: list[Terminal] = []

    def open_one(*words: str) -> Terminal:
        opened.append(Terminal(cli, *words))
        return opened[-1]

    yield open_one
    for one in opened:
        one.process.kill()
        one.process.wait()


def test_closing_the_terminal_during_up_leaves_nothing(
    cli: Any, faults: Any, terminal: Any, remains: Any
) -> None:
    came, go = faults.hold("RunInstances")
    window = terminal("up", "-n", "2")
    assert came.wait(60)
    os.close(window.ours)
    window.process.send_signal(signal.SIGHUP)
    go.set()
    window.process.wait(TIMEOUT)
    assert remains().nothing


def test_closing_the_terminal_during_run_removes_the_cluster(cli: Any, terminal: Any, remains: Any) -> None:
    cli.env.update(CLOUDDDP_RENDEZVOUS="direct", CLOUDDDP_STOP_GRACE="1")
    cli.write("wait.py", "import time; print('began', flush=True); time.sleep(600)")
    window = terminal("run", "-n", "1", "--nproc-per-node", "1", "wait.py")
    window.read_until(b"began")
    window.close()
    assert remains().nothing


def test_interrupted_run_reports_that_the_cluster_is_removed(cli: Any, remains: Any) -> None:
    cli.env.update(CLOUDDDP_RENDEZVOUS="direct", CLOUDDDP_STOP_GRACE="1")
    cli.write("wait.py", "import time; print('began', flush=True); time.sleep(600)")
    process = cli.start("run", "-n", "1", "--nproc-per-node", "1", "wait.py")
    assert process.stdout is not None
    assert "began" in process.stdout.readline()
    code, _, err = interrupt(process)
    assert code == 130
    assert re.search(r"job \S+ cancelled, 1 rank stopped; the cluster is removed\n", err), err
    assert "still up" not in err
    assert remains().nothing


def test_second_signal_does_not_abort_the_teardown(cli: Any, faults: Any, remains: Any) -> None:
    came, go = faults.hold("TerminateInstances")
    cli.ok("up", "-n", "1")
    process = cli.start("down", "-y")
    assert came.wait(60)
    process.send_signal(signal.SIGTERM)
    process.send_signal(signal.SIGHUP)
    go.set()
    process.communicate(timeout=TIMEOUT)
    assert process.returncode == 0
    assert remains().nothing


def test_unwritable_journal_does_not_stop_the_teardown(cli: Any, remains: Any) -> None:
    cli.ok("up", "-n", "1")
    (cluster,) = json.loads(cli.ok("status", "--json"))
    journal = Path(cli.env["CLOUDDDP_HOME"]) / "clusters" / cluster["cluster_id"] / "journal.jsonl"
    journal.unlink()
    journal.symlink_to("/dev/full")
    cli.ok("down", "-y")
    assert remains().nothing


def test_instance_unknown_to_aws_yet_is_terminated(cli: Any, faults: Any, remains: Any) -> None:
    """InvalidInstanceID.NotFound right after a launch does not mean that the instance has been terminated."""
    cli.ok("up", "-n", "1")
    faults.fail("TerminateInstances", "InvalidInstanceID.NotFound", times=2)
    cli.ok("down", "-y")
    assert remains().nothing


def test_expired_credentials_during_teardown_list_remaining_resources(
    cli: Any, faults: Any, ec2: Any
) -> None:
    cli.ok("up", "-n", "1")
    (cluster,) = json.loads(cli.ok("status", "--json"))
    faults.fail("TerminateInstances", "ExpiredToken", times=9)
    done = cli("down", "-y")
    assert done.returncode == 3
    assert cluster["nodes"][0]["instance_id"] in done.stderr
    assert "ExpiredToken" in done.stderr


def test_duplicate_group_after_a_lost_answer_is_used(cli: Any, faults: Any) -> None:
    """The first answer is lost after the group was created, and botocore repeats the call: AWS answers Duplicate."""
    faults.lose_answer("CreateSecurityGroup")
    assert "is ready" in cli.ok("up", "-n", "1")
    assert faults.count("CreateSecurityGroup") == 2


def test_down_in_the_wrong_region_names_the_right_one(cli: Any) -> None:
    cli.ok("up", "-n", "1")
    done = cli("down", "-y", "--region", "us-west-2")
    assert done.returncode == 1
    assert "us-east-1" in done.stderr
    assert "down --region us-east-1" in done.stderr


def test_project_settings_apply_in_subfolders(cli: Any) -> None:
    del cli.env["CLOUDDDP_CLUSTER"]
    cli.write("cloudddp.toml", f'[cluster]\nname = "{cli.cluster}"\nnodes = 1\n')
    (cli.cwd / ".git").mkdir()
    below = cli.cwd / "a" / "b"
    below.mkdir(parents=True)
    cli.cwd = below
    assert cli.cluster in cli.ok("up")
    done = cli("status")
    assert done.returncode == 0
    assert "using" in done.stderr


def test_hints_repeat_global_options(cli: Any) -> None:
    cli.write("ok.py", "")
    done = cli("-c", "nowhere", "--region", "us-east-1", "launch", "ok.py")
    assert "cloudddp -c nowhere --region us-east-1 up" in done.stderr


@pytest.mark.parametrize("option", ["--sim", "--dry-run", "--detach"])
def test_option_after_the_script_is_refused(cli: Any, faults: Any, option: str) -> None:
    cli.write("train.py", "")
    done = cli("launch", "train.py", option)
    assert done.returncode == 2
    assert "put it before train.py" in done.stderr
    assert faults.calls == []


def test_words_after_double_dash_are_script_arguments(cli: Any) -> None:
    direct(cli)
    cli.write("args.py", "import sys; print(sys.argv[1:])")
    assert "['--dry-run']" in cli.ok("launch", "--", "args.py", "--dry-run")


@pytest.mark.parametrize("form", ["./sub/train.py", "{cwd}/sub/train.py", "sub/../sub/train.py"])
def test_script_may_be_named_by_any_path(cli: Any, form: str) -> None:
    direct(cli)
    cli.write("sub/train.py", "print('ran')")
    assert "ran" in cli.ok("launch", form.format(cwd=cli.cwd))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("run", "train.py"), "sync.max_mb"),
        (("run", "--nproc-per-node", "1,2,3", "train.py"), "lists 3 nodes"),
    ],
)
def test_run_refuses_before_it_creates_nodes(
    cli: Any, faults: Any, words: tuple[str, ...], message: str
) -> None:
    cli.write("train.py", "")
    cli.write("big.bin", "x" * 3_000_000)
    cli.env["CLOUDDDP_SYNC_MAX_MB"] = "1" if message == "sync.max_mb" else "100"
    done = cli(*words)
    assert done.returncode == 2, done.stderr
    assert message in done.stderr
    assert faults.calls == []


def test_run_with_more_ranks_than_gpus_creates_nothing(cli: Any, faults: Any, remains: Any) -> None:
    cli.write("train.py", "")
    done = cli("run", "-n", "1", "-t", "g5.xlarge", "--nproc-per-node", "2", "train.py")
    assert done.returncode == 2, done.stderr
    assert "1 GPU, fewer than the 2 ranks" in done.stderr
    assert not {"ImportKeyPair", "CreateSecurityGroup", "RunInstances"} & set(faults.calls)


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


def test_answering_no_repeats_no_line(cli: Any, terminal: Any) -> None:
    direct(cli)
    cli.write(
        "tick.py",
        "import time, os\nfor i in range(10**6):\n print('tick', i, flush=True)\n time.sleep(0.1)\n if os.path.exists('stop'): break",
    )
    window = terminal("launch", "tick.py")
    window.read_until(b"tick 3")
    window.process.send_signal(signal.SIGINT)
    window.read_until(b"Cancel the job on every node?")
    os.write(window.ours, b"n\n")
    window.read_until(b"tick 30\r")
    cli.ok("exec", "touch stop")
    window.read_until(b"finished")
    for k in range(30):
        assert window.seen.count(f"tick {k}\r".encode()) == 1, k


def test_following_does_not_end_a_job_that_restarts(cli: Any) -> None:
    """torchrun restarts the rank that failed."""
    pytest.importorskip("torch")
    cli.env.update(CLOUDDDP_NPROC_PER_NODE="1", CLOUDDDP_MAX_RESTARTS="1", CLOUDDDP_RENDEZVOUS="static")
    cli.ok("up", "-n", "1")
    cli.write(
        "twice.py",
        "import os, sys, time\ntime.sleep(1)\nsys.exit(3 if os.environ['TORCHELASTIC_RESTART_COUNT'] == '0' else 0)",
    )
    cli.ok("launch", "-d", "twice.py")
    assert cli("logs", "-f").returncode == 0


def test_ctrl_c_on_logs_leaves_the_job_running(cli: Any) -> None:
    direct(cli)
    cli.write("wait.py", "import time; print('began', flush=True); time.sleep(600)")
    cli.ok("launch", "-d", "wait.py")
    follower = cli.start("logs", "-f")
    assert follower.stdout is not None
    assert "began" in follower.stdout.readline()
    code, _, err = interrupt(follower)
    assert code == 130
    assert "the job keeps running" in err
    assert json.loads(cli.ok("jobs", "--json"))[0]["state"] == "running"


def test_ranks_without_supervisor_block_the_node_until_cancelled(cli: Any) -> None:
    direct(cli)
    cli.write("wait.py", "import time; time.sleep(600)")
    job = cli.ok("launch", "-d", "wait.py").strip()
    pid = json.loads(cli.ok("exec", f"cat ~/.cloudddp/jobs/{job}/state.json").split("] ", 1)[1])["pid"]
    os.kill(pid, signal.SIGKILL)
    wait_for(lambda: json.loads(cli.ok("jobs", "--json"))[0]["state"] == "lost", "the job is shown as lost")
    busy = cli("launch", "wait.py")
    assert busy.returncode == 1
    assert job in busy.stderr
    assert "stopped" in cli.ok("cancel", job)
    assert json.loads(cli.ok("jobs", "--json"))[0]["state"] == "cancelled"


def test_daemon_with_clean_environment_ends_with_the_job(cli: Any) -> None:
    direct(cli)
    cli.write(
        "daemon.py",
        "import subprocess, time\nprint(subprocess.Popen(['setsid', 'env', '-i', 'sleep', '601']).pid, flush=True)\ntime.sleep(600)",
    )
    process = cli.start("launch", "daemon.py")
    assert process.stdout is not None
    pid = int(process.stdout.readline().split("] ")[1])
    assert Path(f"/proc/{pid}").exists()
    interrupt(process)
    wait_for(lambda: "sleep" not in _program(pid), "the daemon has ended")


def _program(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text()
    except OSError:
        return ""


def test_bad_file_does_not_lose_other_results(cli: Any) -> None:
    direct(cli)
    cli.write(
        "write.py",
        "import os, pathlib\np = pathlib.Path('runs/a'); p.mkdir(parents=True)\n(p / 'best.pt').write_text('w')\n"
        "os.symlink(os.path.abspath('runs/a'), 'runs/latest')\nos.symlink('/etc/passwd', 'runs/outside')\nos.mkfifo('runs/pipe')\n",
    )
    cli.ok("launch", "write.py")
    done = cli("pull")
    assert done.returncode == 0, done.stderr
    (got,) = (cli.cwd / "results").iterdir()
    assert (got / "runs" / "a" / "best.pt").read_text() == "w"
    assert (got / "runs" / "latest" / "best.pt").read_text() == "w"
    assert not (got / "runs" / "outside").exists()
    assert "left out runs/pipe" in done.stderr
    assert "left out runs/outside" in done.stderr


def test_pull_reports_missing_and_older_files(cli: Any) -> None:
    direct(cli)
    cli.write(
        "write.py",
        "import os, pathlib\npathlib.Path('runs').mkdir()\npathlib.Path('runs/x').write_text('1')\nos.utime('runs/x', (1, 1))",
    )
    cli.write("nothing.py", "print('nothing')")
    assert cli.ok("launch", "write.py") == ""
    cli.ok("launch", "nothing.py")
    done = cli("pull")
    assert "older than job" in done.stderr
    missing = cli("pull", "nowhere")
    assert missing.returncode == 1
    assert "nothing to pull" in missing.stderr


def test_launch_is_refused_when_a_node_is_gone(cli: Any, ec2: Any) -> None:
    direct(cli, nodes=2)
    cli.write("ok.py", "")
    (cluster,) = json.loads(cli.ok("status", "--json"))
    ec2.terminate_instances(InstanceIds=[cluster["nodes"][0]["instance_id"]])
    wait_for(lambda: len(json.loads(cli.ok("status", "--json"))[0]["nodes"]) == 1, "the node is gone")
    done = cli("launch", "ok.py")
    assert done.returncode == 1
    assert "1 of 2 nodes" in done.stderr


def test_unknown_profile_and_broken_aws_file_are_usage_errors(cli: Any, tmp_path: Path) -> None:
    unknown = cli("status", "--profile", "nope")
    assert unknown.returncode == 2
    assert "nope" in unknown.stderr
    (tmp_path / "config").write_text("not [ an ini file")
    broken = cli("status", AWS_CONFIG_FILE=str(tmp_path / "config"))
    assert broken.returncode == 2
    assert "AWS configuration" in broken.stderr


def test_unencodable_characters_are_replaced(cli: Any) -> None:
    direct(cli)
    cli.write("uni.py", "print('ok \\u2713')")
    done = cli("launch", "uni.py", PYTHONIOENCODING="latin-1")
    assert done.returncode == 0, done.stderr
    assert "ok ?" in done.stdout


def test_simultaneous_signals_do_not_abort_the_teardown(cli: Any, faults: Any, remains: Any) -> None:
    """Both signals are pending when RunInstances answers: the second must not raise in the handler of the first."""
    came, go = faults.hold("RunInstances")
    process = cli.start("up", "-n", "1")
    assert came.wait(60)
    called, answered = faults.hold("DescribeInstances")
    go.set()
    assert called.wait(60)  # `up` continues
    process.send_signal(signal.SIGINT)
    process.send_signal(signal.SIGTERM)
    process.send_signal(signal.SIGHUP)
    answered.set()
    process.communicate(timeout=TIMEOUT)
    assert process.returncode == 130
    assert remains().nothing


def test_run_lists_remaining_resources_when_aws_refuses_calls(cli: Any, faults: Any, ec2: Any) -> None:
    """An SSO session expires during a long job, and AWS refuses the first call of the teardown."""
    cli.env.update(CLOUDDDP_RENDEZVOUS="direct", CLOUDDDP_STOP_GRACE="1")
    cli.write(
        "wait.py",
        "import os, time\nprint('began', flush=True)\nwhile not os.path.exists('go'): time.sleep(0.05)",
    )
    process = cli.start("run", "-n", "1", "--nproc-per-node", "1", "wait.py")
    assert process.stdout is not None
    assert "began" in process.stdout.readline()
    (cluster,) = json.loads(cli.ok("status", "--json"))
    for action in ("DescribeInstances", "TerminateInstances"):
        faults.fail(action, "RequestExpired", times=99)
    home = ec2.describe_instances(InstanceIds=[cluster["nodes"][0]["instance_id"]])
    assert home["Reservations"]
    (node,) = [n for n in _nodes(cli) if n["instance_id"] == cluster["nodes"][0]["instance_id"]]
    (
        Path(node["home"]) / "project" / "go"
    ).mkdir()  # a folder, because `run` would keep the cluster for a new file
    _, err = process.communicate(timeout=TIMEOUT)
    assert process.returncode == 3
    assert cluster["nodes"][0]["instance_id"] in err
    assert "an hour" in err
    faults.clear()


def _nodes(cli: Any) -> list[dict[str, Any]]:
    shown: list[dict[str, Any]] = json.loads(cli.ok("sim", "status", "--json"))["nodes"]
    return shown


def test_tag_without_time_zone_does_not_stop_the_teardown(cli: Any, ec2: Any, remains: Any) -> None:
    cli.ok("up", "-n", "1")
    ec2.create_tags(
        Resources=remains().instances, Tags=[{"Key": "cloudddp:created", "Value": "2026-11-20T10:00:00"}]
    )
    cli.ok("status")
    cli.ok("down", "-y")
    assert remains().nothing


def test_following_ends_where_a_node_does_not_know_the_job(cli: Any) -> None:
    direct(cli, nodes=2)
    cli.write("ok.py", "print('ran')")
    cli.ok("launch", "ok.py")
    cli.ok("exec", "--node", "1", "rm -r ~/.cloudddp/jobs/*")
    assert "ran" in cli.ok("logs", "-f")


def test_background_process_of_set_up_does_not_block_the_launch(cli: Any) -> None:
    direct(cli)
    cli.write("cloudddp.toml", '[setup]\nrun = ["sleep 300 & echo started"]\n')
    cli.write("ok.py", "print('ran')")
    assert "ran" in cli.ok("launch", "ok.py")


def test_settings_are_not_read_from_shared_folders(cli: Any, tmp_path: Path) -> None:
    """Outside a repository and the home folder, a file in a parent folder may belong to another user."""
    (tmp_path / "cloudddp.toml").write_text("[cluster]\nnodes = 0\n")
    assert cli("status").returncode == 1  # no cluster; the bad file was not read


def test_config_path_with_dots_or_links_works(cli: Any) -> None:
    direct(cli)
    cli.write("cloudddp.toml", "")
    cli.write("sub/train.py", "print('ran')")
    (cli.cwd / "link").symlink_to(cli.cwd / "sub")
    root, cli.cwd = cli.cwd, cli.cwd / "sub"
    assert "ran" in cli.ok("launch", "--config", "../cloudddp.toml", "train.py")
    cli.cwd = root
    assert "ran" in cli.ok("launch", "--config", "sub/../cloudddp.toml", "sub/train.py")


@pytest.mark.parametrize("words", [("sim", "start"), ("--sim", "up", "-n", "1")])
def test_unusable_state_folder_is_named_with_the_variable_to_set(
    cli: Any, tmp_path: Path, words: tuple[str, ...]
) -> None:
    taken = tmp_path / "a file"
    taken.touch()
    done = cli(*words, CLOUDDDP_HOME=str(taken))
    assert done.returncode == 2, done
    assert f"{taken} is not a folder, so cloudddp does not use it" in done.stderr
    assert str(taken) in done.stderr
    assert "-> set CLOUDDDP_HOME" in done.stderr
