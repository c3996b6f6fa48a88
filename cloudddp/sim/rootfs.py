"""A node's root file system: put together in a mount namespace of its own, and then moved into.

It is the host's /usr (read-only, with the stand-ins of guest/ over it), a disk of the node's own (/etc, /home,
/var, /tmp ...), and the Python environment of the host at its own path and at /opt/pytorch, read-only. Nothing
else of the host can be seen. Standard library only; runs as root of the lab, before the node's powers are given
up, on a disk that the node's root may have prepared for it: no path on it is followed through a link.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from pathlib import Path
from typing import NamedTuple

from cloudddp.sim import kernel, memory
from cloudddp.sim.guest import cloudinit, here

USER, USER_ID = cloudinit.USER, here.USER_ID
TORCH = "opt/pytorch"  # where the Deep Learning AMI has it
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
_DEVICE_LINKS = (
    ("ptmx", "pts/ptmx"), ("fd", "/proc/self/fd"), ("stdin", "fd/0"), ("stdout", "fd/1"), ("stderr", "fd/2"),
)  # fmt: skip
_FOLDERS = (
    "dev", "etc/ssh", "etc/systemd/system", "home", "mnt", "opt", "proc", "root", "run", "srv", "sys", "usr",
    "var/lib/cloud", "var/log", "var/tmp",
)  # fmt: skip
_SMALL = 256 << 20  # bytes; for /run, /dev and root's own home

# What the whole computer shares, and container runtimes keep from containers: some act on it, others only tell.
_PROC_READ_ONLY = ("bus", "fs", "irq", "sys", "sysrq-trigger")
_PROC_HIDDEN = (
    "acpi", "asound", "interrupts", "kallsyms", "kcore", "key-users", "keys", "kmsg", "latency_stats", "sched_debug",
    "scsi", "timer_list", "timer_stats",
)  # fmt: skip
_SYS_HIDDEN = (
    "block", "class/block", "dev/block", "devices/virtual/powercap", "firmware", "fs/cgroup", "kernel/security",
)  # fmt: skip

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
    shared_memory: int  # bytes of /dev/shm
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


def build(machine: Machine) -> None:
    """Put the node's file system together and move into it. Raises OSError."""
    kernel.mount("none", Path("/"), flags=kernel.RECURSIVE | kernel.PRIVATE)
    root = machine.disk
    _furnish(machine)
    kernel.bind(root, root)
    for name, mode in (
        ("run", "755"),
        ("root", "711"),
    ):  # 711: the Python shown may lie below the host's /root
        quiet = kernel.NO_SUID | kernel.NO_DEVICES
        kernel.mount("tmpfs", folder(root, name), "tmpfs", quiet, memory.limits(_SMALL, mode))
    _show_system(machine, root)
    _show_python(machine, root)
    _make_devices(machine, folder(root, "dev"))
    (root / "run/sshd").mkdir(mode=0o755)
    (root / STATE).mkdir()
    kernel.bind(machine.state, root / STATE)
    kernel.bind(machine.hosts, _file(folder(root, "etc"), "hosts"), read_only=True)
    _show_kernel(root)
    kernel.pivot(root)
    # By this a stand-in knows that it is on a node: no other process is in this pid namespace.
    (Path("/") / STATE / "namespace").write_text(str(Path("/proc/self/ns/pid").readlink()))


def folder(root: Path, name: str) -> Path:
    """A folder of the node's disk, made where there is none.

    What the node's root has put in its way is taken off, a link above all: before the pivot, it would lead to
    files of this computer. Nothing runs on the node meanwhile, so what was looked at stays so.
    """
    place = root
    for part in Path(name).parts:
        place /= part
        if place.is_symlink() or not place.is_dir():
            place.unlink(missing_ok=True)
            place.mkdir(mode=0o755)
    return place


def _file(place: Path, name: str) -> Path:
    """As `folder`, for an empty file."""
    path = place / name
    if path.is_symlink() or not path.is_file():
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)
        path.touch()
    return path


