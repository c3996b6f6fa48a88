"""Runs a job into a fault, and returns what came of it."""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

from bench.faults.cases import Fault, Then
from bench.faults.injections import Run
from bench.faults.lab import Lab, Proc, until

GONE = 120.0  # seconds after which a rank counts as left
START = 90.0  # seconds for a job to make its first steps
WATCH = 25.0  # seconds for which a job has to go on: longer than any limit of the agents
ENDS = 30.0  # seconds for all other processes of a job to end
FIRST_STEPS = "step 10"  # in the log of a rank


@dataclass
class Row:
    """`seconds`: from the fault to the end of the last rank; from the command to its end, if no rank was to start.
    `left`: processes of the job in the end. `state`: of `jobs`. `problems`: what is not as expected."""

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


class Started:
    """A job that was launched, in the foreground or detached."""

    def __init__(self, lab: Lab, fault: Fault, *, attached: bool) -> None:
        self.lab = lab
        known = {str(one["id"]) for one in _jobs(lab.run("jobs", "--json"))}
        words = [
            "--nproc-per-node",
            str(lab.ranks),
            *fault.launch,
            "script.py",
            *filter(None, [fault.script]),
        ]
        self.began = time.monotonic()
        self.process: subprocess.Popen[str] | None = None
        self.output, self.code, self.job = "", 0, ""
        if attached:
            self.process = lab.start("launch", *words)
            process = self.process
            until(lambda: self._find(known) or process.poll() is not None, START, "the job has not started")
        else:
            done = lab.run("launch", "-d", *words)
            self.output, self.code = done.stdout + done.stderr, done.returncode
            self.job = done.stdout.strip()

    def _find(self, known: set[str]) -> bool:
        self.job = self.lab.running_job(known)
        return bool(self.job)

    def ended(self) -> None:
        """Wait for the end of the command; ask a new one, if the job was detached."""
        if self.process is not None:
            self.output = self.process.communicate(timeout=420)[0]
            self.code = self.process.returncode
        elif not self.code:
            done = self.lab.run("logs", "-f", self.job)
            self.output, self.code = done.stdout + done.stderr, done.returncode


def measure(lab: Lab, fault: Fault, *, attached: bool) -> Row:
    """Run a job into the fault."""
    row = Row(fault.name, lab.shape, attached)
    lab.forget()
    fault.prepare(lab)
    started = Started(lab, fault, attached=attached)
    run: Run | None = None
    try:
        if fault.then is not Then.NEVER_STARTS:
            run = Run(lab, started.job, _ranks_run(lab, started.job, steps=fault.then is not Then.SUCCEEDS))
            _into(run, fault, row)
        started.ended()
    finally:
        if started.process is not None and started.process.poll() is None:
            started.process.kill()
    if run is None:
        row.seconds = time.monotonic() - started.began
    row.exit_code = started.code
    row.says = sentence(started.output, started.job)
    _ask_others(lab, fault, started, row)
    row.left = _left(lab, fault)
    _judge(fault, row)
    return row


def _ranks_run(lab: Lab, job: str, *, steps: bool) -> list[Proc]:
    """Wait until every rank runs; return the processes. With `steps` until each has made steps, unless it ends before."""
    deadline = time.monotonic() + START
    most: list[Proc] = []
    while time.monotonic() < deadline:
        found = lab.processes(job)
        ranks = _ranks(found)
        if len(ranks) >= len(_ranks(most)):
            most = found
        if len(ranks) == lab.count * lab.ranks and (not steps or _steps(lab, job)):
            return found
        if len(ranks) < len(_ranks(most)):  # one has failed already: the fault is its own
            return most
        time.sleep(0.05)
    raise TimeoutError(f"{job}: {len(_ranks(most))} ranks within {START:g} s")


def _ranks(found: list[Proc]) -> list[Proc]:
    return [one for one in found if one.kind == "rank"]


def _steps(lab: Lab, job: str, times: int = 1) -> bool:
    logs = list(lab.logs(job))
    return len(logs) == lab.count * lab.ranks and all(log.count(FIRST_STEPS) >= times for log in logs)


def _into(run: Run, fault: Fault, row: Row) -> None:
    """Inject the fault, and wait for what is to follow."""
    lab, before = run.lab, {one.pid for one in _ranks(run.found)}
    began = time.monotonic()
    fault.inject(run)
    if fault.then in (Then.GOES_ON, Then.SUCCEEDS):
        time.sleep(WATCH if fault.then is Then.GOES_ON else 0)
        alive = {one.pid for one in _ranks(lab.processes(run.job))}
        row.went_on = fault.then is Then.SUCCEEDS or alive == before
        if fault.script != "no-barrier":
            until(lambda: _steps(lab, run.job) or not lab.processes(run.job), START, "no steps")
            lab.finish()
        until(lambda: not _ranks(lab.processes(run.job)), GONE, "the job does not end")
        return
    if fault.inject.__name__ == "nothing":  # the script's own: it counts from the end of the first rank
        until(lambda: not before <= {one.pid for one in lab.processes(run.job)}, GONE, "no rank has ended")
        began = time.monotonic()
    ignored = lab.nodes[fault.frozen].net if fault.frozen is not None else ""
    _wait_gone(run, row, before, began, ignored)
    if fault.thaws:
        until(lambda: _decided(run, ignored), GONE, "no verdict")
        began = time.monotonic()
        lab.sim("fault", "heal", lab.nodes[fault.frozen or 0].instance)
        _wait_gone(run, row, before, began, "")
    if fault.then is Then.RESTARTS:
        until(lambda: _steps(lab, run.job, 2), START, "no steps after the restart")
        row.again = time.monotonic() - began
        lab.finish()


