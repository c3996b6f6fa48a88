"""One node as a host of its own: namespaces, a root file system, an interface, and then sshd as pid 1.

Run as a program by hosts.py, once per boot, with a line of JSON on stdin. It makes the namespaces, says `made`,
waits for `go` (the lab's end of the cable is plugged in meanwhile), and becomes the parent of the node's pid 1,
whose death ends everything on the node. Standard library only; it never comes back to the lab's own namespaces.

The root file system is put together from the host's /usr (read-only, with the stand-ins of guest/ over it), a
disk of the node's own (/etc, /home, /var, /tmp ...), and the Python environment of the host at its own path and
at /opt/pytorch, read-only. Nothing else of the host can be seen.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

from cloudddp.sim import kernel
from cloudddp.sim.guest import cloudinit, here, init

USER, USER_ID = cloudinit.USER, here.USER_ID
TORCH = Path("/opt/pytorch")  # where the Deep Learning AMI has it
GUEST = Path("usr/lib/cloudddp-lab")  # the stand-ins, seen from a node's root
STATE = Path("run/cloudddp")  # what the stand-ins and the simulator tell each other

_ETC = (
    "bash.bashrc", "default", "gai.conf", "host.conf", "inputrc", "ld.so.cache", "ld.so.conf", "locale.alias",
    "localtime", "login.defs", "magic", "mime.types", "nsswitch.conf", "os-release", "profile", "profile.d",
    "protocols", "rpc", "services", "shells", "skel", "timezone",
)  # fmt: skip
_ETC_SHOWN = ("alternatives", "ca-certificates", "ld.so.conf.d", "pki", "ssl/certs", "terminfo")
_OUTER = ("bin", "sbin", "lib", "lib32", "lib64", "libx32")
_DEVICES = ("full", "null", "random", "tty", "urandom", "zero")
_PROC_READ_ONLY = ("bus", "fs", "irq", "sys", "sysrq-trigger")

_SYS_HIDDEN = ("block", "class/block", "dev/block")

_SSHD = """\
Port 22
AuthorizedKeysFile .ssh/authorized_keys
PasswordAuthentication no
KbdInteractiveAuthentication no
UsePAM no
UseDNS no
PermitRootLogin no
PidFile none
MaxStartups 100:30:200
MaxSessions 64
PrintMotd no
AcceptEnv LANG LC_*
SetEnv {environment}
Subsystem sftp internal-sftp
"""


class Machine(NamedTuple):
    """What to build. `disk` holds the node's own files and outlives a stop; `over` lies over /usr."""

    name: str
    disk: Path
    over: Path
    state: Path
    hosts: Path
    prefix: Path  # sys.prefix of the simulator
    base: Path  # sys.base_prefix
    network: str  # what `ip -batch` is told, inside
    environment: dict[str, str]
    as_root: bool  # whether root here is the machine's root; else it is an ordinary user outside

    @classmethod
    def from_json(cls, text: str) -> Machine:
        raw = json.loads(text)
        paths = {name: Path(raw[name]) for name in ("disk", "over", "state", "hosts", "prefix", "base")}
        return cls(**{**raw, **paths})

    def to_json(self) -> str:
        return json.dumps(self._asdict(), default=str)


def main() -> int:
    machine = Machine.from_json(sys.stdin.readline())
    kernel.unshare(kernel.NEW_NETWORK | kernel.NEW_MOUNTS | kernel.NEW_NAME | kernel.NEW_IPC)
    kernel.set_name(machine.name)
    print("made", flush=True)
    if sys.stdin.readline().strip() != "go":
        return 1
    _plug_in(machine)
    kernel.unshare(kernel.NEW_PIDS)  # not before: the first process that is forked in it is its pid 1
    first = os.fork()
    if first == 0:
        _run(machine)
    print(f"pid {first}", flush=True)
    return os.waitstatus_to_exitcode(os.waitpid(first, 0)[1])


def _run(machine: Machine) -> None:
    """Be pid 1 of the node. Never returns: it becomes sshd, or says why not and exits."""
    try:
        kernel.die_with_parent(signal.SIGKILL)
        _build(machine)
        _give_up_powers()
        facts = here.facts()
        cloudinit.early(facts["cloud_config"], facts["login_keys"], user=give_to_user)
        _start_init()
        _become_sshd(machine)
    except Exception as error:
        print(f"{machine.name}: {error}", file=sys.stderr, flush=True)
    os._exit(1)


def _plug_in(machine: Machine) -> None:
    """Give the interface, which came from outside, its address."""
    subprocess.run(["ip", "-batch", "-"], input=machine.network, text=True, check=True)
    if not machine.as_root:
        Path("/proc/sys/net/ipv4/ip_unprivileged_port_start").write_text("0")  # sshd is the login user there
    highest = USER_ID if machine.as_root else 0  # an ordinary user's lab has one group, which is all of them
    Path("/proc/sys/net/ipv4/ping_group_range").write_text(
        f"0 {highest}"
    )  # ping has no powers of its own here


