"""Builds a node's root file system in its mount namespace, and pivots to it.

It consists of the computer's /usr (read-only, with the stand-ins of guest/ over it), a disk of the node's own
(/etc, /home, /var, /tmp ...), and the computer's Python environment at its own path and at /opt/pytorch,
read-only. Nothing else of the computer is visible. Standard library only. This runs as root of the lab,
before privileges are dropped, on a disk that root of the node may have prepared for an attack: no link on it
is followed.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from pathlib import Path
from typing import NamedTuple

from cloudddp.simulator.guest import cloud_init, on_node
from cloudddp.simulator.hosts import host_setup, lab_disk, python_environment
from cloudddp.simulator.hosts.host_setup import HostSetup
from cloudddp.simulator.linux import kernel

USER, USER_ID = cloud_init.USER, on_node.USER_ID
GUEST = Path("usr/lib/cloudddp-lab")  # the stand-ins, relative to a node's root
PYTHON_STARTUP = GUEST / "python"  # has the `sitecustomize` of the node's Pythons
_STATE = Path(on_node.STATE_FOLDER).relative_to("/")

_ETC_COPIED = (
    *("bash.bashrc", "inputrc", "profile", "profile.d", "shells", "skel"),
    *("gai.conf", "host.conf", "nsswitch.conf", "protocols", "rpc", "services"),
    *("ld.so.cache", "ld.so.conf", "locale.alias", "localtime", "timezone"),
    *("default", "login.defs", "magic", "mime.types", "os-release"),
)
_ETC_MOUNTED = ("alternatives", "ca-certificates", "ld.so.conf.d", "pki", "ssl/certs", "terminfo")
_TOP_FOLDERS = ("bin", "sbin", "lib", "lib32", "lib64", "libx32")
_DEVICES = ("full", "null", "random", "tty", "urandom", "zero")
_DEVICE_LINKS = (
    ("ptmx", "pts/ptmx"),
    ("fd", "/proc/self/fd"),
    ("stdin", "fd/0"),
    ("stdout", "fd/1"),
    ("stderr", "fd/2"),
)
_FOLDERS = (
    *("dev", "home", "mnt", "opt", "proc", "root", "run", "srv", "sys", "usr"),
    *("etc/pam.d", "etc/ssh", "etc/systemd/system"),
    *("etc/apt/apt.conf.d", "etc/apt/preferences.d", "etc/apt/sources.list.d"),
    *("var/cache/apt/archives/partial", "var/lib/apt/lists/partial", "var/lib/dpkg"),
    *("var/lib/cloud", "var/log", "var/tmp"),
)
_SMALL = 256 << 20  # bytes; for /run, /dev and /root
# Not namespaced; container runtimes protect these, too. Writing to the first affects the computer, the others
# reveal data about it.
_PROC_READ_ONLY = ("bus", "fs", "irq", "sys", "sysrq-trigger")
_PROC_HIDDEN = (
    *("acpi", "asound", "interrupts", "kcore", "latency_stats", "scsi"),
    *("kallsyms", "kmsg", "sched_debug", "timer_list", "timer_stats", "key-users", "keys"),
)
_SYS_HIDDEN = (
    *("block", "class/block", "dev/block"),
    *("devices/virtual/powercap", "firmware", "fs/cgroup", "kernel/security"),
)

_SSHD = """\
Port 22
AuthorizedKeysFile .ssh/authorized_keys
PasswordAuthentication no
KbdInteractiveAuthentication no
UsePAM yes
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

# Ubuntu's, without the modules that need another service. After the key has been accepted, sshd asks PAM for
# the account: pam_nologin refuses while /run/nologin exists, and sshd sends its text as a banner and closes
# the connection, within the authentication (userauth_finish in OpenSSH's auth2.c: "Access denied for user by
# PAM account configuration").
_PAM = (
    "auth required pam_deny.so",
    "account required pam_nologin.so",
    "account required pam_permit.so",
    "password required pam_deny.so",
    "session required pam_permit.so",
)


class NamespaceNode(NamedTuple):
    """What to build. The disk has the node's own files and outlives a stop; `overlay` is mounted over
    /usr; `shared` is the folder of guest/nfs.py, which all nodes have."""

    setup: HostSetup
    overlay: Path
    shared: Path
    shared_memory: int  # bytes of /dev/shm
    as_root: bool  # whether root here is root of the computer, and not an ordinary user

    @classmethod
    def from_line(cls, line: str) -> NamespaceNode:
        setup, own = host_setup.from_line(line)
        return cls(setup, Path(own["overlay"]), Path(own["shared"]), own["shared_memory"], own["as_root"])

    def to_line(self) -> str:
        return host_setup.to_line(**self._asdict())


