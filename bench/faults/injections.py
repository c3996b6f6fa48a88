"""How the faults are caused, each a function of a Run: the lab, the job, its processes before the fault."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

from bench.faults.lab import Lab, Node, Proc
from bench.harness import run as run_command

OOM_GROUP = Path("/sys/fs/cgroup/memory/cloudddp-bench")  # cgroups of version 1; the kernel kills in it alone
OOM_BYTES = 256 << 20
# A clock that a file moves: a node shares the computer's, which nobody may set.
CLOCK = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>
static long ahead(void) { return access("/home/ubuntu/clock-is-ahead", F_OK) ? 0 : 3600; }
int clock_gettime(clockid_t id, struct timespec *t) {
    static int (*real)(clockid_t, struct timespec *);
    if (!real) real = dlsym(RTLD_NEXT, "clock_gettime");
    int code = real(id, t);
    if (!code && id == CLOCK_REALTIME) t->tv_sec += ahead();
    return code;
}
int gettimeofday(struct timeval *t, void *zone) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    t->tv_sec = now.tv_sec, t->tv_usec = now.tv_nsec / 1000;
    return 0;
}
time_t time(time_t *out) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    if (out) *out = now.tv_sec;
    return now.tv_sec;
}
"""


@dataclass(frozen=True)
class Run:
    lab: Lab
    job: str
    found: list[Proc]

    def of(self, kind: str, node: int) -> list[int]:
        """Return the pids of one kind on a node. The first agent is the guard, the last the supervisor."""
        return [one.pid for one in self.found if (one.kind, one.node) == (kind, node)]


Inject = Callable[[Run], None]
Prepare = Callable[[Lab], None]


def nothing(_: Run) -> None:
    """The script, or what was prepared before the job, is the fault."""


def send(kind: str, node: int, *, index: int | None = -1, number: int = signal.SIGKILL) -> Inject:
    """Send a signal to a process of a kind on a node, or to all of them without an index."""

    def inject(run: Run) -> None:
        pids = run.of(kind, node)
        for pid in pids if index is None else [pids[index]]:
            os.kill(pid, number)

    return inject


def kill_cloudddp(node: int) -> Inject:
    """Kill guard, supervisor and wrappers of a node."""

    def inject(run: Run) -> None:
        for pid in (*run.of("agent", node), *run.of("wrapper", node)):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    return inject


def on_node(node: int, *command: str) -> Inject:
    """Run a command as root of a node."""

    def inject(run: Run) -> None:
        run.lab.nodes[node].run(*command)

    return inject


def sim(*words: str) -> Inject:
    """A fault of the simulator; a number is a node."""
    return lambda run: run.lab.fault(*words)


def out_of_memory(node: int) -> Inject:
    """Give a rank a control group in which its next allocations do not fit."""

    def inject(run: Run) -> None:
        OOM_GROUP.mkdir(exist_ok=True)
        (OOM_GROUP / "memory.limit_in_bytes").write_text(str(OOM_BYTES))
        (OOM_GROUP / "cgroup.procs").write_text(str(run.of("rank", node)[0]))

    return inject


def remove_oom_group(_: Lab) -> None:
    with contextlib.suppress(OSError):
        OOM_GROUP.rmdir()


def interrupt_spot(run: Run) -> None:
    run.lab.ok("sim", "interrupt", run.lab.nodes[1].instance, "--seconds", "60")


def down_elsewhere(run: Run) -> None:
    """`down` of another client."""
    run.lab.second("down", "-y")


def clock_ahead(node: int) -> Inject:
    def inject(run: Run) -> None:
        for pid in (*run.of("agent", node), *run.of("rank", node)):
            if "clock.so" not in Path(f"/proc/{pid}/maps").read_text():
                raise RuntimeError(f"process {pid} does not use the clock that can be moved")
        (run.lab.nodes[node].root / "home/ubuntu/clock-is-ahead").touch()
        now = run.lab.nodes[node].run("date", "+%s")
        if abs(int(now) - time.time() - 3600) > 60:
            raise RuntimeError(f"the clock of node {node} has not moved: {now}")

    return inject


# -- before the job ------------------------------------------------------------------------------------------


def prepare_clock(lab: Lab) -> None:
    """Let the programs that start from now on ask a clock that can be moved."""
    source, library = lab.folder / "clock.c", lab.folder / "clock.so"
    source.write_text(CLOCK)
    run_command(["cc", "-shared", "-fPIC", "-O2", "-o", library, source, "-ldl"])
    for node in lab.nodes:
        shutil.copy(library, node.root / "home/ubuntu/clock.so")
        (node.root / "etc/ld.so.preload").write_text("/home/ubuntu/clock.so\n")


def reset_clock(lab: Lab) -> None:
    for node in lab.nodes:
        (node.root / "etc/ld.so.preload").unlink(missing_ok=True)
        (node.root / "home/ubuntu/clock-is-ahead").unlink(missing_ok=True)


def host_names(own: Callable[[Node], str]) -> Prepare:
    """Replace /etc/hosts of each node, which is read-only there, with localhost and a line more."""

    def prepare(lab: Lab) -> None:
        for node in lab.nodes:
            (node.root / "home/ubuntu/hosts").write_text(f"127.0.0.1 localhost\n{own(node)}")
            node.run("mount", "--bind", "/home/ubuntu/hosts", "/etc/hosts")

    return prepare


without_names = host_names(lambda _: "")
loopback_names = host_names(lambda node: f"127.0.1.1 ip-{node.address.replace('.', '-')}\n")


def cut_before(lab: Lab) -> None:
    lab.fault("cut-between", "0", "1")


def heal(lab: Lab) -> None:
    for node in range(lab.count):
        lab.fault("heal", str(node))


def only_rendezvous_port(lab: Lab) -> None:
    """The security group admits other nodes on port 29500 only."""
    ec2 = lab.ec2()
    instance = ec2.describe_instances(InstanceIds=[lab.nodes[0].instance])["Reservations"][0]["Instances"][0]
    (group,) = [one["GroupId"] for one in instance["SecurityGroups"]]
    rules = ec2.describe_security_groups(GroupIds=[group])["SecurityGroups"][0]["IpPermissions"]
    own = [rule for rule in rules if rule.get("UserIdGroupPairs")]
    ec2.revoke_security_group_ingress(GroupId=group, IpPermissions=own)
    one = {"IpProtocol": "tcp", "FromPort": 29500, "ToPort": 29500, "UserIdGroupPairs": [{"GroupId": group}]}
    ec2.authorize_security_group_ingress(GroupId=group, IpPermissions=[one])


def deadline_in(seconds: float) -> Prepare:
    """Change the deadline in the tags, which a job is started with: `up` refuses one that is near."""

    def prepare(lab: Lab) -> None:
        moment = f"{datetime.now(UTC) + timedelta(seconds=seconds):%Y-%m-%dT%H:%M:%SZ}"
        ids = [node.instance for node in lab.nodes]
        lab.ec2().create_tags(Resources=ids, Tags=[{"Key": "cloudddp:expires", "Value": moment}])

    return prepare


def failing_setup(lab: Lab) -> None:
    (lab.folder / "cloudddp.toml").write_text('[setup]\nrun = ["echo installing; exit 7"]\n')


def no_setup(lab: Lab) -> None:
    (lab.folder / "cloudddp.toml").unlink(missing_ok=True)
