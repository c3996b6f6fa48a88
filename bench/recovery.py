"""From the loss of a node to the next training step, in the lab, and whether the weights in the end are those of a run that
was not interrupted.

A job of `train/` in float64 runs on 2 nodes x 2 ranks, detached, with snapshots on every node; `cloudddp watch` follows it.
EC2 terminates node 1 in the middle; `watch` replaces it and resumes the job. The parts are the moments at which `watch`
prints its steps, and those at which processes end and begin on the nodes.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path

from bench.common import ROOT, replace_between, script, simulator
from bench.faults.lab import Lab, until

GOAL = 15.0
LOST_AT = "step 40"
# The beginning of what `watch` prints, and what has happened by then.
STEPS = {
    "has lost a node; resuming": "`watch` has learned from EC2 that the node has ended",
    "launching node": "the job has ended on every node, and the cluster was looked up",
    "nodes running: 1": "EC2 has launched the new node",
    "waiting for SSH": "EC2 says that it runs",
    "checking GPUs": "SSH answers",
    "resuming job": "its GPUs and its deadline were checked",
    "starting": "the project was synced",
}
TRAIN = """
import sys, time, torch
from torch.optim import optimizer
from train import signals
from train.main import main
from train.process_exit import exit_process
torch.set_default_dtype(torch.float64)
count = 0
def after_step(*_):
    global count
    count += 1
    if count == 1 or count % 20 == 0:
        print("step", count, "of this attempt", flush=True)
    time.sleep(0.03)
