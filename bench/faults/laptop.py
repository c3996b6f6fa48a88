"""The laptop is killed, at random moments of `launch`: what is left on the nodes."""

from __future__ import annotations

import os
import random
import signal
import time

from bench.faults.document import LAPTOP
from bench.faults.lab import Lab, until
from bench.faults.measure import Row, _ranks, _steps

MOMENTS = 10
SETTLED = 60.0  # seconds until a job runs on every node, or on none


def kill_at_moments(lab: Lab, seed: int) -> Row:
    """Kill `launch` with SIGKILL at ten moments: half of them before the job has begun on a node, which takes a fraction of
    the time, the others until its first steps.

    Afterwards either every rank of the job trains, and ends it with exit code 0, or no process is left on any node.
    """
    row = Row(LAPTOP, lab.shape, attached=True, exit_code=-signal.SIGKILL)
    print(f"  seed {seed}", flush=True)
    lab.up()
    try:
        whole, begun, _ = _launch(lab, None)
        moments = random.Random(seed)
        trained = 0
        for number in range(MOMENTS):
            span = begun if number % 2 == 0 else whole
            after = moments.uniform(0, span)
            _, _, job = _launch(lab, after)
            try:
                outcome = _settled(lab, job)
            except TimeoutError as error:
                row.problems.append(f"killed after {after:.2f} s: {error}")
                outcome = "half"
            print(f"  killed after {after:.2f} s of {span:.2f}: {outcome}", flush=True)
            trained += outcome == "trained"
            row.left += len(lab.processes())
            if outcome == "half":
                lab.run("cancel")
        row.says = f"of {MOMENTS} jobs {trained} trained on to their end, and {MOMENTS - trained} had not begun; seed {seed}"
        row.went_on = True
    finally:
        lab.down()
    return row


def _launch(lab: Lab, after: float | None) -> tuple[float, float, str]:
    """Launch a job, and kill the command and its children after some seconds; without, once the job makes steps.

    Return the seconds that passed, those until the job had begun on a node, and the job, '' if none has begun.
    """
    lab.forget()
    known = {
        path.name for node in lab.nodes for path in (node.root / "home/ubuntu/.cloudddp/jobs").glob("2*")
    }
    began = time.monotonic()
    process = lab.start("launch", "--nproc-per-node", str(lab.ranks), "script.py")
    begun = 0.0
    if after is None:
        job: str = until(lambda: lab.running_job(known), 60, "the job has not started")
        begun = time.monotonic() - began
        until(lambda: _steps(lab, job), 60, "the job makes no steps")
    else:
        time.sleep(after)
    seconds = time.monotonic() - began
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()
    if after is None:
        lab.finish()
        until(lambda: not lab.processes(), SETTLED, "the job does not end")
    time.sleep(1)  # a request that has arrived becomes a job
    return seconds, begun, lab.running_job(known)


def _settled(lab: Lab, job: str) -> str:
    """Return `trained` once the job has made steps on every node and has ended, or `nothing` if it has not begun."""
    if job:

        def runs_or_ended() -> str:
            if _steps(lab, job):
                return "trained"
            return "" if lab.processes() else "nothing"

        outcome: str = until(runs_or_ended, SETTLED, "ranks run on some nodes only")
        alive = len(_ranks(lab.processes(job)))
        if outcome == "trained" and alive != lab.count * lab.ranks:
            raise TimeoutError(f"{alive} ranks are left")
        lab.finish()
    else:
        outcome = "nothing"
    until(lambda: not lab.processes(), SETTLED, "processes are left")
    return outcome
