"""Test helpers: the command line as a real process, signals, waiting, and the resources left in the
account."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, NoReturn

import pytest
from support.pool import Pool
from support.processes import Process, zygote

ROOT = Path(__file__).parents[2]
TIMEOUT = 300  # a hang guard, not a measurement


def clean_environment(**extra: str) -> dict[str, str]:
    """The environment without variables of the developer's account, clusters or home, and of this run of
    tests."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("AWS_", "CLOUDDDP_", "TEST_"))}
    kept["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{kept['PATH']}"
    kept.update(
        AWS_EC2_METADATA_DISABLED="true", AWS_CONFIG_FILE=os.devnull, AWS_SHARED_CREDENTIALS_FILE=os.devnull
    )
    return {**kept, "OMP_NUM_THREADS": "1", **extra}


@dataclass
class CommandLine:
    """`cloudddp` as a user runs it: a process, in a project folder, with its own cluster name.

    It is forked from a process that has made the imports (zygote.py), or with `cold` started as a shell does.
    """

    cwd: Path
    cluster: str
    env: dict[str, str]
    pool: Pool | None = None
    started: list[Process | subprocess.Popen[str]] = field(default_factory=list)
    before_exec: Callable[[], object] | None = None
    shared: tuple[int, str] | None = None  # the size of the cluster, if it may be used by another test

    def nodes(self, count: int, instance_type: str = "g5.12xlarge") -> None:
        """Provide a cluster of this size: a clean one that an earlier test has used, or a new one."""
        assert self.pool is not None
        if found := self.pool.take(count, instance_type):
            self.cluster = self.env["CLOUDDDP_CLUSTER"] = found
        else:
            self.ok("up", "-n", str(count), "-t", instance_type)
        self.shared = (count, instance_type)

    def give_back(self) -> bool:
        """Return whether the cluster was kept for another test; otherwise it has to be removed."""
        return (
            self.pool is not None
            and self.shared is not None
            and self.pool.give_back(self.cluster, *self.shared)
        )

    def start(self, *words: str, cold: bool = False, **env: str) -> Process | subprocess.Popen[str]:
        argv, own = ("-m", "cloudddp", *words), {**self.env, **env}
        if cold or self.before_exec or not zygote().can_fork(argv, own):
            process: Process | subprocess.Popen[str] = self._start_cold(argv, own)
        else:
            process = zygote().start(argv, self.cwd, own)
        self.started.append(process)
        return process

    def _start_cold(self, argv: tuple[str, ...], env: dict[str, str]) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, *argv],
            cwd=self.cwd,
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            preexec_fn=self.before_exec,
        )

    def __call__(self, *words: str, **env: str) -> subprocess.CompletedProcess[str]:
        process = self.start(*words, **env)
        out, err = process.communicate(timeout=TIMEOUT)
        return subprocess.CompletedProcess(words, process.returncode, out, err)

    def to_files(self, folder: Path, *words: str) -> Process:
        """Run to the end, with the output in folder/out.txt and folder/err.txt; its peak memory is known
        then."""
        argv = ("-m", "cloudddp", *words)
        assert zygote().can_fork(argv, self.env)
        with (folder / "out.txt").open("wb") as out, (folder / "err.txt").open("wb") as err:
            process = zygote().start(argv, self.cwd, self.env, stdout=out, stderr=err)
        self.started.append(process)
        process.wait(2 * TIMEOUT)
        return process

    def exits(self, code: int, *words: str, **env: str) -> subprocess.CompletedProcess[str]:
        """Run, require this exit code."""
        done = self(*words, **env)
        assert done.returncode == code, f"{words}: exit {done.returncode}\n{done.stdout}\n{done.stderr}"
        return done

    def ok(self, *words: str, **env: str) -> str:
        """Run, require success, return stdout."""
        return self.exits(0, *words, **env).stdout

    def fails(self, code: int, *words: str, **env: str) -> str:
        """Run, require this exit code and no traceback, return stderr."""
        done = self.exits(code, *words, **env)
        assert "Traceback" not in done.stderr
        return done.stderr

    def messages(self, *words: str, **env: str) -> str:
        """Run, require success, return stderr."""
        return self.fails(0, *words, **env)

    def patient(self, seconds: float, *words: str) -> tuple[str, str]:
        """Run, require success, return (stdout, stderr). With another time limit for the nodes' reports
        before `down`: 5 s may be too short here."""
        code = (
            "from cloudddp.config import timing\ntiming.current = lambda: "
            f"timing.Timing(unsaved_work={seconds})\n"
            "from cloudddp.__main__ import main\nmain()"
        )
        return finished(self.start_code(code, *words), 0)

    def start_code(self, code: str, *words: str) -> Process:
        """Start Python code, with the words as its arguments."""
        argv = ("-c", code, *words)
        assert zygote().can_fork(argv, self.env)
        process = zygote().start(argv, self.cwd, self.env)
        self.started.append(process)
        return process

    def remove(self, ec2: Any, *options: str, **env: str) -> int:
        """Remove the cluster and return the exit code. Without one, `down` would search every region."""
        if remaining(ec2, self.cluster).nothing:
            return 0
        return self(*options, "down", "-y", **env).returncode

    def write(self, name: str, text: str) -> Path:
        path = self.cwd / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        return path

    def end(self) -> None:
        for process in self.started:
            if process.poll() is None:
                process.kill()
                process.communicate()


