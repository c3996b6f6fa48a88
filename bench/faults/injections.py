"""How the faults are caused, each a function of a Run: the lab, the job, and its processes before the fault."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

from bench.faults.lab import Lab, Node, Proc

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

    def of(self, kind: str, node: int) -> list[Proc]:
        net = self.lab.nodes[node].net
        return [one for one in self.found if one.kind == kind and one.net == net]


Inject = Callable[[Run], None]
Prepare = Callable[[Lab], None]


def _kill_pids(pids: list[int], number: int = signal.SIGKILL) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def nothing(_: Run) -> None:
    """The script, or what was prepared before the job, is the fault."""


def kill(kind: str, node: int, *, index: int | None = -1) -> Inject:
    """Kill a process of a kind on a node, or all of them without an index. Of the agents, 0 is the guard, -1 the supervisor."""

    def inject(run: Run) -> None:
        there = run.of(kind, node)
        _kill_pids([one.pid for one in (there if index is None else [there[index]])])

    return inject


def stop_supervisor(node: int) -> Inject:
    """Stop the supervisor of a node: it lives, and does nothing."""

    def inject(run: Run) -> None:
        os.kill(run.of("agent", node)[-1].pid, signal.SIGSTOP)

    return inject


def kill_cloudddp(node: int) -> Inject:
    """Kill guard, supervisor and wrappers of a node."""

    def inject(run: Run) -> None:
        _kill_pids([one.pid for kind in ("agent", "wrapper") for one in run.of(kind, node)])

    return inject


def _namespace(pid: int, kind: str) -> str:
    return str(Path(f"/proc/{pid}/ns/{kind}").readlink())


def _pids_in(net: str) -> list[int]:
    found = []
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if entry.name.isdigit() and _namespace(int(entry.name), "net") == net:
                found.append(int(entry.name))
    return found


def kill_sshd(node: int) -> Inject:
    """Kill every process of OpenSSH on a node."""

    def inject(run: Run) -> None:
        for pid in _pids_in(run.lab.nodes[node].net):
            with contextlib.suppress(OSError):
                if Path(f"/proc/{pid}/comm").read_text().startswith("sshd"):
                    os.kill(pid, signal.SIGKILL)

    return inject


def kill_everything(node: int) -> Inject:
    """`kill -9 -1` of a node's root: every process but the first one."""

    def inject(run: Run) -> None:
        there = run.lab.nodes[node]
        pid_space = _namespace(there.init, "pid")
        for pid in _pids_in(there.net):
            with contextlib.suppress(OSError):
                if pid != there.init and _namespace(pid, "pid") == pid_space:
                    os.kill(pid, signal.SIGKILL)

    return inject


def sim(*words: str) -> Inject:
    """A fault of the simulator; a number is a node."""
    return lambda run: _sim(run.lab, *words)


def _sim(lab: Lab, *words: str) -> None:
    lab.sim(*(lab.nodes[int(word)].instance if word.isdigit() else word for word in words))


def interface_down(node: int) -> Inject:
    def inject(run: Run) -> None:
        command = ["nsenter", "-t", str(run.lab.nodes[node].init), "-n", "ip", "link", "set", "ens5", "down"]
        subprocess.run(command, check=True)

    return inject


def out_of_memory(node: int) -> Inject:
    """Give a rank a control group in which its next allocations do not fit."""

    def inject(run: Run) -> None:
        OOM_GROUP.mkdir(exist_ok=True)
        (OOM_GROUP / "memory.limit_in_bytes").write_text(str(OOM_BYTES))
        (OOM_GROUP / "cgroup.procs").write_text(str(run.of("rank", node)[0].pid))

    return inject


def remove_oom_group(_: Lab) -> None:
    with contextlib.suppress(OSError):
        OOM_GROUP.rmdir()


def interrupt_spot(run: Run) -> None:
    run.lab.sim("interrupt", run.lab.nodes[1].instance, "--seconds", "60")


def down_elsewhere(run: Run) -> None:
    """`down` of another client."""
    run.lab.second("down", "-y")


