"""The Linux calls that make a host out of namespaces, which Python 3.11 does not offer.

Standard library only: it also runs inside a node before there is anything else. Every call raises OSError with
the path or the name of the call. Constants are those of linux/sched.h, linux/mount.h, linux/prctl.h and
linux/capability.h.
"""

from __future__ import annotations

import ctypes
import errno
import functools
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

NEW_NETWORK, NEW_USER, NEW_MOUNTS = 0x40000000, 0x10000000, 0x00020000
NEW_PIDS, NEW_NAME, NEW_IPC, NEW_CGROUPS = 0x20000000, 0x04000000, 0x08000000, 0x02000000

READ_ONLY, NO_SUID, NO_DEVICES, NO_EXEC, REMOUNT = 1, 2, 4, 8, 32
BIND, RECURSIVE, PRIVATE = 4096, 16384, 1 << 18

_DETACH = 2  # umount2: as soon as nobody uses it
_SET_PARENT_DEATH_SIGNAL, _DROP_BOUND, _NO_NEW_PRIVILEGES, _AMBIENT = 1, 24, 38, 47
_AMBIENT_RAISE = 2
_CAPABILITY_VERSION_3 = 0x20080522
_LAST_CAPABILITY = Path("/proc/sys/kernel/cap_last_cap")
_PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}

# What sshd and a node's own root need; all that reaches past the node (clock, modules, mounts, the network's
# set-up, raw disks, other hosts' processes) is missing. By number, from linux/capability.h.
HARMLESS = frozenset({0, 1, 3, 4, 5, 6, 7, 8, 10, 13, 18, 29, 31})


@functools.cache
def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


def _call(name: str, *arguments: object, about: str = "") -> None:
    if getattr(_libc(), name)(*arguments) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}", about or None)


def unshare(namespaces: int) -> None:
    """Give this process (or thread, for the network) new namespaces. A new pid namespace begins at the next fork."""
    _call("unshare", namespaces)


def enter(namespace: Path | int, kind: int = 0) -> None:
    """Move this thread into a namespace, named by its file or by a descriptor. A user namespace wants one thread."""
    if isinstance(namespace, int):
        _call("setns", namespace, kind)
        return
    handle = os.open(namespace, os.O_RDONLY | os.O_CLOEXEC)
    try:
        _call("setns", handle, kind, about=str(namespace))
    finally:
        os.close(handle)


@contextmanager
def within(network: Path | int) -> Iterator[None]:
    """Run the body, in this thread alone, on another network: sockets that it makes stay there."""
    back = os.open("/proc/thread-self/ns/net", os.O_RDONLY | os.O_CLOEXEC)
    try:
        enter(network, NEW_NETWORK)
        try:
            yield
        finally:
            enter(back, NEW_NETWORK)
    finally:
        os.close(back)


def become_root() -> None:
    """Enter a user namespace in which this ordinary user is root: over the namespaces that it makes, not beyond."""
    user, group = os.getuid(), os.getgid()
    unshare(NEW_USER)
    Path("/proc/self/setgroups").write_text("deny")
    Path("/proc/self/uid_map").write_text(f"0 {user} 1")
    Path("/proc/self/gid_map").write_text(f"0 {group} 1")


def become(user: int) -> None:
    """In a user namespace where we are root: go on as that user, who outside is the same ordinary user as root."""
    unshare(NEW_USER)
    Path("/proc/self/uid_map").write_text(f"{user} 0 1")
    Path("/proc/self/gid_map").write_text(f"{user} 0 1")


def mount(source: str, target: Path, kind: str = "", flags: int = 0, options: str = "") -> None:
    """mount(2). `options` are the file system's own, comma separated."""
    _call(
        "mount",
        os.fsencode(source),
        os.fsencode(target),
        kind.encode() or None,
        ctypes.c_ulong(flags),
        options.encode() or None,
        about=str(target),
    )


def bind(source: Path, target: Path, *, read_only: bool = False) -> None:
    """Show `source` at `target` as well. A read-only bind takes a second mount, which must keep the flags that
    the file system has: an ordinary user may not take those away.
    """
    mount(str(source), target, flags=BIND | RECURSIVE)
    if read_only:
        inherited = os.statvfs(target).f_flag & (NO_SUID | NO_DEVICES | NO_EXEC)
        mount("", target, flags=BIND | REMOUNT | READ_ONLY | inherited | _times(target))


def _times(target: Path) -> int:
    # statvfs(3) has other numbers than mount(2) only for these: ST_NOATIME, ST_NODIRATIME, ST_RELATIME.
    flags = os.statvfs(target).f_flag
    return sum(mine for theirs, mine in ((1024, 1024), (2048, 2048), (4096, 1 << 21)) if flags & theirs)


def unmount(target: Path) -> None:
    _call("umount2", os.fsencode(target), _DETACH, about=str(target))


def pivot(root: Path) -> None:
    """Make `root`, a mount point, the root of the file system; nothing of the old one stays in reach."""
    number = _PIVOT_ROOT.get(os.uname().machine)
    if number is None:
        raise OSError(errno.ENOSYS, f"pivot_root on {os.uname().machine}")
    os.chdir(root)
    # The old root lands on top of the new one, and is taken off: no folder has to be there for it.
    if _libc().syscall(number, b".", b".") != 0:
        failed = ctypes.get_errno()
        raise OSError(failed, f"pivot_root: {os.strerror(failed)}", str(root))
    unmount(Path())
    os.chdir("/")


def set_name(host: str) -> None:
    name = os.fsencode(host)
    _call("sethostname", name, len(name))


def die_with_parent(number: int) -> None:
    """Get this signal when the thread that forked this process ends."""
    _call("prctl", _SET_PARENT_DEATH_SIGNAL, number, 0, 0, 0)


def keep_only(capabilities: Iterable[int]) -> None:
    """Neither this process nor anything that it executes, by whatever user or file, has another capability."""
    kept = set(capabilities)
    for number in range(int(_LAST_CAPABILITY.read_text()) + 1):
        if number not in kept:
            _call("prctl", _DROP_BOUND, number, 0, 0, 0)
    mask = sum(1 << number for number in kept)
    low, high = mask & 0xFFFFFFFF, mask >> 32
    header = (ctypes.c_uint32 * 2)(_CAPABILITY_VERSION_3, 0)
    # For each half: effective, permitted, inheritable.
    _call("capset", header, (ctypes.c_uint32 * 6)(low, low, 0, high, high, 0))


def no_new_privileges() -> None:
    """setuid files run as who calls them, from here on and in every child."""
    _call("prctl", _NO_NEW_PRIVILEGES, 1, 0, 0, 0)
