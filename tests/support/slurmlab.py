"""A real Slurm in namespaces: a head node with slurmctld, and compute nodes with slurmd; munge on all of
them.

Each host has a network, host name, process ids and mounts of its own; all share this computer's files, as a
cluster shares its file system. The first process of a host takes all others with it, so each host ends with
one process of this one.

As on Debian, a node's own name means 127.0.1.1 there, and each node has one more interface, which leads
nowhere: a job that does not choose its address and interface cannot connect.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from support.harness import cannot, wait_for

PROGRAMS = dict.fromkeys(("slurmctld", "slurmd", "sbatch"), "slurm-wlm") | {
    "munged": "munge",
    "ip": "iproute2",
}
PROGRAMS |= dict.fromkeys(("nsenter", "setpriv", "unshare"), "util-linux")
HEAD = "head"
NODES = {"n0": "ens5", "n1": "eth1"}  # the interface of each: the names differ
GPUS = 2  # of each node, for Slurm: files stand for them
TIMEOUT = 300.0  # of one command; a hang guard
KILL_WAIT = 5  # seconds between SIGTERM and SIGKILL; 30 by default
CONFIGURATION = """\
ClusterName=lab
SlurmctldHost={head}({head_address})
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
# A requeued job waits for as long as credentials are valid: 120 s by default.
AuthInfo=cred_expire=5
MpiDefault=none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
GresTypes=gpu
SchedulerType=sched/builtin
SchedulerParameters=sched_interval=1,sched_min_interval=100000
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
ReturnToService=2
KillWait={kill_wait}
MessageTimeout=5
SlurmdTimeout={lost_after}
SlurmctldPidFile={folder}/slurmctld.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmdLogFile={folder}/slurmd-%n.log
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
{nodes}
PartitionName=main Nodes=ALL Default=YES MaxTime=60 State=UP
"""


def _program(name: str) -> str | None:
    return shutil.which(name, path=f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin")


def require() -> None:
    """Skip the test where it cannot run; in CI, fail."""
    if os.getuid():
        # Slurm's daemons call setgroups(), which the user namespace of an ordinary user refuses.
        cannot("Slurm's daemons must run as root")
    missing = sorted({package for program, package in PROGRAMS.items() if _program(program) is None})
    if missing:
        cannot(f"not installed: {', '.join(missing)} (apt-get install {' '.join(missing)})")
    words = "unshare --net --mount ip link add trial type bridge".split()
    tried = subprocess.run(words, capture_output=True, text=True, timeout=TIMEOUT, check=False)
    if tried.returncode:
        cannot(f"namespaces or bridges are refused: {tried.stderr.strip()}")


@dataclass
class Host:
    """A host: `keeper` is this process's child, `first` the host's process 1 by its id outside."""

    name: str
    address: str
    keeper: subprocess.Popen[bytes]
    first: int
    folder: Path
    daemons: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def inside(self, *command: str) -> list[str]:
        # nsenter --mount changes to the root folder.
        enter = f"nsenter --target={self.first} --net --mount --uts --ipc --pid -- env".split()
        return [*enter, f"--chdir={self.folder}", *command]

    def end(self) -> None:
        self.keeper.kill()
        self.keeper.wait()
        for daemon in self.daemons:
            daemon.wait(TIMEOUT)
        self.daemons.clear()


class SlurmLab:
    """`folder` holds Slurm's files, `project` is the shared folder in which jobs are submitted. `lost_after`:
    seconds without an answer after which Slurm says that a node is down."""

    def __init__(self, folder: Path, env: Mapping[str, str], *, lost_after: int = 8) -> None:
        self.lost_after = lost_after
        self.folder, self.project = folder, folder / "project"
        self.env = {**env, "PATH": f"{env['PATH']}:/usr/sbin:/sbin", "SLURM_CONF": str(folder / "slurm.conf")}
        self.hosts: dict[str, Host] = {}
        self._network: subprocess.Popen[bytes] | None = None

    # -- start and end

    def start(self) -> None:
        for path in (self.project, self.folder / "state"):
            path.mkdir(parents=True)
        key = self.folder / "munge.key"
        key.write_bytes(os.urandom(128))
        key.chmod(0o600)
        self._configure()
        ready = self.folder / "network-exists"  # before, nsenter would enter this computer's own network
        self._network = self._keep(
            "unshare", "--net", "--mount", "bash", "-ec", 'touch "$0"; exec sleep infinity', str(ready)
        )
        wait_for(ready.exists, "the lab's network")
        self._in_network("ip", "link", "add", "bridge", "type", "bridge")
        self._in_network("ip", "link", "set", "bridge", "up")
        self.boot(HEAD)
        for name in NODES:
            self.boot(name)
        self.wait_until_idle()

    def end(self) -> None:
        for host in self.hosts.values():
            host.end()
        if self._network is not None:
            self._network.kill()
            self._network.wait()

    def _configure(self) -> None:
        addresses = {name: self._address(name) for name in (HEAD, *NODES)}
        nodes = [
            f"NodeName={n} NodeAddr={n} CPUs={os.cpu_count()} RealMemory=100 Gres=gpu:{GPUS} State=UNKNOWN"
            for n in NODES
        ]
        given = {"head": HEAD, "head_address": addresses[HEAD], "kill_wait": KILL_WAIT, "folder": self.folder}
        given |= {"lost_after": self.lost_after, "nodes": "\n".join(nodes)}
        (self.folder / "slurm.conf").write_text(CONFIGURATION.format(**given))
        for number in range(GPUS):
            (self.folder / f"gpu{number}").touch()
        (self.folder / "gres.conf").write_text(f"Name=gpu File={self.folder}/gpu[0-{GPUS - 1}]\n")
        for own in addresses:
            lines = ["127.0.0.1 localhost", f"127.0.1.1 {own}"]
            lines += [f"{address} {name}" for name, address in addresses.items() if name != own]
            (self.folder / f"hosts-{own}").write_text("\n".join(lines) + "\n")

    @staticmethod
    def _address(name: str) -> str:
        return f"10.77.0.{10 + (HEAD, *NODES).index(name)}"

    @staticmethod
    def _hardware_address(name: str) -> str:
        return f"02:00:0a:4d:00:{10 + (HEAD, *NODES).index(name):02x}"

    def _keep(self, *command: str) -> subprocess.Popen[bytes]:
        """Start a process that ends with this one, however this one ends."""
        words, nothing = ["setpriv", "--pdeathsig=KILL", *command], subprocess.DEVNULL
        with (self.folder / "hosts.log").open("ab") as log:
            return subprocess.Popen(
                words, env=self.env, cwd=self.folder, stdin=nothing, stdout=log, stderr=log
            )

    def _in_network(self, *command: str, check: bool = True) -> subprocess.CompletedProcess[str]:
        assert self._network is not None
        words = ["nsenter", f"--target={self._network.pid}", "--net", "--mount", "--", *command]
        return self._run(words, check=check)

    def _run(
        self, words: list[str], *, check: bool = True, timeout: float = TIMEOUT, **env: str
    ) -> subprocess.CompletedProcess[str]:
        done = subprocess.run(
            words,
            env={**self.env, **env},
            cwd=self.project,
            text=True,
            timeout=timeout,
            check=False,
            stdin=subprocess.DEVNULL,
            capture_output=True,
        )
        if check:
            assert done.returncode == 0, f"{words}: exit {done.returncode}\n{done.stdout}{done.stderr}"
        return done

    def boot(self, name: str) -> None:
        """Start a host and its daemons; also again, after it was ended."""
        assert self._network is not None
        interface = NODES.get(name, "eth0")
        # Hosts of one kernel would have one boot id, also after a reboot. Process 1 adopts orphans and has
        # to wait for them.
        prepare = f"""
