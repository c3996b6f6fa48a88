"""Faults of a job in the lab: what the command says, how long the last rank lives, and the exit code.

`python -m bench faults` creates two clusters in the simulator, 2 nodes x 2 ranks and 4 x 1, and runs a job of gloo for
each fault, in the foreground and detached with nobody connected. It prints the table of docs/faults.md.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

GONE_SECONDS = 120.0  # a rank that lives longer is reported as alive
TRAINING = """
import datetime, os, sys, time
import torch, torch.distributed as d
mode = sys.argv[1] if len(sys.argv) > 1 else ""
d.init_process_group("gloo", timeout=datetime.timedelta(seconds=300))
rank, total = d.get_rank(), torch.ones(1)
for step in range(100000):
    d.all_reduce(total)
    if step % 10 == 0:
        print("step", step, flush=True)
    if mode == "early" and rank == 1 and step == 20:
        os._exit(0)
    if mode == "disk" and rank == 1 and step == 20:
        open("/home/ubuntu/snapshot", "wb").write(bytes(1 << 26))
    if mode == "error" and rank == 2 and step == 20:
        raise RuntimeError("a bug of the user")
    time.sleep(0.1)
"""


@dataclass(frozen=True)
class Proc:
    """A process of a job. `kind`: rank, wrapper, launcher or agent (guard and supervisor)."""

    pid: int
    kind: str
    net: str  # the network namespace of its node
    rank: int


def processes(job: str) -> list[Proc]:
    """Return the processes of a job on all nodes, from /proc of this computer."""
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        with contextlib.suppress(OSError):
            words = (entry / "cmdline").read_bytes().decode(errors="replace").split("\0")
            state = (entry / "stat").read_text().rsplit(")", 1)[1].split()[0]
            if state in "ZX" or not words[0]:
                continue
            variables = dict(
                one.partition("=")[::2]
                for one in (entry / "environ").read_bytes().decode(errors="replace").split("\0")
            )
            net = str((entry / "ns" / "net").readlink())
            text = " ".join(words)
            if _job_of_agent(entry) == job:
                kind = "agent"
            elif not variables.get("CLOUDDDP_TASK", "").startswith(f"{job}/"):
                continue
            elif "torch.distributed.run" in text:  # whose arguments name the wrapper
                kind = "launcher"
            elif f".pyz rank {job}" in text:
                kind = "wrapper"
            else:
                kind = "rank"
            found.append(Proc(int(entry.name), kind, net, int(variables.get("RANK", -1) or -1)))
    return sorted(found, key=lambda one: (one.kind, one.rank, one.pid))


@dataclass(frozen=True)
class Fault:
    """A fault: `inject` gets the lab and the processes of the job. `script` is the argument of the training."""

    name: str
    inject: Callable[[Lab, list[Proc]], None]
    script: str = ""
    wide: bool = False  # also on 4 nodes x 1 rank


class Lab:
    """One cluster, driven by the command line."""

    def __init__(self, program: str, env: dict[str, str], folder: Path, nodes: int, ranks: int) -> None:
        self.program, self.env, self.folder, self.nodes, self.ranks = program, env, folder, nodes, ranks

    def run(self, *words: str, timeout: float = 300.0) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [self.program, "--sim", *words], env=self.env, cwd=self.folder, capture_output=True, text=True,
            timeout=timeout, check=False, stdin=subprocess.DEVNULL,
        )  # fmt: skip

    def fault(self, *words: str) -> None:
        done = subprocess.run(
            [self.program, "sim", "fault", *words], env=self.env, cwd=self.folder, capture_output=True,
            text=True, check=False,
        )  # fmt: skip
        if done.returncode:
            raise RuntimeError(done.stderr)

    @contextlib.contextmanager
    def cluster(self) -> Iterator[None]:
        done = self.run("up", "-n", str(self.nodes), "-t", "g5.12xlarge")
        if done.returncode:
            raise RuntimeError(done.stderr)
        try:
            yield
        finally:
            self.run("down", "-y")


def nodes_of(found: list[Proc]) -> list[str]:
    """Return the network namespaces of the nodes, in order of their ranks."""
    return list(dict.fromkeys(one.net for one in sorted(found, key=lambda p: p.rank) if one.kind == "rank"))


def _kill(kind: str, node: int, number: int = signal.SIGKILL) -> Callable[[Lab, list[Proc]], None]:
    """Kill one process of a kind on a node; of the agents the supervisor, the child of the guard."""

    def inject(_: Lab, found: list[Proc]) -> None:
        there = [one for one in found if one.kind == kind and one.net == nodes_of(found)[node]]
        os.kill(there[-1].pid, number)

    return inject


def _kill_all(node: int) -> Callable[[Lab, list[Proc]], None]:
    """Kill everything of cloudddp on a node: guard, supervisor and wrappers."""

    def inject(_: Lab, found: list[Proc]) -> None:
        for one in found:
            if one.kind in ("agent", "wrapper") and one.net == nodes_of(found)[node]:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(one.pid, signal.SIGKILL)

    return inject


def _kill_guard(node: int) -> Callable[[Lab, list[Proc]], None]:
    """Kill the guard, the parent of the supervisor."""

    def inject(_: Lab, found: list[Proc]) -> None:
        there = [one for one in found if one.kind == "agent" and one.net == nodes_of(found)[node]]
        os.kill(there[0].pid, signal.SIGKILL)

    return inject


def _kill_agents(node: int) -> Callable[[Lab, list[Proc]], None]:
    def inject(_: Lab, found: list[Proc]) -> None:
        for one in found:
            if one.kind == "agent" and one.net == nodes_of(found)[node]:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(one.pid, signal.SIGKILL)

    return inject


def _kill_sshd(node: int) -> Callable[[Lab, list[Proc]], None]:
    """Kill every sshd of a node: the job has to go on. It is ended with a rank's exception later."""

    def inject(_: Lab, found: list[Proc]) -> None:
        net = nodes_of(found)[node]
        for entry in Path("/proc").iterdir():
            with contextlib.suppress(OSError):
                there = entry.name.isdigit() and str((entry / "ns" / "net").readlink()) == net
                if there and (entry / "comm").read_text().startswith("sshd"):
                    os.kill(int(entry.name), signal.SIGKILL)
        time.sleep(25)  # longer than any limit of the agents
        alive = [one for one in processes(_job_of(found)) if one.kind == "rank"]
        if len(alive) != len([one for one in found if one.kind == "rank"]):
            raise RuntimeError("the job has ended because of sshd")
        os.kill(alive[0].pid, signal.SIGKILL)

    return inject