@dataclass
class Remains:
    """The resources of a cluster in the account, listed with plain boto3."""

    instances: list[str]
    groups: list[str]
    keys: list[str]
    volumes: list[str]
    interfaces: list[str]
    addresses: list[str]  # Elastic IPs
    placement_groups: list[str]

    @property
    def nothing(self) -> bool:
        return not any(getattr(self, field.name) for field in fields(self))


def listed_nodes(cli: CommandLine) -> list[dict[str, Any]]:
    """Return the nodes of the cluster as `status --json` lists them."""
    return list(json.loads(cli.ok("status", "--json"))[0]["nodes"])


def running_instances(ec2: Any, cluster: str) -> list[dict[str, Any]]:
    """Return the running instances of a cluster as DescribeInstances lists them."""
    where = [
        {"Name": "tag:cloudddp:cluster", "Values": [cluster]},
        {"Name": "instance-state-name", "Values": ["running"]},
    ]
    return [i for r in ec2.describe_instances(Filters=where)["Reservations"] for i in r["Instances"]]


def instances_of(ec2: Any, cluster: str) -> list[str]:
    """Return the ids of the cluster's instances that are not terminated."""
    where = [{"Name": "tag:cloudddp:cluster", "Values": [cluster]}]
    return [
        instance["InstanceId"]
        for reservation in ec2.describe_instances(Filters=where)["Reservations"]
        for instance in reservation["Instances"]
        if instance["State"]["Name"] != "terminated"
    ]


def remaining(ec2: Any, cluster: str) -> Remains:
    """Return the resources of a cluster. Most tests create none, and one call is enough to see that."""
    if not ec2.describe_tags(Filters=[{"Name": "value", "Values": [cluster]}])["Tags"]:
        return Remains([], [], [], [], [], [], [])
    where = [{"Name": "tag:cloudddp:cluster", "Values": [cluster]}]
    return Remains(
        instances_of(ec2, cluster),
        [group["GroupId"] for group in ec2.describe_security_groups(Filters=where)["SecurityGroups"]],
        [key["KeyName"] for key in ec2.describe_key_pairs(Filters=where)["KeyPairs"]],
        [volume["VolumeId"] for volume in ec2.describe_volumes(Filters=where)["Volumes"]],
        [
            interface["NetworkInterfaceId"]
            for interface in ec2.describe_network_interfaces(Filters=where)["NetworkInterfaces"]
        ],
        [address["AllocationId"] for address in ec2.describe_addresses(Filters=where)["Addresses"]],
        [group["GroupName"] for group in ec2.describe_placement_groups(Filters=where)["PlacementGroups"]],
    )


def until(condition: Callable[[], Any], seconds: float = TIMEOUT, *, why: str = "it is true") -> Any:
    """Poll until `condition()` is true and return it; fail with the message `why` after a time limit.

    The pauses are a multiple of the time that a look takes: many looks start processes.
    """
    deadline = time.monotonic() + seconds
    while True:
        began = time.monotonic()
        if value := condition():
            return value
        now = time.monotonic()
        assert now < deadline, f"did not happen within {seconds:g} s: {why}"
        time.sleep(min(2.0, max(0.05, 6 * (now - began))))


def wait_for(what: Callable[[], Any], why: str) -> Any:
    return until(what, why=why)


@contextmanager
def no_capacity(cli: CommandLine) -> Iterator[None]:
    """EC2 launches nothing inside the block. Not by the condition `capacity`, to which a node that is lost
    just before or inside the block adds its own."""
    answer = {"code": "InsufficientInstanceCapacity", "status": 500, "calls": 1000}
    cli.ok("sim", "conditions", json.dumps({"reject": {"RunInstances": answer}}))
    try:
        yield
    finally:
        cli.ok("sim", "conditions", "--clear")


def interrupt(process: Process | subprocess.Popen[str], number: int = signal.SIGINT) -> tuple[int, str, str]:
    """Send a signal; return (exit code, stdout, stderr)."""
    process.send_signal(number)
    out, err = process.communicate(timeout=TIMEOUT)
    return process.returncode, out, err


def finished(
    process: Process | subprocess.Popen[str], code: int, seconds: float = TIMEOUT
) -> tuple[str, str]:
    """Wait for the end of a process, require this exit code, return (stdout, stderr)."""
    out, err = process.communicate(timeout=seconds)
    assert process.returncode == code, f"exit {process.returncode}\n{out}\n{err}"
    return out, err


def lines_until(stream: Any, text: str, count: int = 1) -> str:
    """Read lines until `count` different ones contain a text; return all that were read."""
    seen: list[str] = []
    while len({line for line in seen if text in line}) < count:
        seen.append(stream.readline())
        assert seen[-1], seen
    return "".join(seen)


def cannot(reason: str) -> NoReturn:
    """Skip the test because a requirement is missing; in CI, where all must be installed, fail."""
    if os.environ.get("CI"):
        pytest.fail(f"missing in CI: {reason}")
    pytest.skip(reason)