def build(node: NamespaceNode) -> None:
    """Build the file system and pivot to it. Raises OSError."""
    kernel.mount("none", Path("/"), flags=kernel.MS_REC | kernel.MS_PRIVATE)
    root = node.setup.disk
    _prepare_disk(node)
    kernel.bind(root, root)
    # 711: the computer's Python may be below its /root.
    for name, mode in (("run", "755"), ("root", "711")):
        flags = kernel.MS_NOSUID | kernel.MS_NODEV
        kernel.mount("tmpfs", _folder(root, name), "tmpfs", flags, lab_disk.tmpfs_options(_SMALL, mode))
    _mount_usr(node, root)
    _mount_python(node, root)
    _create_devices(node, _folder(root, "dev"))
    (root / "run/sshd").mkdir(mode=0o755)
    (root / _STATE).mkdir()
    kernel.bind(node.setup.state, root / _STATE)
    kernel.bind(node.shared, _folder(root, on_node.SHARED_FOLDER[1:]))
    kernel.bind(node.setup.hosts_file, _file(_folder(root, "etc"), "hosts"), read_only=True)
    _mount_proc_and_sys(root)
    kernel.pivot_root(root)
    # on_node.is_node compares with this: no process outside the node is in its pid namespace.
    Path(on_node.STATE_FOLDER, "namespace").write_text(str(Path("/proc/self/ns/pid").readlink()))


def _folder(root: Path, name: str) -> Path:
    """Return a folder of the node's disk, created if missing.

    Anything else in its place is removed: before the pivot, a link that root of the node has created would
    lead to files of this computer. No process of the node runs meanwhile, so there is no race.
    """
    path = root
    for part in Path(name).parts:
        path /= part
        if path.is_symlink() or not path.is_dir():
            path.unlink(missing_ok=True)
            path.mkdir(mode=0o755)
    return path


def _file(parent: Path, name: str) -> Path:
    """As `_folder`, for an empty file."""
    path = parent / name
    if path.is_symlink() or not path.is_file():
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)
        path.touch()
    return path


def _prepare_disk(node: NamespaceNode) -> None:
    """Create the files of a new disk; on a later boot, only empty /tmp."""
    root = node.setup.disk
    if not any(root.iterdir()):
        for name in _FOLDERS:
            _folder(root, name)
        (root / "var/tmp").chmod(0o1777)
        (root / "var/lib/dpkg/status").touch()  # no package is installed
        (root / "var/run").symlink_to("/run")  # as on Ubuntu, whose pam_nologin reads /var/run/nologin
        _write_etc(node, root / "etc")
        _create_home(root / "home" / USER)
    with contextlib.suppress(RecursionError):  # a deliberately deep tree
        shutil.rmtree(root / "tmp", ignore_errors=True)  # raises if it is a link
    _folder(root, "tmp").chmod(0o1777)


def _write_etc(node: NamespaceNode, etc: Path) -> None:
    for name in _ETC_COPIED:
        source = Path("/etc") / name
        if source.is_dir():
            (etc / name).mkdir()
        for path in sorted(source.glob("*")) if source.is_dir() else [source]:
            if path.is_file() and os.access(path, os.R_OK):
                shutil.copy(path, etc / path.relative_to("/etc"))
    users = (
        "root:x:0:0:root:/root:/bin/bash",
        f"sshd:x:{on_node.SSHD_ID}:65534::/run/sshd:/usr/sbin/nologin",
        f"{USER}:x:{USER_ID}:{USER_ID}:Ubuntu:/home/{USER}:/bin/bash",
        "nobody:x:65534:65534:nobody:/nonexistent:/usr/sbin/nologin",
    )
    texts = {
        "passwd": users,
        "group": ("root:x:0:", "tty:x:5:", f"{USER}:x:{USER_ID}:", "nogroup:x:65534:"),
        "shadow": tuple(f"{line.partition(':')[0]}:*:19000:0:99999:7:::" for line in users),
        "hostname": (node.setup.host_name,),
        "hosts": (),
        "apt/sources.list": (),
        "pam.d/sshd": _PAM,
        "systemd/system/nfs-server.service": ("[Service]", "Type=oneshot", "ExecStart=/bin/true"),
        "ssh/sshd_config": (_SSHD.format(environment=_quoted(node.setup.environment)),),
    }
    for name, lines in texts.items():
        (etc / name).write_text("".join(f"{line}\n" for line in lines))
    (etc / "shadow").chmod(0o640)