hostname {name}
mount --bind {self.folder}/hosts-{name} /etc/hosts
mkdir -p /run/munge
mount -t tmpfs -o mode=755 none /run/munge
cat /proc/sys/kernel/random/uuid > /run/munge/boot-id
mount --bind /run/munge/boot-id /proc/sys/kernel/random/boot_id
ip link set lo up
ip link add docker0 type bridge
ip addr add 172.17.0.1/16 dev docker0
ip link set docker0 up
touch /run/munge/prepared
while :; do sleep 3600 & wait; done
"""
        alone = "unshare --net --mount --uts --ipc --pid --fork --kill-child=SIGKILL --mount-proc bash -ec"
        enter = f"nsenter --target={self._network.pid} --net --mount -- {alone}"
        keeper = self._keep(*enter.split(), prepare)
        first = wait_for(lambda: _child_of(keeper.pid), f"process 1 of {name}")
        host = self.hosts[name] = Host(name, self._address(name), keeper, first, self.project)
        wait_for(
            lambda: self.on(name, "test", "-e", "/run/munge/prepared", check=False).returncode == 0,
            f"{name} is up",
        )
        # A computer keeps its hardware address when it boots again. With another one, its neighbours may send
        # to the old one for half a minute, and Slurm waits 5 s (MessageTimeout).
        peer = f"type veth peer name {interface} address {self._hardware_address(name)} netns {first}"
        self._in_network("ip", "link", "add", f"v-{name}", *peer.split())
        self._in_network("ip", "link", "set", f"v-{name}", "master", "bridge", "up")
        self.on(name, "ip", "addr", "add", f"{host.address}/24", "dev", interface)
        self.on(name, "ip", "link", "set", interface, "up")
        own = "seed-file=/run/munge/seed pid-file=/run/munge/pid log-file=/run/munge/log".split()
        munge = [f"key-file={self.folder}/munge.key", *own, "socket=/run/munge/munge.socket.2"]
        self._daemon(host, "munged", "--foreground", "--force", *(f"--{word}" for word in munge))
        wait_for(lambda: self.on(name, "munge", "-n", check=False).returncode == 0, f"munge on {name}")
        self._daemon(host, *(("slurmctld", "-D") if name == HEAD else ("slurmd", "-D")))

    def power_off(self, name: str) -> None:
        """End a host as a power failure does: the others get no packet that closes a connection."""
        self._in_network("ip", "link", "delete", f"v-{name}")
        self.hosts[name].end()

    def _daemon(self, host: Host, *command: str) -> None:
        host.daemons.append(self._keep(*host.inside(*command)))

    # -- what users do

    def on(
        self, host: str, *command: str, check: bool = True, timeout: float = TIMEOUT
    ) -> subprocess.CompletedProcess[str]:
        """Run a command on a host, in the project's folder."""
        return self._run(self.hosts[host].inside(*command), check=check, timeout=timeout)

    def open(self, host: str, *command: str, **env: str) -> subprocess.Popen[str]:
        """Start a command on a host."""
        return subprocess.Popen(
            self.hosts[host].inside(*command),
            env={**self.env, **env},
            cwd=self.project,
            text=True,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )

    def submit(self, script: str, *options: str) -> str:
        """Submit a job; return its id."""
        return self.on(HEAD, "sbatch", "--parsable", *options, script).stdout.strip()

    def facts(self, job: str) -> dict[str, str]:
        """Return what Slurm knows of a job: JobState, ExitCode, Restarts, ..."""
        shown = self.on(HEAD, "scontrol", "--oneliner", "show", "job", job).stdout
        return dict(re.findall(r"(\w+)=(\S*)", shown))

    def wait_for_end(self, job: str, seconds: float = 120.0) -> dict[str, str]:
        """Wait until the job has ended for good; return its facts."""
        deadline = time.monotonic() + seconds
        while True:
            facts = self.facts(job)
            if facts["JobState"] in ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL"):
                return facts
            assert time.monotonic() < deadline, f"{facts}\n{self.output(job)}\n{self.logs()}"
            time.sleep(0.3)

    def output(self, job: str) -> str:
        path = self.project / f"slurm-{job}.out"
        return path.read_text(errors="replace") if path.exists() else ""

    def wait_until_idle(self) -> None:
        def idle() -> bool:
            shown = self.on(HEAD, "sinfo", "--noheader", "--Node", "--format=%T", check=False).stdout.split()
            return shown == ["idle"] * len(NODES)

        try:
            wait_for(idle, "all nodes are idle")
        except AssertionError:
            raise AssertionError(self.logs()) from None

    def logs(self) -> str:
        """Return the ends of the daemons' logs, for the message of a test that fails."""
        parts = []
        for path in sorted(self.folder.glob("*.log")):
            lines = path.read_text(errors="replace").splitlines()[-25:]
            parts += [f"--- {path.name}", *lines]
        return "\n".join(parts)


def _child_of(parent: int) -> int | None:
    children = Path(f"/proc/{parent}/task/{parent}/children")
    found = children.read_text().split() if children.exists() else []
    return int(found[0]) if found else None