optimizer.register_optimizer_step_post_hook(after_step)
signals.exit_silently_on_sigint()
exit_process(main())
"""
FLAGS = (
    "--dataset", "synthetic", "--image-size", "8", "--synthetic-size", "1280", "--batch-size", "16", "--epochs", "3",
    "--save-every", "5", "--snapshot-per-node", "--device", "cpu", "--no-tensorboard",
)  # fmt: skip


@dataclass(frozen=True)
class Moment:
    """What had happened, and when, in seconds since the loss."""

    at: float
    what: str


class Watch:
    """`cloudddp watch`, and when it printed each line."""

    def __init__(self, lab: Lab, job: str) -> None:
        self.lines: list[tuple[float, str]] = []
        self.process = lab.start("watch", job)
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append((time.monotonic(), line.rstrip()))

    def wait(self) -> int:
        code = self.process.wait(timeout=300)
        self._reader.join(10)
        return code


def measure(lab: Lab, *, verbose: bool = False) -> tuple[list[Moment], float]:
    """Return what happened from the loss to the next step, and the largest difference of a weight in the end."""
    _done(lab.run("launch", "--nproc-per-node", str(lab.ranks), "script.py", *FLAGS, "--out", "runs/whole"))
    _done(lab.run("pull", "--to", "whole"))
    launched = lab.run(
        "launch", "-d", "--nproc-per-node", str(lab.ranks), "script.py", *FLAGS, "--out", "runs/lost"
    )
    _done(launched)
    job = launched.stdout.strip()
    watch = Watch(lab, job)
    try:
        until(lambda: any(LOST_AT in log for log in lab.logs(job)), 120, "no steps")
        lost = time.monotonic()
        lab.ec2().terminate_instances(InstanceIds=[lab.nodes[1].instance])
        found = _observe(lab, job, lost)
        code = watch.wait()
    finally:
        if watch.process.poll() is None:
            watch.process.kill()
    if verbose or code:
        shown = [(at - lost, line) for at, line in watch.lines if at > lost and not line.startswith("[rank")]
        print("\n".join(f"    {at:7.2f}  {line}" for at, line in shown), flush=True)
    if code:
        raise RuntimeError(f"watch has exited with {code}")
    for start, what in STEPS.items():
        at = next((at for at, line in watch.lines if at > lost and start in line), None)
        if at is not None:
            found.append(Moment(at - lost, what))
    _done(lab.run("pull", "--to", "lost"))
    return sorted(found, key=lambda one: one.at), difference(lab.folder / "whole", lab.folder / "lost")


def _done(done: subprocess.CompletedProcess[str]) -> None:
    if done.returncode:
        raise RuntimeError(f"{done.args}: exit {done.returncode}\n{done.stdout[-2000:]}{done.stderr[-2000:]}")


def _observe(lab: Lab, job: str, lost: float) -> list[Moment]:
    """Return when the ranks of the job had ended, when those of the next one began, and when it made its first step."""
    found = []

    def reached(what: str) -> None:
        found.append(Moment(time.monotonic() - lost, what))

    until(lambda: not [one for one in lab.processes(job) if one.kind == "rank"], 120, "ranks do not end")
    reached("every rank of the job has ended")
    del lab.nodes[1]
    later: str = until(lambda: lab.running_job({job}), 180, "the job is not resumed")
    reached("the agent was started for the next job")
    until(
        lambda: [one for one in lab.processes(later) if one.kind == "launcher"], 60, "torchrun is not started"
    )
    reached("the agents are connected, and torchrun was started")
    until(lambda: [one for one in lab.processes(later) if one.kind == "rank"], 60, "no rank is started")
    reached("torchrun has started the ranks")
    until(lambda: any("step 1 of" in log for log in lab.logs(later)), 120, "no step")
    reached("the first step")
    return found


def difference(whole: Path, lost: Path) -> float:
    """Return the largest difference of a weight between two results."""
    import torch

    first, second = (
        torch.load(next(one.rglob("snapshot.pt")), weights_only=True)["model"] for one in (whole, lost)
    )
    if first.keys() != second.keys():
        raise RuntimeError("the snapshots have different weights")
    return max(float((first[name] - second[name]).abs().max()) for name in first if first[name].numel())


def bench(*, write: bool) -> None:
    """Lose a node, and print what happened until the next step; exit with 1 above the goal or if weights differ."""
    print(
        "recovery: node 1 of 2 x 2 ranks is terminated by EC2; `cloudddp watch` replaces it; seconds since the loss"
    )
    load = os.getloadavg()[0]
    with simulator("namespace") as (found, env), tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "script.py").write_text(TRAIN)
        (Path(folder) / "cloudddp.toml").write_text('[job]\nsnapshots = ["runs/lost/*.pt"]\n')
        shutil.copytree(ROOT / "train", Path(folder) / "train", ignore=shutil.ignore_patterns("__pycache__"))
        inside = {**env, "CLOUDDDP_HOME": str(found.home), "CLOUDDDP_YES": "1", "OMP_NUM_THREADS": "1"}
        lab = Lab(script("cloudddp"), inside, Path(folder), 2, 2)
        lab.up()
        try:
            moments, differs = measure(lab, verbose=True)
        finally:
            lab.down()
    lines = ["| seconds since the loss | took | what |", "|---|---|---|"]
    for before, one in zip([Moment(0.0, ""), *moments], moments, strict=False):
        lines.append(f"| {one.at:.1f} | {one.at - before.at:.1f} | {one.what} |")
    equal = "bit for bit" if not differs else f"but for {differs:.3g}"
    lines += [
        "",
        f"The weights in the end are equal to those of a run without a loss, {equal} (float64). One run, "
        f"{time.strftime('%Y-%m-%d')}, {os.cpu_count()} processors, load average {load:.1f} "
        f"before and {os.getloadavg()[0]:.1f} after.",
    ]
    print("\n".join(lines))
    if write:
        page = ROOT / "docs" / "faults.md"
        page.write_text(replace_between(page.read_text(), "python -m bench recovery", lines))
    if differs or moments[-1].at > GOAL:
        raise SystemExit(f"recovery: {moments[-1].at:.1f} s (goal: {GOAL:g}), difference {differs:.3g}")
