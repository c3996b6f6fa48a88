"""A cluster in the simulator, driven by the command line, and the processes of its jobs, from /proc of this computer."""

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

INSTANCE_TYPE = "g5.12xlarge"


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


@dataclass(frozen=True)
class Proc:
    """A process of a job. `kind`: rank, wrapper, launcher or agent (guard and supervisor)."""

    pid: int
    kind: str
    net: str
    rank: int


class Lab:
    """One cluster. `folder` is the project; a second client has a copy of the keys, as on another computer."""

    def __init__(self, program: str, env: dict[str, str], folder: Path, nodes: int, ranks: int) -> None:
        self.program, self.env, self.folder, self.count, self.ranks = program, env, folder, nodes, ranks
        self.nodes: list[Node] = []

    @property
    def shape(self) -> str:
        return f"{self.count} x {self.ranks}"

    def run(self, *words: str, timeout: float = 420.0) -> subprocess.CompletedProcess[str]:
        """Run `cloudddp --sim`, and return how it ended."""
        return self._run([self.program, "--sim", *words], timeout)

    def second(self, *words: str, timeout: float = 420.0) -> subprocess.CompletedProcess[str]:
        """Run cloudddp as a client on another computer, in another folder."""
        home = self.folder / "second"
        if not home.exists():
            shutil.copytree(
                self.env["CLOUDDDP_HOME"], home, ignore=shutil.ignore_patterns("sim", "results", "*.sock")
            )
        command = ["env", "-C", str(home), f"CLOUDDDP_HOME={home}", self.program, *words]
        return self._run([self.program, "sim", "exec", "--", *command], timeout)

    def sim(self, *words: str) -> str:
        done = self._run([self.program, "sim", *words], 120)
        if done.returncode:
            raise RuntimeError(done.stderr)
        return done.stdout

    def _run(self, command: list[str], timeout: float) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            command, env=self.env, cwd=self.folder, capture_output=True, text=True, timeout=timeout, check=False,
            stdin=subprocess.DEVNULL,
        )  # fmt: skip

    def start(self, *words: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [self.program, "--sim", *words], env=self.env, cwd=self.folder, stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True,
        )  # fmt: skip

    def ec2(self) -> Any:
        """Return a client of the simulator's EC2."""
        import boto3

        return boto3.client(
            "ec2", endpoint_url=self.env["AWS_ENDPOINT_URL"], region_name=self.env["AWS_REGION"],
            aws_access_key_id=self.env["AWS_ACCESS_KEY_ID"], aws_secret_access_key=self.env["AWS_SECRET_ACCESS_KEY"],
        )  # fmt: skip

    # -- the cluster ---------------------------------------------------------------------------------------------

    def up(self, *options: str) -> None:
        done = self.run("up", "-n", str(self.count), "-t", INSTANCE_TYPE, *options)
        if done.returncode:
            raise RuntimeError(done.stderr)
        shutil.rmtree(self.folder / "second", ignore_errors=True)
        self.look()

    def down(self) -> None:
        """Remove the cluster, also one that a fault has removed in part."""
        done = self.run("down", "-y")
        if done.returncode and self.instances():
            raise RuntimeError(done.stderr)
        self.nodes = []

    def look(self) -> None:
        """Read which nodes the cluster has."""
        ranks = [one["instance_id"] for one in json.loads(self.run("status", "--json").stdout)[0]["nodes"]]
        known = {one["instance_id"]: one for one in json.loads(self.sim("status", "--json"))["nodes"]}
        self.nodes = []
        for instance in ranks:
            init = int(known[instance]["home"].split("/")[2])
            net = str(Path(f"/proc/{init}/ns/net").readlink())
            self.nodes.append(Node(instance, known[instance]["private_ip"], init, net))

    def instances(self) -> list[str]:
        """Return the instances that have not ended."""
        live = [{"Name": "instance-state-name", "Values": ["pending", "running", "shutting-down"]}]
        found = self.ec2().describe_instances(Filters=live)["Reservations"]
        return [one["InstanceId"] for reservation in found for one in reservation["Instances"]]

    # -- jobs ----------------------------------------------------------------------------------------------------

    def processes(self, job: str = "") -> list[Proc]:
        """Return the processes of a job on all nodes; of every job without `job`."""
        nets = {one.net for one in self.nodes}
        found = []
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                with contextlib.suppress(OSError, IndexError, ValueError):
                    if (net := str((entry / "ns/net").readlink())) in nets and (
                        one := _proc(entry, net, job)
                    ):
                        found.append(one)
        return sorted(found, key=lambda one: (one.kind, one.rank, one.pid))

    def running_job(self, known: set[str]) -> str:
        """Return the id of a job whose guard runs on a node, '' while there is none that is not known."""
        nets = {one.net for one in self.nodes}
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                with contextlib.suppress(OSError):
                    if (
                        (job := job_of_agent(entry))
                        and job not in known
                        and str((entry / "ns/net").readlink()) in nets
                    ):
                        return job
        return ""

    def logs(self, job: str) -> Iterator[str]:
        """Yield the log of each rank, as it is on its node."""
        for node in self.nodes:
            for log in (node.root / "home/ubuntu/.cloudddp/jobs" / job / "ranks").glob("*.log"):
                with contextlib.suppress(OSError):
                    yield log.read_text(errors="replace")

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


def _proc(entry: Path, net: str, job: str) -> Proc | None:
    words = (entry / "cmdline").read_bytes().decode(errors="replace").split("\0")
    state = (entry / "stat").read_text().rsplit(")", 1)[1].split()[0]
    if state in "ZX" or not words[0]:
        return None
    environ = (entry / "environ").read_bytes().decode(errors="replace")
    variables = dict(one.partition("=")[::2] for one in environ.split("\0"))
    text, task, of_agent = " ".join(words), variables.get("CLOUDDDP_TASK", ""), job_of_agent(entry)
    if of_agent and (not job or of_agent == job):
        kind = "agent"
    elif not task or not task.startswith(f"{job}/" if job else ""):
        return None
    elif "torch.distributed.run" in text:  # whose arguments name the wrapper
        kind = "launcher"
    elif f".pyz rank {task.split('/')[0]}" in text:
        kind = "wrapper"
    else:
        kind = "rank"
    return Proc(int(entry.name), kind, net, int(variables.get("RANK", -1) or -1))


def job_of_agent(process: Path) -> str:
    """Return the job of a guard or a supervisor, '' for any other process: their stdout is a file in its folder."""
    log = (process / "fd/1").readlink()
    return log.parent.name if log.name == "supervisor.log" else ""


def until(condition: Any, seconds: float, what: str) -> Any:
    """Return the result of `condition` once it is true. Raises TimeoutError after `seconds`."""
    deadline = time.monotonic() + seconds
    while not (found := condition()):
        if time.monotonic() > deadline:
            raise TimeoutError(f"{what}: not within {seconds:g} s")
        time.sleep(0.05)
    return found
