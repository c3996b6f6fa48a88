"""Runs a job into a fault, and returns what came of it."""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from bench.faults.cases import Fault, Then
from bench.faults.injections import Run
from bench.faults.lab import Lab, Proc, until

GONE = 120.0  # seconds after which a rank counts as left
START = 90.0  # seconds for a job to make its first steps
WATCH = 25.0  # seconds for which a job has to go on: longer than any limit of the agents
ENDS = 30.0  # seconds for all other processes of a job to end


@dataclass
class Row:
    """`seconds`: from the fault to the end of the last rank; from the command to its end, if no rank was to
    start. `left`: processes of the job in the end. `state`: of `jobs`. `problems`: what is not as
    expected."""

    fault: str
    shape: str
    attached: bool
    seconds: float = 0.0
    again: float | None = None  # seconds until a restarted job made steps
    went_on: bool = False
    left: int = 0
    says: str = ""
    exit_code: int | None = None
    state: str = ""
    problems: list[str] = field(default_factory=list)

    @property
    def result(self) -> str:
        """Seconds and exit code, as the table has them."""
        if self.exit_code is None:
            return "; ".join(self.problems) or "-"
        seconds = "goes on" if self.went_on else f"{self.seconds:.1f}"
        again = "" if self.again is None else f", again after {self.again:.1f}"
        return f"{seconds}{again}, {self.exit_code}"


class Started:
    """A job that was launched, in the foreground or detached."""

    def __init__(self, lab: Lab, fault: Fault, *, attached: bool) -> None:
        self.lab = lab
        known = lab.known_jobs()
        words = ("--nproc-per-node", str(lab.ranks), *fault.launch, "script.py", *fault.script.split())
        self.began = time.monotonic()
        self.process: subprocess.Popen[str] | None = None
        self.output, self.code, self.job = "", 0, ""
        if attached:
            process = self.process = lab.start("launch", *words)
            found = until(
                lambda: lab.running_job(known) or process.poll() is not None, START, "the job has not started"
            )
            self.job = found if isinstance(found, str) else ""
        else:
            self._ended(lab.run("launch", "-d", *words))
            self.job = self.output.splitlines()[0] if self.output and not self.code else ""

    def _ended(self, done: subprocess.CompletedProcess[str]) -> None:
        self.output, self.code = done.stdout + done.stderr, done.returncode

    def wait(self) -> None:
        """Wait for the end of the command; ask a new one, if the job was detached."""
        if self.process is not None:
            self.output = self.process.communicate(timeout=420)[0]
            self.code = self.process.returncode
        elif not self.code:
            self._ended(self.lab.run("logs", "-f", self.job))

    def kill(self) -> None:
        if self.process is not None and self.process.poll() is None:
            self.process.kill()


def measure(lab: Lab, fault: Fault, *, attached: bool) -> Row:
    """Run a job into the fault."""
    row = Row(fault.name, lab.shape, attached)
    lab.forget()
    fault.prepare(lab)
    started = Started(lab, fault, attached=attached)
    try:
        if fault.then is not Then.NEVER_STARTS:
            found = _ranks_run(lab, started.job, steps=fault.then is not Then.SUCCEEDS)
            _into(Run(lab, started.job, found), fault, row)
        started.wait()
    finally:
        started.kill()
    if fault.then is Then.NEVER_STARTS:
        row.seconds = time.monotonic() - started.began
    row.exit_code = started.code
    row.says = sentence(started.output, started.job)
    _ask_others(lab, fault, started, row)
    row.left = _left(lab, fault)
    row.problems += _problems(fault, row)
    return row


def _ranks_run(lab: Lab, job: str, *, steps: bool) -> list[Proc]:
    """Wait until every rank runs; return the processes. With `steps` until each has made steps, unless it
    ends before."""
    most: list[Proc] = []

    def ranks(found: list[Proc]) -> int:
        return sum(one.kind == "rank" for one in found)

    def all_run() -> bool:
        nonlocal most
        found = lab.processes(job)
        if ranks(found) < ranks(most):  # one has failed already: the fault is its own
            return True
        most = found
        return ranks(found) == lab.world_size and (not steps or lab.steps(job))

    until(all_run, START, f"{job}: not every rank runs")
    return most


def _into(run: Run, fault: Fault, row: Row) -> None:
    """Inject the fault, and wait for what is to follow."""
    lab, before = run.lab, {one.pid for one in run.found if one.kind == "rank"}
    began = time.monotonic()
    fault.inject(run)
    if fault.then in (Then.GOES_ON, Then.SUCCEEDS):
        time.sleep(WATCH if fault.then is Then.GOES_ON else 0)
        row.went_on = fault.then is Then.SUCCEEDS or {one.pid for one in lab.alive(run.job)} == before
        if fault.script != "no-barrier":
            until(lambda: lab.steps(run.job) or not lab.processes(run.job), START, "no steps")
            lab.finish()
        until(lambda: not lab.alive(run.job), GONE, "the job does not end")
        return
    if fault.inject.__name__ == "nothing":  # the script's own: it counts from the end of the first rank
        until(
            lambda: not before <= {process.pid for process in lab.processes(run.job)},
            GONE,
            "no rank has ended",
        )
        began = time.monotonic()
    row.seconds = _wait_gone(run, before, began, fault.frozen)
    if fault.thaws:
        others = _except(run.lab, fault.frozen, run.job)
        until(lambda: not others(), GONE, "no verdict")
        began = time.monotonic()
        lab.fault("heal", str(fault.frozen))
        row.seconds = _wait_gone(run, before, began, None)
    if fault.then is Then.RESTARTS:
        until(lambda: lab.steps(run.job, 2), START, "no steps after the restart")
        row.again = time.monotonic() - began
        lab.finish()