def _furnish(machine: Machine) -> None:
    """The files of a new disk; on a later boot only what a boot empties."""
    root = machine.disk
    if not any(root.iterdir()):
        for name in _FOLDERS:
            folder(root, name)
        (root / "var/tmp").chmod(0o1777)
        _write_etc(machine, root / "etc")
        _make_home(root / "home" / USER)
    with contextlib.suppress(RecursionError):  # as deep as that only on purpose
        shutil.rmtree(root / "tmp", ignore_errors=True)  # not through a link: that is an error
    folder(root, "tmp").chmod(0o1777)


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
        f"sshd:x:{here.SSHD_ID}:65534::/run/sshd:/usr/sbin/nologin",
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
    lower = f"lowerdir={machine.over}:/usr"
    kernel.mount("overlay", folder(root, "usr"), "overlay", kernel.READ_ONLY, lower)
    for name in _OUTER:
        outer = Path("/") / name
        inner = root / name
        if outer.is_symlink():  # into /usr
            if not os.path.lexists(inner):
                inner.symlink_to(outer.readlink())
        elif outer.is_dir():
            kernel.bind(outer, folder(root, name), read_only=True)
    for name in _ETC_SHOWN:
        source = Path("/etc") / name
        if source.is_dir():
            kernel.bind(source, folder(root, f"etc/{name}"), read_only=True)


def _show_python(machine: Machine, root: Path) -> None:
    prefix, base = machine.prefix, machine.base
    for path in dict.fromkeys((base, prefix)):
        if not path.is_relative_to("/usr"):
            kernel.bind(path, folder(root, str(path.relative_to("/"))), read_only=True)
    if not prefix.is_relative_to("/usr"):
        kernel.bind(prefix, folder(root, TORCH), read_only=True)
        return
    programs = folder(root, f"{TORCH}/bin")
    for name in ("python", "python3"):
        if not os.path.lexists(programs / name):
            (programs / name).symlink_to(prefix / "bin/python3")


def _show_kernel(root: Path) -> None:
    """/proc and /sys: what is this node's own, and of the rest what harms nobody."""
    proc, system = folder(root, "proc"), folder(root, "sys")
    quiet = kernel.NO_SUID | kernel.NO_DEVICES | kernel.NO_EXEC
    kernel.mount("proc", proc, "proc", quiet)
    kernel.mount("sysfs", system, "sysfs", quiet | kernel.READ_ONLY)
    for name in _PROC_READ_ONLY:  # these act on the whole machine
        if (place := proc / name).exists():
            kernel.bind(place, place, read_only=True)
    for place in (*(proc / name for name in _PROC_HIDDEN), *(system / name for name in _SYS_HIDDEN)):
        if place.is_dir():
            kernel.mount("tmpfs", place, "tmpfs", quiet | kernel.READ_ONLY, "size=4k")
        elif place.exists():
            kernel.bind(Path(os.devnull), place, read_only=True)


def _make_devices(machine: Machine, dev: Path) -> None:
    limits = memory.limits(_SMALL, "755")
    kernel.mount("tmpfs", dev, "tmpfs", kernel.NO_SUID | kernel.NO_EXEC, limits)
    for name in _DEVICES:  # bound, not made: an ordinary user may not make any
        (dev / name).touch()
        # Read-only is the file, not the device: its mode and owner are the host's.
        kernel.bind(Path("/dev") / name, dev / name, read_only=True)
    for name in ("pts", "shm"):
        (dev / name).mkdir()
    terminals = "newinstance,ptmxmode=0666,mode=620" + (",gid=5" if machine.as_root else "")
    kernel.mount("devpts", dev / "pts", "devpts", kernel.NO_SUID | kernel.NO_EXEC, terminals)
    limits = memory.limits(machine.shared_memory, "1777")
    kernel.mount("tmpfs", dev / "shm", "tmpfs", kernel.NO_SUID | kernel.NO_DEVICES, limits)
    for name, target in _DEVICE_LINKS:
        (dev / name).symlink_to(target)