def _job_of(found: list[Proc]) -> str:
    return _job_of_agent(Path("/proc", str(next(one.pid for one in found if one.kind == "agent"))))


def _job_of_agent(process: Path) -> str:
    """Return the job of a guard or a supervisor, '' for any other process: their stdout is a file in its folder."""
    log = (process / "fd" / "1").readlink()
    return log.parent.name if log.name == "supervisor.log" else ""


def _sim(*words: str) -> Callable[[Lab, list[Proc]], None]:
    return lambda lab, _: lab.fault(*words)


def _nothing(_: Lab, __: list[Proc]) -> None:
    pass


FAULTS = (
    Fault("kill -9 of a rank", _kill("rank", 1)),
    Fault("kill -9 of torchrun", _kill("launcher", 1)),
    Fault("kill -9 of torchrun on node 0", _kill("launcher", 0)),
    Fault("kill -9 of the supervisor", _kill("agent", 1)),
    Fault("kill -9 of all of cloudddp on a node", _kill_all(1)),
    Fault("a rank raises an exception", _nothing, "error"),
    Fault("a rank exits 0 early", _nothing, "early"),
    Fault("kill -9 of the guard", _kill_guard(1)),
    Fault("kill -9 of guard and supervisor", _kill_agents(1)),
    Fault("kill -9 of sshd", _kill_sshd(1)),
    Fault("cut between two nodes", _sim("cut-between", "0", "1"), wide=True),
    Fault("cut one way", _sim("cut-from", "0", "1"), wide=True),
    Fault("a node loses its network", _sim("cut", "1"), wide=True),
    Fault("a node is frozen", _sim("freeze", "1"), wide=True),
    Fault("a node dies", _sim("kill", "1"), wide=True),
)


