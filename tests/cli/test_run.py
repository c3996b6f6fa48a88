"""`run`: its cluster is removed whatever happens."""

from __future__ import annotations

import re
from typing import Any

import pytest
from support.harness import finished, interrupt
from support.interrupts import interrupted_at


@pytest.mark.parametrize(
    ("moment", "caller", "on_call"),
    [
        ("cli.actions.run:_Ending.take", "", False),
        ("cluster.up:_create", "", False),
        ("cli.console:Progress.stop", "__exit__", False),
        ("cluster.wait_ready:connect", "", False),
        ("cli.actions.run:NewJob", "", True),
    ],
)
def test_interrupt_when_the_cluster_is_ready_removes_it(
    cli: Any, remains: Any, moment: str, caller: str, on_call: bool
) -> None:
    cli.write("train.py", "print('never runs')\n")
    run = ("run", "-n", "1", "--nproc-per-node", "1", "train.py")
    out, _ = interrupted_at(cli, moment, *run, caller=caller, on_call=on_call)
    assert remains().nothing
    assert "never runs" not in out


@pytest.mark.parametrize("moment", ["cli.actions.run:_end", "signals:protected"])
def test_interrupt_before_the_teardown_does_not_prevent_it(cli: Any, remains: Any, moment: str) -> None:
    """As `finally` is entered, and as signals are about to be held back."""
    cli.env.update(CLOUDDDP_RENDEZVOUS="direct", CLOUDDDP_STOP_GRACE="1")
    cli.write("ok.py", "print('ran')\n")
    caller = "_end" if moment == "signals:protected" else ""
    run = ("run", "-n", "1", "--nproc-per-node", "1", "ok.py")
    out, _ = interrupted_at(cli, moment, *run, caller=caller, on_call=True, code=0)
    assert "ran" in out
    assert remains().nothing


def test_run_removes_the_cluster_and_returns_the_job_exit_code(cli: Any, remains: Any) -> None:
    cli.env.update(CLOUDDDP_RENDEZVOUS="direct", CLOUDDDP_STOP_GRACE="1")
    cli.write(
        "seven.py",
        "import os, pathlib, sys, time\n"
        "pathlib.Path('runs').mkdir(exist_ok=True)\npathlib.Path('runs/made').write_text('x')\n"
        "time.sleep(600 * int(os.environ['RANK']))\nsys.exit(7)",
    )
    cli.fails(7, "run", "-n", "2", "--nproc-per-node", "1", "seven.py")
    assert remains().nothing
    assert [path.read_text() for path in cli.cwd.glob("results/*/runs/made")] == ["x"]


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


def test_run_refuses_before_it_creates_nodes(cli: Any, faults: Any) -> None:
    cli.write("train.py", "")
    cli.write("big.bin", "x" * 3_000_000)
    assert "sync.max_mb" in cli.fails(2, "run", "train.py", CLOUDDDP_SYNC_MAX_MB="1")
    assert faults.calls == []


def test_run_does_not_take_over_a_cluster_that_appears_after_its_check(
    cli: Any, simulator: Any, faults: Any, remains: Any
) -> None:
    cli.write("train.py", "print('never runs')")
    came, go = faults.hold("DescribeInstances")
    process = cli.start("run", "-n", "1", "--nproc-per-node", "1", "train.py")
    assert came.wait(60)
    cli.ok("up", "-n", "1", AWS_ENDPOINT_URL=simulator.endpoint)
    go.set()
    out, err = finished(process, 1)
    assert "already exists; `run` creates and removes a cluster of its own" in err
    assert "never runs" not in out
    assert len(remains().instances) == 1


@pytest.mark.parametrize("words", [("up",), ("run", "train.py")])
def test_more_ranks_than_gpus_create_nothing(cli: Any, faults: Any, words: tuple[str, ...]) -> None:
    cli.write("train.py", "")
    cli.write(
        "cloudddp.toml", "[job]\nnproc_per_node = 2\n[cluster]\nnodes = 1\ninstance_type = 'g5.xlarge'\n"
    )
    assert "1 GPU, fewer than the 2 ranks" in cli.fails(2, *words)
    assert not {"ImportKeyPair", "CreateSecurityGroup", "RunInstances"} & set(faults.calls)


def test_detached_run_needs_nodes_that_power_off(cli: Any, remains: Any) -> None:
    cli.write("ok.py", "")
    assert "run -d needs nodes that power off by themselves" in cli.fails(2, "run", "-d", "-n", "1", "ok.py")
    assert remains().nothing


def test_settings_that_need_a_role_are_refused_on_process_nodes(cli: Any, remains: Any) -> None:
    cli.write("ok.py", "")
    role = '[cluster]\ninstance_profile = "nodes"\n'
    for setting in ('[[data]]\nsource = "s3://bucket/set"\n', '[job]\nresults_s3 = "s3://bucket/runs"\n'):
        cli.write("cloudddp.toml", role + setting)
        error = cli.fails(2, "run", "-n", "1", "ok.py")
        assert "needs an instance role, which the simulator's process nodes do not have" in error
        assert "use namespace nodes (now processes: as requested): `cloudddp" in error
        assert "sim start --nodes namespace`" in error
    assert remains().nothing