def _wait_gone(run: Run, row: Row, before: set[int], began: float, ignored: str) -> None:
    """Wait until the ranks of the first attempt have ended."""
    while True:
        alive = [
            one for one in _ranks(run.lab.processes(run.job)) if one.net != ignored and one.pid in before
        ]
        row.seconds = time.monotonic() - began
        if row.seconds > GONE:
            run.lab.run("cancel", run.job)
            raise TimeoutError(f"{len(alive)} ranks were alive {GONE:g} s later")
        if not alive:
            return
        time.sleep(0.02)


def _decided(run: Run, ignored: str) -> bool:
    """Whether the agents of the other nodes have ended."""
    return not [one for one in run.lab.processes(run.job) if one.net != ignored]


def sentence(output: str, job: str) -> str:
    """Return what a command says at the end about a job."""
    lines = output.splitlines()
    found = [line for line in lines if line.startswith("cloudddp: job") or " finished: " in line]
    found = found or [line for line in lines if line.startswith("cloudddp: ")]
    text = (found or lines or [""])[-1].removeprefix("cloudddp: ")
    return text.replace(job, "JOB") if job else text


def _jobs(done: subprocess.CompletedProcess[str]) -> list[dict[str, object]]:
    try:
        return list(json.loads(done.stdout))
    except ValueError:
        return []


def _ask_others(lab: Lab, fault: Fault, started: Started, row: Row) -> None:
    """Compare what two clients say: `jobs` of each, and `logs -f` of the second one."""
    if not started.job or not lab.instances():
        return
    answers = []
    for ask in (lab.run, lab.second):
        found = [one for one in _jobs(ask("jobs", "--json")) if one["id"] == started.job]
        answers.append((str(found[0]["state"]), found[0]["exit_code"]) if found else ("unknown", None))
    row.state = answers[0][0]
    if answers[0] != answers[1]:
        row.problems.append(f"two clients differ: {answers[0]}, {answers[1]}")
    if fault.then is Then.NEVER_STARTS and started.code and row.state == "unknown":
        return
    done = lab.second("logs", "-f", started.job)
    other = sentence(done.stdout + done.stderr, started.job)
    if fault.then is not Then.NEVER_STARTS and _stem(other) != _stem(row.says):
        row.problems.append(f"another client says: {other}")
    if done.returncode != row.exit_code and not {done.returncode, row.exit_code} <= set(fault.codes):
        row.problems.append(f"another client exits with {done.returncode}")


def _stem(text: str) -> str:
    """Return a sentence without what depends on the time."""
    return text if " finished" not in text else ""


def _left(lab: Lab, fault: Fault) -> int:
    """Return how many processes of any job are left on the nodes."""
    frozen = lab.nodes[fault.frozen].net if fault.frozen is not None and not fault.thaws else ""

    def alive() -> list[Proc]:
        return [one for one in lab.processes() if one.net != frozen]

    deadline = time.monotonic() + ENDS
    while alive() and time.monotonic() < deadline:
        time.sleep(0.2)
    return len(alive())


def _judge(fault: Fault, row: Row) -> None:
    fails = fault.then in (Then.ENDS, Then.NEVER_STARTS)
    if fails and not row.exit_code:
        row.problems.append("exit code 0")
    if not fails and row.exit_code not in (fault.codes or (0,)):
        row.problems.append(f"exit code {row.exit_code}, expected 0")
    if fails and fault.codes and row.exit_code not in fault.codes:
        row.problems.append(f"exit code {row.exit_code}, expected {fault.codes}")
    if fault.then in (Then.ENDS, Then.RESTARTS, Then.NEVER_STARTS) and row.seconds > fault.goal:
        row.problems.append(f"{row.seconds:.1f} s, the goal is {fault.goal:g} s")
    if fault.then is Then.GOES_ON and not row.went_on:
        row.problems.append("the job has ended")
    if row.left:
        row.problems.append(f"{row.left} processes left")


def rows(lab: Lab, faults: list[Fault]) -> Iterator[Row]:
    """Yield two rows for each fault: in the foreground, and detached with nobody connected."""
    up: tuple[str, ...] | None = None
    try:
        for fault in faults:
            for attached in (True, False):
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
