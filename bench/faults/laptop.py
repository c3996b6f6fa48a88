"""The laptop is killed, at random moments of `launch`: what is left on the nodes."""

from __future__ import annotations

import os
import random
import signal
import time

from bench.faults.document import LAPTOP
from bench.faults.lab import Lab, until
from bench.faults.measure import Row

MOMENTS = 10
SETTLED = 60.0  # seconds until a job runs on every node, or on none


def kill_at_moments(lab: Lab, seed: int) -> Row:
    """Kill `launch` with SIGKILL at ten moments: half of them before the job has begun on a node, which takes
    a fraction of the time, the others until its first steps.

    Afterwards either every rank of the job trains, and ends it with exit code 0, or no process is left on any
    node.
    """
    row = Row(LAPTOP, lab.shape, attached=True, exit_code=-signal.SIGKILL, went_on=True)
    print(f"  seed {seed}", flush=True)
    lab.up()
    try:
        whole, begun = _time_launch(lab)
        moments, trained = random.Random(seed), 0
        for number in range(MOMENTS):
            after = moments.uniform(0, begun if number % 2 == 0 else whole)
            try:
                outcome = _settled(lab, _launch(lab, after))
            except TimeoutError as error:
                row.problems.append(f"killed after {after:.2f} s: {error}")
                outcome = "half"
            print(f"  killed after {after:.2f} s: {outcome}", flush=True)
            trained += outcome == "trained"
            row.left += len(lab.processes())
            if outcome == "half":
                lab.run("cancel")
        rest = f"{MOMENTS - trained} had not begun; seed {seed}"
        row.says = f"of {MOMENTS} jobs {trained} trained on to their end, and {rest}"
    finally:
        lab.down()
    return row


def _time_launch(lab: Lab) -> tuple[float, float]:
    """Launch a job to its end. Return the seconds until it made steps, and until it had begun on a node."""
    known, began = lab.known_jobs(), time.monotonic()
    process = lab.start("launch", "--nproc-per-node", str(lab.ranks), "script.py")
    job: str = until(lambda: lab.running_job(known), 60, "the job has not started")
    begun = time.monotonic() - began
    until(lambda: lab.steps(job), 60, "the job makes no steps")
    seconds = time.monotonic() - began
    lab.finish()
    process.communicate(timeout=SETTLED)
    return seconds, begun


def _launch(lab: Lab, after: float) -> str:
    """Launch a job, and kill the command and its children. Return the job, '' if none has begun."""
    lab.forget()
    known = lab.known_jobs()
    process = lab.start("launch", "--nproc-per-node", str(lab.ranks), "script.py")
    time.sleep(after)
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()
    time.sleep(1)  # a request that has arrived becomes a job
    return lab.running_job(known)


def _settled(lab: Lab, job: str) -> str:
    """Return `trained` once the job has made steps on every node and ended, `nothing` if none has begun."""

    def runs_or_ended() -> str:
        if job and lab.steps(job):
            return "trained"
        return "" if lab.processes() else "nothing"

    outcome: str = until(runs_or_ended, SETTLED, "ranks run on some nodes only")
    if outcome == "trained":
        alive = len(lab.alive(job))
        if alive != lab.world_size:
            raise TimeoutError(f"{alive} ranks are left")
        lab.finish()
    until(lambda: not lab.processes(), SETTLED, "processes are left")
    return outcome