def _quoted(environment: dict[str, str]) -> str:
    return " ".join(f'"{name}={value}"' for name, value in environment.items())


def _create_home(home: Path) -> None:
    home.mkdir(mode=0o750)
    for path in Path("/etc/skel").iterdir() if Path("/etc/skel").is_dir() else ():
        if path.is_file():
            shutil.copy(path, home / path.name)
    (home / ".ssh").mkdir(mode=0o700)
    chown_to_user(home, *home.rglob("*"))


def chown_to_user(*paths: Path) -> None:
    """Give files to the login user. In the lab of an ordinary user, they have that owner already."""
    for path in paths:
        try:
            os.chown(path, USER_ID, USER_ID, follow_symlinks=False)
        except OSError:
            return


def _mount_usr(node: NamespaceNode, root: Path) -> None:
    """Mount the computer's programs read-only, with the stand-ins over them, so that absolute paths find
    these."""
    lower = f"lowerdir={node.overlay}:/usr"
    kernel.mount("overlay", _folder(root, "usr"), "overlay", kernel.MS_RDONLY, lower)
    for name in _TOP_FOLDERS:
        source = Path("/") / name
        target = root / name
        if source.is_symlink():  # into /usr
            if not os.path.lexists(target):
                target.symlink_to(source.readlink())
        elif source.is_dir():
            kernel.bind(source, _folder(root, name), read_only=True)
    for name in _ETC_MOUNTED:
        source = Path("/etc") / name
        if source.is_dir():
            kernel.bind(source, _folder(root, f"etc/{name}"), read_only=True)


def _mount_python(node: NamespaceNode, root: Path) -> None:
    prefix = node.setup.prefix
    for path in dict.fromkeys((node.setup.base_prefix, prefix)):
        if not path.is_relative_to("/usr"):
            kernel.bind(path, _folder(root, str(path.relative_to("/"))), read_only=True)
    environment = _folder(root, python_environment.PYTORCH)
    python_environment.create(
        environment,
        Path("/", python_environment.PYTORCH),
        prefix=prefix,
        base_prefix=node.setup.base_prefix,
        chown_to_user=chown_to_user,
    )


def _mount_proc_and_sys(root: Path) -> None:
    """Mount /proc and /sys without what belongs to the whole computer."""
    proc, sys = _folder(root, "proc"), _folder(root, "sys")
    flags = kernel.MS_NOSUID | kernel.MS_NODEV | kernel.MS_NOEXEC
    kernel.mount("proc", proc, "proc", flags)
    kernel.mount("sysfs", sys, "sysfs", flags | kernel.MS_RDONLY)
    for name in _PROC_READ_ONLY:
        if (path := proc / name).exists():
            kernel.bind(path, path, read_only=True)
    for path in (*(proc / name for name in _PROC_HIDDEN), *(sys / name for name in _SYS_HIDDEN)):
        if path.is_dir():
            kernel.mount("tmpfs", path, "tmpfs", flags | kernel.MS_RDONLY, "size=4k")
        elif path.exists():
            kernel.bind(Path(os.devnull), path, read_only=True)


def _create_devices(node: NamespaceNode, dev: Path) -> None:
    options = lab_disk.tmpfs_options(_SMALL, "755")
    kernel.mount("tmpfs", dev, "tmpfs", kernel.MS_NOSUID | kernel.MS_NOEXEC, options)
    for name in _DEVICES:  # bound: an ordinary user may not create device files
        (dev / name).touch()
        # Read-only applies to the file's mode and owner, which are the computer's, not to the device.
        kernel.bind(Path("/dev") / name, dev / name, read_only=True)
    for name in ("pts", "shm"):
        (dev / name).mkdir()
    options = "newinstance,ptmxmode=0666,mode=620" + (",gid=5" if node.as_root else "")
    kernel.mount("devpts", dev / "pts", "devpts", kernel.MS_NOSUID | kernel.MS_NOEXEC, options)
    options = lab_disk.tmpfs_options(node.shared_memory, "1777")
    kernel.mount("tmpfs", dev / "shm", "tmpfs", kernel.MS_NOSUID | kernel.MS_NODEV, options)
    for name, target in _DEVICE_LINKS:
        (dev / name).symlink_to(target)
