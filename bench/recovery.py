"""From the loss of a node to the next training step, in the lab, and whether the weights in the end are those
of a run that was not interrupted.

A job of `train/` in float64 runs on 2 nodes x 2 ranks, detached, with snapshots on every node; `cloudddp
watch` follows it. EC2 terminates node 1 in the middle; `watch` replaces it and resumes the job. The parts are
the moments at which `watch` prints its steps, and those at which processes end and begin on the nodes.
"""

from __future__ import annotations

import shutil
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from bench.faults.lab import Lab, until
from bench.harness import ROOT, Options, simulator
from bench.tables import DOCS, conditions, load, table, write_between

GOAL = 15.0
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
sys.argv += '''
    --dataset synthetic --image-size 8 --synthetic-size 1280 --batch-size 16 --epochs 3 --save-every 5
    --snapshot-per-node --device cpu --no-tensorboard
'''.split()
signals.exit_silently_on_sigint()
exit_process(main())
"""
Moments = list[tuple[float, str]]  # seconds since the loss, and what had happened


def measure(lab: Lab) -> tuple[Moments, float]:
    """Return what happened from the loss to the next step, and the largest difference of a weight in the
    end."""
    launch = ("--nproc-per-node", str(lab.ranks), "script.py", "--out")
    lab.ok("--sim", "launch", *launch, "runs/whole")
    lab.ok("--sim", "pull", "--to", "whole")
    job = lab.ok("--sim", "launch", "-d", *launch, "runs/lost").strip()
    watch, lines = lab.start("watch", job), []
    reader = threading.Thread(target=lambda: lines.extend(_timed(watch)), daemon=True)
    reader.start()
    try:
        until(lambda: any("step 40" in log for log in lab.logs(job)), 120, "no steps")
        lost = time.monotonic()
        lab.ec2().terminate_instances(InstanceIds=[lab.nodes[1].instance])
        found = [(at - lost, what) for at, what in _observed(lab, job)]
        code = watch.wait(timeout=300)
        reader.join(10)
    finally:
        watch.kill()
    after = [(at - lost, line) for at, line in lines if at > lost]
    print(
        "\n".join(f"    {at:7.2f}  {line}" for at, line in after if not line.startswith("[rank")), flush=True
    )
    if code:
        raise RuntimeError(f"watch has exited with {code}")
    for start, what in STEPS.items():
        found += [(at, what) for at, line in after if start in line][:1]
    lab.ok("--sim", "pull", "--to", "lost")
    return sorted(found), difference(lab.folder / "whole", lab.folder / "lost")


def _timed(process: subprocess.Popen[str]) -> Moments:
    """Return the lines of a process, and when it printed them."""
    return [(time.monotonic(), line.rstrip()) for line in process.stdout or ()]


def _observed(lab: Lab, job: str) -> Iterator[tuple[float, str]]:
    """Yield when the ranks of the job had ended, when those of the next one began, and when it made its first
    step."""
    later = ""

    def resumed() -> str:
        nonlocal later
        later = lab.running_job({job})
        return later

    def runs(kind: str) -> Callable[[], bool]:
        return lambda: any(process.kind == kind for process in lab.processes(later))

    steps: tuple[tuple[Callable[[], Any], str], ...] = (
        (lambda: not lab.alive(job), "every rank of the job has ended"),
        (resumed, "the agent was started for the next job"),
        (runs("launcher"), "the agents are connected, and torchrun was started"),
        (runs("rank"), "torchrun has started the ranks"),
        (lambda: any("step 1 of" in log for log in lab.logs(later)), "the first step"),
    )
    for condition, what in steps:
        until(condition, 180, f"not yet: {what}")
        yield time.monotonic(), what
        del lab.nodes[1:]  # lost


def difference(whole: Path, lost: Path) -> float:
    """Return the largest difference of a weight between two results."""
    import torch

    first, second = (
        torch.load(next(one.rglob("snapshot.pt")), weights_only=True)["model"] for one in (whole, lost)
    )
    if first.keys() != second.keys():
        raise RuntimeError("the snapshots have different weights")
    return max(float((first[name] - second[name]).abs().max()) for name in first if first[name].numel())


def bench_recovery(options: Options) -> None:
    """From the loss of a node to the next training step, with `cloudddp watch`."""
    print("recovery: EC2 terminates node 1 of 2 x 2 ranks; `cloudddp watch` replaces it")
    before = load()
    with simulator("namespace") as env, tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "script.py").write_text(TRAIN)
        (folder / "cloudddp.toml").write_text('[job]\nsnapshots = ["runs/lost/*.pt"]\n')
        shutil.copytree(ROOT / "train", folder / "train", ignore=shutil.ignore_patterns("__pycache__"))
        lab = Lab(env, folder, 2, 2)
        lab.up()
        try:
            moments, differs = measure(lab)
        finally:
            lab.down()
    earlier = [0.0, *(at for at, _ in moments)]
    rows = [
        [f"{at:.1f}", f"{at - last:.1f}", what] for (at, what), last in zip(moments, earlier, strict=False)
    ]
    equal = "bit for bit" if not differs else f"but for {differs:.3g}"
    lines = [
        *table(["seconds since the loss", "took", "what"], rows),
        "",
        f"The weights in the end are equal to those of a run without a loss, {equal} (float64). One run, "
        + conditions(before),
    ]
    print("\n".join(lines))
    if options.write:
        write_between(DOCS / "faults.md", "python -m bench recovery", lines)
    if differs or moments[-1][0] > GOAL:
        raise SystemExit(f"recovery: {moments[-1][0]:.1f} s (goal: {GOAL:g}), difference {differs:.3g}")
