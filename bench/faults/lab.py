"""A cluster in the simulator, driven by the command line, and the processes of its jobs, from /proc here."""

from __future__ import annotations

import contextlib
import json
import shutil
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.harness import finished, run, script, start

INSTANCE_TYPE = "g5.12xlarge"
JOBS = "home/ubuntu/.cloudddp/jobs"  # on a node


@dataclass(frozen=True)
class Node:
    """A node of the lab. `init` is the pid of its first process, here."""

    instance: str
    address: str
    init: int
    net: str  # its network namespace

    @property
    def root(self) -> Path:
        return Path(f"/proc/{self.init}/root")

    @property
    def project(self) -> Path:
        return self.root / "home/ubuntu/project"

    def run(self, *command: str) -> str:
        """Run a command as root of the node."""
        return run(["nsenter", "-t", str(self.init), "-m", "-n", "-p", *command])


@dataclass(frozen=True)
class Proc:
    """A process of a job. `kind`: rank, wrapper, launcher or agent (guard and supervisor)."""

    pid: int
    kind: str
    node: int
    rank: int
    job: str


class Lab:
    """One cluster. `folder` is the project; a second client has a copy of the keys."""

    def __init__(self, env: dict[str, str], folder: Path, nodes: int, ranks: int) -> None:
        # Named here: by default the name is that of the folder, in which the second client is in another one.
        self.env = {**env, "CLOUDDDP_CLUSTER": "faults"}
        self.folder, self.count, self.ranks = folder, nodes, ranks
        self.nodes: list[Node] = []

    @property
    def shape(self) -> str:
        return f"{self.count} x {self.ranks}"

    @property
    def world_size(self) -> int:
        return self.count * self.ranks

    # -- commands --------------------------------------------------------------------------------------------

    def run(self, *words: str) -> subprocess.CompletedProcess[str]:
        """Run `cloudddp --sim`, and return how it ended."""
        return self._run("--sim", *words)

    def second(self, *words: str) -> subprocess.CompletedProcess[str]:
        """Run cloudddp as a client on another computer, in another folder."""
        home = self.folder / "second"
        if not home.exists():
            ignored = shutil.ignore_patterns("sim", "results", "*.sock")
            shutil.copytree(self.env["CLOUDDDP_HOME"], home, ignore=ignored)
        command = ["env", "-C", str(home), f"CLOUDDDP_HOME={home}", script("cloudddp"), *words]
        return self._run("sim", "exec", "--", *command)

    def ok(self, *words: str) -> str:
        """Run a command that has to succeed. Raises RuntimeError."""
        done = self._run(*words)
        if done.returncode:
            raise RuntimeError(f"{words}: exit {done.returncode}\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
        return done.stdout

    def _run(self, *words: str) -> subprocess.CompletedProcess[str]:
        return finished([script("cloudddp"), *words], env=self.env, cwd=self.folder, timeout=420)

    def start(self, *words: str) -> subprocess.Popen[str]:
        command, own = [script("cloudddp"), "--sim", *words], {"env": self.env, "cwd": self.folder}
        return start(command, stdout=subprocess.PIPE, start_new_session=True, **own)

    def fault(self, *words: str) -> None:
        """Cause a fault of the simulator; a number is a node."""
        named = (self.nodes[int(word)].instance if word.isdigit() else word for word in words)
        self.ok("sim", "fault", *named)

    def ec2(self) -> Any:
        """Return a client of the simulator's EC2."""
        import boto3

        keys = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY")
        session = boto3.Session(*(self.env[key] for key in keys), region_name=self.env["AWS_REGION"])
        return session.client("ec2", endpoint_url=self.env["AWS_ENDPOINT_URL"])

    # -- the cluster -----------------------------------------------------------------------------------------

    def up(self, *options: str) -> None:
        self.ok("--sim", "up", "-n", str(self.count), "-t", INSTANCE_TYPE, *options)
        shutil.rmtree(self.folder / "second", ignore_errors=True)
        ranks = [one["instance_id"] for one in json.loads(self.ok("--sim", "status", "--json"))[0]["nodes"]]
        known = {one["instance_id"]: one for one in json.loads(self.ok("sim", "status", "--json"))["nodes"]}
        self.nodes = []
        for instance in ranks:
            init = int(known[instance]["home"].split("/")[2])
            net = str(Path(f"/proc/{init}/ns/net").readlink())
            self.nodes.append(Node(instance, known[instance]["private_ip"], init, net))

    def down(self) -> None:
        """Remove the cluster, also one that a fault has removed in part."""
        done = self.run("down", "-y")
        if done.returncode and self.instances():
            raise RuntimeError(done.stderr)
        self.nodes = []

    def instances(self) -> list[str]:
        """Return the instances that have not ended."""
        live = [{"Name": "instance-state-name", "Values": ["pending", "running", "shutting-down"]}]
        found = self.ec2().describe_instances(Filters=live)["Reservations"]
        return [one["InstanceId"] for reservation in found for one in reservation["Instances"]]

    # -- jobs ------------------------------------------------------------------------------------------------

    def processes(self, job: str = "") -> list[Proc]:
        """Return the processes of a job on all nodes; of every job without `job`."""
        nodes = {one.net: rank for rank, one in enumerate(self.nodes)}
        found = []
        for entry in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError, IndexError, ValueError):
                node = nodes.get(str((entry / "ns/net").readlink()))
                one = None if node is None else _proc(entry, node)
                if one and job in ("", one.job):
                    found.append(one)
        return sorted(found, key=lambda one: (one.kind, one.rank, one.pid))

    def alive(self, job: str = "") -> list[Proc]:
        """Return the ranks among the processes."""
        return [process for process in self.processes(job) if process.kind == "rank"]

    def running_job(self, known: set[str]) -> str:
        """Return the id of a job whose guard runs on a node, '' while there is none that is not known."""
        agents = (
            process for process in self.processes() if process.kind == "agent" and process.job not in known
        )
        return next((agent.job for agent in agents), "")

    def known_jobs(self) -> set[str]:
        """Return the ids of the jobs that any node has a record of."""
        return {path.name for node in self.nodes for path in (node.root / JOBS).glob("2*")}

    def logs(self, job: str) -> Iterator[str]:
        """Yield the log of each rank, as it is on its node."""
        for node in self.nodes:
            for log in (node.root / JOBS / job / "ranks").glob("*.log"):
                with contextlib.suppress(OSError):
                    yield log.read_text(errors="replace")

    def steps(self, job: str, times: int = 1) -> bool:
        """Return whether every rank has made steps, in so many attempts."""
        logs = list(self.logs(job))
        return len(logs) == self.world_size and all(log.count("step 10") >= times for log in logs)

    def finish(self) -> None:
        """Let the script end by itself."""
        for node in self.nodes:
            with contextlib.suppress(OSError):
                (node.project / "enough").touch()

    def forget(self) -> None:
        """Remove what a job has left in the project on the nodes."""
        for node in self.nodes:
            for path in [node.project / "enough", *node.project.glob("snapshot-*")]:
                with contextlib.suppress(OSError):
                    path.unlink(missing_ok=True)