@dataclass(frozen=True)
class Row:
    fault: str
    shape: str
    attached: bool
    seconds: float  # from the fault to the last rank gone
    left: int  # ranks alive after GONE_SECONDS
    says: str
    exit_code: int
    answered: float  # seconds from there until the command has ended


def measure(lab: Lab, fault: Fault, *, attached: bool) -> Row:
    """Run a job, inject the fault, and return what came of it."""
    words = [
        "launch",
        "--nproc-per-node",
        str(lab.ranks),
        "train.py",
        *([fault.script] if fault.script else []),
    ]
    command = [lab.program, "--sim", *words[:1], *([] if attached else ["-d"]), *words[1:]]
    process = subprocess.Popen(
        command, env=lab.env, cwd=lab.folder, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    job, found = "", []
    deadline = time.monotonic() + 90
    if not attached:
        output = process.communicate(timeout=90)[0]
        job = next(line for line in output.splitlines() if line.startswith("20") and line.count("-") == 2)
    while len([one for one in found if one.kind == "rank"]) < lab.nodes * lab.ranks:
        if time.monotonic() > deadline:
            raise RuntimeError(f"{fault.name}: the job did not start: {process.poll()}")
        if not job:
            job = _running_job()
        time.sleep(0.2)
        found = processes(job) if job else []
    time.sleep(0.0 if fault.script else 6.0)  # torch is imported, and steps are made
    if fault.script:
        _until_step(lab, job)
    began = time.monotonic()
    fault.inject(lab, found)
    frozen = nodes_of(found)[1] if "frozen" in fault.name or "dies" in fault.name else ""
    while True:
        alive = [one for one in processes(job) if one.kind == "rank" and one.net != frozen]
        seconds = time.monotonic() - began
        if not alive or seconds > GONE_SECONDS:
            break
        time.sleep(0.05)
    ended = time.monotonic()
    if attached:
        output = process.communicate(timeout=300)[0]
        code = process.returncode
    else:
        time.sleep(3)
        done = lab.run("logs", "-f", job)
        output, code = done.stdout + done.stderr, done.returncode
    lines = [
        line for line in output.splitlines() if line.startswith("cloudddp: job") or " finished: " in line
    ]
    answered = time.monotonic() - ended
    return Row(
        fault.name, f"{lab.nodes} x {lab.ranks}", attached, seconds, len(alive),
        (lines[-1] if lines else output.splitlines()[-1] if output else "").removeprefix("cloudddp: ").replace(job, "JOB"), code,
        answered,
    )  # fmt: skip


def _running_job() -> str:
    """Return the id of a job whose guard runs on a node of the lab."""
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                if job := _job_of_agent(entry):
                    return job
    return ""


def _until_step(lab: Lab, job: str) -> None:
    """Wait until the script's own fault is near: its ranks have made their first steps."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        if "step 0" in lab.run("logs", job).stdout:
            return
        time.sleep(0.1)


def rows(program: str, env: dict[str, str], folder: Path, only: str = "") -> Iterator[Row]:
    """Yield a row for each fault and shape, in the foreground and detached."""
    (folder / "train.py").write_text(TRAINING)
    for nodes, ranks in ((2, 2), (4, 1)):
        chosen = [one for one in FAULTS if (nodes == 2 or one.wide) and only in one.name]
        for fault in chosen:
            for attached in (True, False):
                lab = Lab(program, env, folder, nodes, ranks)
                with lab.cluster():
                    yield measure(lab, fault, attached=attached)


def table(found: list[Row]) -> str:
    head = "| fault | nodes x ranks | the command says | connected: s, exit | detached: s, exit |\n|---|---|---|---|---|\n"
    lines = []
    for row in found:
        if not row.attached:
            continue
        other = next(
            (one for one in found if not one.attached and (one.fault, one.shape) == (row.fault, row.shape)),
            None,
        )
        shown = [
            f"{one.seconds:.1f}, {one.exit_code}"
            if not one.left
            else f"{one.left} alive after {one.seconds:.0f}"
            for one in (row, other)
            if one is not None
        ]
        lines.append(f"| {row.fault} | {row.shape} | {row.says} | {' | '.join(shown)} |")
    return head + "\n".join(lines)