def _start_init() -> None:
    """What stands in for systemd: a child of pid 1, as root of the node."""
    if os.fork():
        return
    try:
        log = os.open("/var/log/init.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        nothing = os.open(os.devnull, os.O_RDWR)
        for target, source in ((0, nothing), (1, log), (2, log)):
            os.dup2(source, target)
        os.closerange(3, 256)
        os.environ.clear()
        os.environ.update(PATH="/usr/sbin:/usr/bin:/sbin:/bin", HOME="/root", LANG="C.UTF-8")
        init.main()  # not by execve: a second interpreter would be the larger part of a boot
    finally:
        os._exit(1)


def _build(machine: Machine) -> None:
    """Put the node's file system together and move into it."""
    kernel.mount("none", Path("/"), flags=kernel.RECURSIVE | kernel.PRIVATE)
    root = machine.disk
    _furnish(machine)
    kernel.bind(root, root)
    for name in ("run", "root"):  # 711: the Python that is shown may lie below the host's /root
        kernel.mount(
            "tmpfs",
            root / name,
            "tmpfs",
            kernel.NO_SUID | kernel.NO_DEVICES,
            f"mode={'755' if name == 'run' else '711'}",
        )
    _show_system(machine, root)
    _show_python(machine, root)
    _make_devices(root / "dev", as_root=machine.as_root)
    (root / "run/sshd").mkdir(mode=0o755)
    (root / STATE).mkdir()
    kernel.bind(machine.state, root / STATE)
    kernel.bind(machine.hosts, root / "etc/hosts", read_only=True)
    kernel.mount("proc", root / "proc", "proc", kernel.NO_SUID | kernel.NO_DEVICES | kernel.NO_EXEC)
    for name in _PROC_READ_ONLY:  # these act on the whole machine
        if (place := root / "proc" / name).exists():
            kernel.bind(place, place, read_only=True)
    kernel.mount("sysfs", root / "sys", "sysfs", kernel.NO_SUID | kernel.NO_DEVICES | kernel.READ_ONLY)
    for name in _SYS_HIDDEN:  # this computer's disks are none of the node's
        if (place := root / "sys" / name).is_dir():
            kernel.mount("tmpfs", place, "tmpfs", kernel.READ_ONLY, "size=4k")
    kernel.pivot(root)
    # By this a stand-in knows that it is on a node: no other process is in this pid namespace.
    (Path("/") / STATE / "namespace").write_text(str(Path("/proc/self/ns/pid").readlink()))


def _furnish(machine: Machine) -> None:
    """The files of a new disk; on a later boot only what a boot empties."""
    root = machine.disk
    if not (root / "etc").exists():
        for name in (
            "dev",
            "etc/ssh",
            "etc/systemd/system",
            "home",
            "mnt",
            "opt",
            "proc",
            "root",
            "run",
            "srv",
            "sys",
            "usr",
            "var",
        ):
            (root / name).mkdir(mode=0o755, parents=True)
        for name in ("var/tmp", "var/log", "var/lib/cloud"):
            (root / name).mkdir(parents=True)
        (root / "var/tmp").chmod(0o1777)
        _write_etc(machine, root / "etc")
        _make_home(root / "home" / USER)
    shutil.rmtree(root / "tmp", ignore_errors=True)
    (root / "tmp").mkdir()
    (root / "tmp").chmod(0o1777)


def _write_etc(machine: Machine, etc: Path) -> None:
    for name in _ETC:
        source = Path("/etc") / name
        if source.is_dir():
            (etc / name).mkdir()
        for path in sorted(source.glob("*")) if source.is_dir() else [source]:
            if path.is_file() and os.access(path, os.R_OK):
                shutil.copy(path, etc / path.relative_to("/etc"))
    users = (
        "root:x:0:0:root:/root:/bin/bash",
        "sshd:x:100:65534::/run/sshd:/usr/sbin/nologin",
        f"{USER}:x:{USER_ID}:{USER_ID}:Ubuntu:/home/{USER}:/bin/bash",
        "nobody:x:65534:65534:nobody:/nonexistent:/usr/sbin/nologin",
    )
    texts = {
        "passwd": users,
        "group": ("root:x:0:", "tty:x:5:", f"{USER}:x:{USER_ID}:", "nogroup:x:65534:"),
        "shadow": tuple(f"{line.partition(':')[0]}:*:19000:0:99999:7:::" for line in users),
        "hostname": (machine.name,),
        "hosts": (),
        "ssh/sshd_config": (_SSHD.format(environment=_quoted(machine.environment)),),
    }
    for name, lines in texts.items():
        (etc / name).write_text("".join(f"{line}\n" for line in lines))
    (etc / "shadow").chmod(0o640)


def _quoted(environment: dict[str, str]) -> str:
    return " ".join(f'"{name}={value}"' for name, value in environment.items())


def _make_home(home: Path) -> None:
    home.mkdir(mode=0o750)
    for path in Path("/etc/skel").iterdir() if Path("/etc/skel").is_dir() else ():
        if path.is_file():
            shutil.copy(path, home / path.name)
    (home / ".ssh").mkdir(mode=0o700)
    give_to_user(home, *home.rglob("*"))


def give_to_user(*paths: Path) -> None:
    """Make files the login user's. Where an ordinary user made the lab, they are: both are that user outside."""
    for path in paths:
        try:
            os.chown(path, USER_ID, USER_ID, follow_symlinks=False)
        except OSError:
            return


def _show_system(machine: Machine, root: Path) -> None:
    """The host's programs, read-only, with the stand-ins over them, so that an absolute path finds them too."""
    kernel.mount("overlay", root / "usr", "overlay", kernel.READ_ONLY, f"lowerdir={machine.over}:/usr")
    for name in _OUTER:
        outer = Path("/") / name
        inner = root / name
        if outer.is_symlink():  # into /usr
            if not inner.is_symlink():
                inner.symlink_to(outer.readlink())
        elif outer.is_dir():
            inner.mkdir(exist_ok=True)
            kernel.bind(outer, inner, read_only=True)
    for name in _ETC_SHOWN:
        source = Path("/etc") / name
        if source.is_dir():
            (root / "etc" / name).mkdir(parents=True, exist_ok=True)
            kernel.bind(source, root / "etc" / name, read_only=True)


def _show_python(machine: Machine, root: Path) -> None:
    prefix, base = machine.prefix, machine.base
    for path in dict.fromkeys((base, prefix)):
        if not path.is_relative_to("/usr"):
            _bind_at(path, root / path.relative_to("/"))
    torch = root / TORCH.relative_to("/")
    if prefix.is_relative_to("/usr"):
        (torch / "bin").mkdir(parents=True, exist_ok=True)
        for name in ("python", "python3"):
            if not (torch / "bin" / name).is_symlink():
                (torch / "bin" / name).symlink_to(prefix / "bin/python3")
    else:
        _bind_at(prefix, torch)


def _bind_at(source: Path, target: Path) -> None:
    target.mkdir(mode=0o755, parents=True, exist_ok=True)
    kernel.bind(source, target, read_only=True)


def _make_devices(dev: Path, *, as_root: bool) -> None:
    kernel.mount("tmpfs", dev, "tmpfs", kernel.NO_SUID | kernel.NO_EXEC, "mode=755")
    for name in _DEVICES:  # bound, not made: an ordinary user may not make any
        (dev / name).touch()
        # Read-only is the file, not the device: its mode and owner are the host's.
        kernel.bind(Path("/dev") / name, dev / name, read_only=True)
    for name in ("pts", "shm"):
        (dev / name).mkdir()
    terminals = "newinstance,ptmxmode=0666,mode=620" + (",gid=5" if as_root else "")
    kernel.mount("devpts", dev / "pts", "devpts", kernel.NO_SUID | kernel.NO_EXEC, terminals)
    kernel.mount("tmpfs", dev / "shm", "tmpfs", kernel.NO_SUID | kernel.NO_DEVICES, "mode=1777")
    for name, target in (
        ("ptmx", "pts/ptmx"),
        ("fd", "/proc/self/fd"),
        ("stdin", "fd/0"),
        ("stdout", "fd/1"),
        ("stderr", "fd/2"),
    ):
        (dev / name).symlink_to(target)


def _give_up_powers() -> None:
    """Root here is the machine's own root, or an ordinary user: from here on with no power past this node."""
    kernel.keep_only(kernel.HARMLESS)
    kernel.no_new_privileges()


def _become_sshd(machine: Machine) -> None:
    if not machine.as_root:
        # sshd as root would want other users, whom an ordinary user's lab has not: there it runs as the login user.
        kernel.become(USER_ID)
    os.environ["PATH"] = "/usr/sbin:/usr/bin:/sbin:/bin"
    log = os.open("/var/log/auth.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    nothing = os.open(os.devnull, os.O_RDWR)
    for target, source in ((0, nothing), (1, nothing), (2, log)):
        os.dup2(source, target)
    os.closerange(3, 256)
    os.execv("/usr/sbin/sshd", ["/usr/sbin/sshd", "-D", "-e"])  # noqa: S606


if __name__ == "__main__":
    sys.exit(main())