def _wait_gone(run: Run, before: set[int], began: float, frozen: int | None) -> float:
    """Return the seconds until the ranks of the first attempt have ended, but for those of a frozen node."""
    while [one for one in run.lab.alive(run.job) if one.node != frozen and one.pid in before]:
        if time.monotonic() - began > GONE:
            run.lab.run("cancel", run.job)
            raise TimeoutError(f"ranks were alive {GONE:g} s later")
        time.sleep(0.02)
    return time.monotonic() - began


def _except(lab: Lab, frozen: int | None, job: str = "") -> Callable[[], list[Proc]]:
    """Return a function that returns the processes of the nodes that are not frozen."""
    return lambda: [process for process in lab.processes(job) if process.node != frozen]


def sentence(output: str, job: str) -> str:
    """Return what a command says at the end about a job."""
    lines = output.splitlines()
    found = [line for line in lines if line.startswith("cloudddp: job") or " finished: " in line]
    found = found or [line for line in lines if line.startswith("cloudddp: ")]
    text = (found or lines or [""])[-1].removeprefix("cloudddp: ")
    return text.replace(job, "JOB") if job else text


def _listed(done: subprocess.CompletedProcess[str], job: str) -> tuple[str, Any]:
    """Return the state and the exit code of a job in the answer of `jobs --json`."""
    try:
        (found,) = (load for load in json.loads(done.stdout) if load["id"] == job)
    except ValueError:
        return "unknown", None
    return str(found["state"]), found["exit_code"]


def _ask_others(lab: Lab, fault: Fault, started: Started, row: Row) -> None:
    """Compare what two clients say: `jobs` of each, and `logs -f` of the second one."""
    if not started.job or not lab.instances():
        return
    first, second = (_listed(ask("jobs", "--json"), started.job) for ask in (lab.run, lab.second))
    row.state = first[0]
    if first != second:
        row.problems.append(f"two clients differ: {first}, {second}")
    if fault.then is Then.NEVER_STARTS and started.code and row.state == "unknown":
        return
    done = lab.second("logs", "-f", started.job)
    other = sentence(done.stdout + done.stderr, started.job)
    # A sentence with " finished" has the seconds that a job took.
    if fault.then is not Then.NEVER_STARTS and other != row.says and " finished" not in other + row.says:
        row.problems.append(f"another client says: {other}")
    if done.returncode != row.exit_code and not {done.returncode, row.exit_code} <= set(fault.codes):
        row.problems.append(f"another client exits with {done.returncode}")


def _left(lab: Lab, fault: Fault) -> int:
    """Return how many processes of any job are left on the nodes."""
    alive = _except(lab, None if fault.thaws else fault.frozen)
    deadline = time.monotonic() + ENDS
    while alive() and time.monotonic() < deadline:
        time.sleep(0.2)
    return len(alive())


def _problems(fault: Fault, row: Row) -> Iterator[str]:
    """Yield what is not as expected."""
    if fault.then in (Then.ENDS, Then.NEVER_STARTS):
        if not row.exit_code:
            yield "exit code 0"
        if fault.codes and row.exit_code not in fault.codes:
            yield f"exit code {row.exit_code}, expected {fault.codes}"
    elif row.exit_code not in (fault.codes or (0,)):
        yield f"exit code {row.exit_code}, expected 0"
    if fault.then in (Then.ENDS, Then.RESTARTS, Then.NEVER_STARTS) and row.seconds > fault.goal:
        yield f"{row.seconds:.1f} s, the goal is {fault.goal:g} s"
    if fault.then is Then.GOES_ON and not row.went_on:
        yield "the job has ended"
    if row.left:
        yield f"{row.left} processes left"


def rows(lab: Lab, faults: list[Fault]) -> Iterator[Row]:
    """Yield two rows for each fault: in the foreground, and detached with nobody connected."""
    up: tuple[str, ...] | None = None
    try:
        for fault, attached in ((fault, attached) for fault in faults for attached in (True, False)):
            if up != fault.up:
                if up is not None:
                    lab.down()
                lab.up(*fault.up)
                up = fault.up
            try:
                row = measure(lab, fault, attached=attached)
                fault.restore(lab)
            except (OSError, RuntimeError, subprocess.SubprocessError) as error:
                row = Row(fault.name, lab.shape, attached, problems=[str(error)])
            yield row
            if fault.destroys or row.problems:
                lab.down()
                up = None
    finally:
        if up is not None:
            lab.down()
