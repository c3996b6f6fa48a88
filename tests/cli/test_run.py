"""`run`: its cluster is removed whatever happens."""

from __future__ import annotations

import re
from typing import Any

from support.harness import finished, interrupt
from support.interrupts import interrupted_at
from support.jobs import WRITE


def test_interrupt_when_the_cluster_is_ready_removes_it(cli: Any, remains: Any) -> None:
    cli.write("train.py", "print('never runs')\n")
    run = ("run", "-n", "1", "--nproc-per-node", "1", "train.py")
    out, _ = interrupted_at(cli, "cli.actions.run:_Cleanup.take", *run)
    assert remains().nothing
    assert "never runs" not in out


def test_interrupt_before_the_teardown_does_not_prevent_it(cli: Any, remains: Any) -> None:
    """As signals are about to be held back."""
    cli.env.update(CLOUDDDP_RENDEZVOUS="direct", CLOUDDDP_STOP_GRACE="1", CLOUDDDP_OUTPUTS="runs")
    cli.write("ok.py", "print('ran')\n")
    run = ("run", "-n", "1", "--nproc-per-node", "1", "ok.py")
    out, err = interrupted_at(cli, "signals:protected", *run, caller="_end", on_call=True, code=0)
    assert "ran" in out
    assert "the job wrote nothing to runs (job.outputs)" in err
    assert remains().nothing


def test_run_removes_the_cluster_and_returns_the_job_exit_code(cli: Any, remains: Any) -> None:
    """The other rank is stopped; files that were not pulled are named."""
    cli.env.update(CLOUDDDP_RENDEZVOUS="direct", CLOUDDDP_STOP_GRACE="1", CLOUDDDP_OUTPUTS="runs")
    code = "write('runs/made'); write('out/model.pt'); time.sleep(600 * int(os.environ['RANK'])); sys.exit(7)"
    cli.write("seven.py", f"{WRITE}import sys, time\n{code}")
    err = cli.fails(7, "run", "-n", "2", "--nproc-per-node", "1", "--discard", "seven.py")
    assert "discarded with the nodes:\n  node 0: out/ (" in err
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


def test_what_process_nodes_cannot_do_is_refused(cli: Any, remains: Any) -> None:
    """Power off by themselves, and have a role."""
    cli.write("ok.py", "")
    assert "run -d needs nodes that power off by themselves" in cli.fails(2, "run", "-d", "-n", "1", "ok.py")
    assert "process nodes" in cli.fails(2, "launch", "-d", "--down", "ok.py")
    role = '[cluster]\ninstance_profile = "nodes"\n'
    for setting in ('[[data]]\nsource = "s3://bucket/set"\n', '[job]\nresults_s3 = "s3://bucket/runs"\n'):
        cli.write("cloudddp.toml", role + setting)
        error = cli.fails(2, "run", "-n", "1", "ok.py")
        assert "needs an instance role, which the simulator's process nodes do not have" in error
        assert "use namespace nodes (now processes: as requested): `cloudddp" in error
        assert "sim start --nodes namespace`" in error
    assert remains().nothing