def _proc(entry: Path, node: int) -> Proc | None:
    """Return what a process is, None if it is of no job."""
    text = (entry / "cmdline").read_bytes().decode(errors="replace").replace("\0", " ")
    state = (entry / "stat").read_text().rsplit(")", 1)[1].split()[0]
    if state in "ZX" or not text:
        return None
    environ = (entry / "environ").read_bytes().decode(errors="replace")
    variables = dict(one.partition("=")[::2] for one in environ.split("\0"))
    log, job = (entry / "fd/1").readlink(), variables.get("CLOUDDDP_TASK", "").split("/")[0]
    if log.name == "supervisor.log":  # guard and supervisor write to a file in the job's folder
        kind, job = "agent", log.parent.name
    elif not job:
        return None
    elif "torch.distributed.run" in text:  # whose arguments name the wrapper
        kind = "launcher"
    else:
        kind = "wrapper" if f" rank {job}" in text else "rank"
    return Proc(int(entry.name), kind, node, int(variables.get("RANK", -1) or -1), job)


def until(condition: Any, seconds: float, what: str) -> Any:
    """Return the result of `condition` once it is true. Raises TimeoutError after `seconds`."""
    deadline = time.monotonic() + seconds
    while not (found := condition()):
        if time.monotonic() > deadline:
            raise TimeoutError(f"{what}: not within {seconds:g} s")
        time.sleep(0.05)
    return found