def clock_ahead(node: int) -> Inject:
    def inject(run: Run) -> None:
        for one in (*run.of("agent", node), *run.of("rank", node)):
            if "clock.so" not in Path(f"/proc/{one.pid}/maps").read_text():
                raise RuntimeError(f"the {one.kind} does not use the clock that can be moved")
        (run.lab.nodes[node].root / "home/ubuntu/clock-is-ahead").touch()
        command = ["nsenter", "-t", str(run.of("rank", node)[0].pid), "-m", "date", "+%s"]
        now = subprocess.run(command, check=True, capture_output=True, text=True).stdout
        if abs(int(now) - time.time() - 3600) > 60:
            raise RuntimeError(f"the clock of node {node} has not moved: {now}")

    return inject


# -- before the job ----------------------------------------------------------------------------------------------


def prepare_clock(lab: Lab) -> None:
    """Let the programs that start from now on ask a clock that can be moved."""
    source, library = lab.folder / "clock.c", lab.folder / "clock.so"
    source.write_text(CLOCK)
    subprocess.run(["cc", "-shared", "-fPIC", "-O2", "-o", library, source, "-ldl"], check=True)
    for node in lab.nodes:
        shutil.copy(library, node.root / "home/ubuntu/clock.so")
        (node.root / "etc/ld.so.preload").write_text("/home/ubuntu/clock.so\n")


def reset_clock(lab: Lab) -> None:
    for node in lab.nodes:
        (node.root / "etc/ld.so.preload").unlink(missing_ok=True)
        (node.root / "home/ubuntu/clock-is-ahead").unlink(missing_ok=True)


def _replace_hosts(lab: Lab, text: Callable[[Node], str]) -> None:
    """Replace /etc/hosts of each node, which is read-only there."""
    for node in lab.nodes:
        (node.root / "home/ubuntu/hosts").write_text(text(node))
        command = [
            "nsenter",
            "-t",
            str(node.init),
            "-m",
            "mount",
            "--bind",
            "/home/ubuntu/hosts",
            "/etc/hosts",
        ]
        subprocess.run(command, check=True)


def without_names(lab: Lab) -> None:
    """No node can resolve the host name of another one, nor its own."""
    _replace_hosts(lab, lambda _: "127.0.0.1 localhost\n")


def loopback_names(lab: Lab) -> None:
    """As Debian: a node's own name is 127.0.1.1."""

    def text(node: Node) -> str:
        return f"127.0.0.1 localhost\n127.0.1.1 ip-{node.address.replace('.', '-')}\n"

    _replace_hosts(lab, text)


def cut_before(lab: Lab) -> None:
    _sim(lab, "fault", "cut-between", "0", "1")


def heal(lab: Lab) -> None:
    for node in lab.nodes:
        lab.sim("fault", "heal", node.instance)


def only_rendezvous_port(lab: Lab) -> None:
    """The security group admits other nodes on port 29500 only."""
    ec2 = lab.ec2()
    instance = ec2.describe_instances(InstanceIds=[lab.nodes[0].instance])["Reservations"][0]["Instances"][0]
    (group,) = [one["GroupId"] for one in instance["SecurityGroups"]]
    rules = ec2.describe_security_groups(GroupIds=[group])["SecurityGroups"][0]["IpPermissions"]
    own = [one for one in rules if one.get("UserIdGroupPairs")]
    ec2.revoke_security_group_ingress(GroupId=group, IpPermissions=own)
    one = {"IpProtocol": "tcp", "FromPort": 29500, "ToPort": 29500, "UserIdGroupPairs": [{"GroupId": group}]}
    ec2.authorize_security_group_ingress(GroupId=group, IpPermissions=[one])


def deadline_in(seconds: float) -> Prepare:
    """Change the deadline in the tags, which a job is started with: `up` refuses one that is near."""

    def prepare(lab: Lab) -> None:
        moment = f"{datetime.now(UTC) + timedelta(seconds=seconds):%Y-%m-%dT%H:%M:%SZ}"
        ids = [one.instance for one in lab.nodes]
        lab.ec2().create_tags(Resources=ids, Tags=[{"Key": "cloudddp:expires", "Value": moment}])

    return prepare


def failing_setup(lab: Lab) -> None:
    (lab.folder / "cloudddp.toml").write_text('[setup]\nrun = ["echo installing; exit 7"]\n')


def no_setup(lab: Lab) -> None:
    (lab.folder / "cloudddp.toml").unlink(missing_ok=True)
