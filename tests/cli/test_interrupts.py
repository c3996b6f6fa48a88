"""Ctrl-C, two signals at once, a closed terminal: during `up`, `launch`, `logs` and `down`."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from typing import Any

import pytest
from support.harness import ROOT, TIMEOUT, clean_environment, finished, interrupt, wait_for
from support.interrupts import interrupted_at
from support.jobs import SLEEPERS, direct, homes, nodes_of, processes, still_running
from support.tagged import tagged_instance
from support.terminal import Terminal


def interrupt_at_question(window: Terminal, output: bytes) -> None:
    """Press Ctrl-C after this output, and wait for the question."""
    window.read_until(output)
    window.process.send_signal(signal.SIGINT)
    window.read_until(
        b"Cancel the job on every node? y: cancel, n: keep watching, d: detach, the job keeps running"
    )


def test_ctrl_c_cancels_the_job_and_keeps_the_cluster(cli: Any) -> None:
    direct(cli, nodes=2, ranks=2)
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
    assert [node["state"] for node in nodes_of(cli)] == ["running"] * 2


def test_ctrl_c_right_after_the_start_stops_the_job(cli: Any) -> None:
    direct(cli, nodes=2)
    cli.write("wait.py", SLEEPERS)
    _, err = interrupted_at(cli, "job.launch:launch", "launch", "wait.py")
    assert "it was ended; the cluster is still up" in err
    assert still_running(cli, "wait.py") == []
    wait_for(lambda: processes(cli) == 0, "the supervisors end")


def test_ctrl_c_while_the_end_is_reported_does_not_report_a_start(cli: Any) -> None:
    direct(cli)
    cli.write("ok.py", "print('ran')")
    _, err = interrupted_at(cli, "cli.actions.follow:_report_outcome", "launch", "ok.py")
    assert "finished: 1 rank" in err
    assert "being started" not in err
    assert "it was ended" not in err


def test_ctrl_c_while_an_error_is_reported_does_not_replace_it(cli: Any) -> None:
    words = ("status", "--region", "us-east-1")
    _, err = interrupted_at(cli, "cli.console:Console.error", *words, on_call=True, code=1)
    assert "no cluster" in err


def test_answering_no_goes_on_and_repeats_no_line(cli: Any, terminal: Any) -> None:
    direct(cli)
    cli.write(
        "tick.py",
        "import time, os\nfor i in range(10**6):\n print('tick', i, flush=True)\n time.sleep(0.05)\n if "
        "os.path.exists('stop'): break",
    )
    window = terminal("launch", "tick.py")
    interrupt_at_question(window, b"tick 3")
    os.write(window.ours, b"n\n")
    window.read_until(b"tick 30\r")
    (homes(cli)[0] / "project/stop").touch()
    window.read_until(b"finished")
    assert window.process.wait(TIMEOUT) == 0
    for k in range(30):
        assert window.seen.count(f"tick {k}\r".encode()) == 1, k


def test_question_ends_with_the_job(cli: Any, terminal: Any, remains: Any) -> None:
    """Nobody answers: the job ends, its results are pulled, and `run` removes the nodes, which cost money."""
    cli.env.update(CLOUDDDP_RENDEZVOUS="direct", CLOUDDDP_NPROC_PER_NODE="1", CLOUDDDP_STOP_GRACE="1")
    cli.write(
        "wait.py",
        "import os, time\nprint('begun', flush=True)\nwhile not os.path.exists('go'):\n time.sleep(0.1)\n"
        "print('ended by itself')\nopen('model.pt', 'w').write('w')",
    )
    window = terminal("run", "-y", "-n", "1", "-t", "g5.xlarge", "wait.py")
    interrupt_at_question(window, b"begun")
    (homes(cli)[0] / "project/go").touch()
    code, shown = window.read_to_the_end()
    assert code == 0, shown
    assert shown.index("an answer is no longer needed") < shown.index("ended by itself")
    assert remains().nothing
    assert list(cli.cwd.glob("results/*/model.pt"))


def test_detaching_and_ctrl_c_on_logs_leave_the_job_running(cli: Any, terminal: Any) -> None:
    direct(cli)
    cli.write("wait.py", SLEEPERS)
    window = terminal("launch", "wait.py")
    interrupt_at_question(window, b"rank 0 began")
    os.write(window.ours, b"what?\nd\n")
    window.read_until(b"an hour, at most")
    window.read_until(b"keeps running: ")
    assert window.process.wait(TIMEOUT) == 3
    follower = cli.start("logs", "-f")
    assert "began" in follower.stdout.readline()
    code, _, err = interrupt(follower)
    assert (code, "the job keeps running" in err) == (130, True)
    assert json.loads(cli.ok("jobs", "--json"))[0]["state"] == "running"
    assert still_running(cli, "wait.py")


def test_detaching_from_run_keeps_the_cluster(cli: Any, terminal: Any) -> None:
    cli.env.update(CLOUDDDP_RENDEZVOUS="direct", CLOUDDDP_NPROC_PER_NODE="1", CLOUDDDP_STOP_GRACE="1")
    cli.write("wait.py", SLEEPERS)
    window = terminal("run", "-y", "-n", "1", "-t", "g5.xlarge", "wait.py")
    interrupt_at_question(window, b"rank 0 began")
    os.write(window.ours, b"detach\n")
    window.read_until(b"keeps running, at")
    assert window.process.wait(TIMEOUT) == 3
    assert json.loads(cli.ok("jobs", "--json"))[0]["state"] == "running"


@pytest.mark.parametrize("with_signal", [True, False])
def test_closing_the_terminal_at_the_question_leaves_the_job_running(
    cli: Any, terminal: Any, with_signal: bool
) -> None:
    """Without a signal: the process reads the end of the input before its shell sends SIGHUP."""
    direct(cli)
    cli.write("wait.py", SLEEPERS)
    window = terminal("launch", "wait.py")
    interrupt_at_question(window, b"rank 0 began")
    if with_signal:
        window.process.send_signal(signal.SIGHUP)
        window.process.wait(TIMEOUT)
    os.close(window.ours)
    window.process.wait(TIMEOUT)
    assert still_running(cli, "wait.py")
    assert json.loads(cli.ok("jobs", "--json"))[0]["state"] == "running"


def test_second_signal_does_not_abort_the_teardown(cli: Any, ec2: Any, faults: Any, remains: Any) -> None:
    tagged_instance(ec2, cli.cluster)
    came, go = faults.hold("TerminateInstances")
    process = cli.start("down", "-y")
    assert came.wait(60)
    process.send_signal(signal.SIGTERM)
    process.send_signal(signal.SIGHUP)
    go.set()
    finished(process, 0)
    assert remains().nothing


def test_simultaneous_signals_do_not_abort_the_teardown(cli: Any, faults: Any, remains: Any) -> None:
    """Both signals are pending when RunInstances answers: the second must not raise in the handler of the
    first."""
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
    finished(process, 130)
    assert remains().nothing


# Signals at the latest moment at which Python code runs: modules are deleted after Python has reset its
# handlers.
AT_EXIT = """
import os, signal
from cloudddp import __main__
from cloudddp.cli import main

class Last:
    def __del__(self, kill=os.kill, pid=os.getpid(), number=signal.{second}):
        kill(pid, number)

last = Last()
real = main.main.main

def interrupted(*args, **kwargs):
    if {first!r}:
        os.kill(os.getpid(), signal.SIGINT)
    return real(*args, **kwargs)

main.main.main = interrupted
__main__.sys.argv = ["cloudddp", "--version"]
__main__.main()
"""


@pytest.mark.parametrize(("first", "code", "second"), [(True, 130, "SIGTERM"), (False, 0, "SIGINT")])
def test_signal_while_the_interpreter_exits_does_not_change_the_exit_code(
    first: bool, code: int, second: str
) -> None:
    done = subprocess.run(
        [sys.executable, "-c", AT_EXIT.format(first=first, second=second)],
        env=clean_environment(PYTHONPATH=str(ROOT)),
        capture_output=True,
        text=True,
        timeout=TIMEOUT,
        check=False,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    assert done.returncode == code, done.stderr
    assert ("interrupted" in done.stderr) == first
