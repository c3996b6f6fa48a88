"""The root file system that machine nodes boot from: Debian 13, made once by debootstrap and kept.

It takes about a minute and 0.5 GB. Several simulators may share the folder (CLOUDDDP_SIM_ROOTS): a lock lets
one of them make it, and it gets its name when it is complete.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from cloudddp.errors import CloudDDPError
from cloudddp.simulator.linux import kernel, programs

VARIABLE = "CLOUDDDP_SIM_ROOTS"
_KEYRING = Path("/usr/share/keyrings/debian-archive-keyring.gpg")
PACKAGES = {
    "systemd-nspawn": "systemd-container",
    "debootstrap": "debootstrap",
    str(_KEYRING): "debian-archive-keyring",
    **programs.LAB,
}
"""Program, or another file -> Debian package that machine nodes need."""

_SUITE = "trixie"
_INCLUDED = (
    "systemd,systemd-sysv,dbus,libpam-systemd,udev,cloud-init,openssh-server,python3,procps,iproute2,sudo,"
    "netplan.io,unattended-upgrades,ca-certificates,curl,rsync"
)
# Amazon Linux 2023 has Python 3.9, which was last in Debian 11. Its packages are unpacked beside Debian 13's
# own Python, without being installed: they would replace libraries.
_OLD_SUITE = "bullseye"
_OLD_PYTHON = (
    "python3.9-minimal python3.9 libpython3.9-minimal libpython3.9-stdlib libssl1.1 libffi7 libmpdec3"
)
_NEEDED = 2 << 30  # bytes free before it is made: its packages are on the disk twice for a while
_ADDITIONS = f"""\
set -eu
export DEBIAN_FRONTEND=noninteractive
mkdir -p /tmp/old/lists/partial
sed 's/ {_SUITE} / {_OLD_SUITE} /' /etc/apt/sources.list > /tmp/old/sources.list
old() {{ apt-get -qq -o Dir::Etc::SourceList=/tmp/old/sources.list -o Dir::Etc::SourceParts=/dev/null \\
    -o Dir::State::Lists=/tmp/old/lists "$@"; }}
old update
cd /tmp/old
old -o APT::Sandbox::User=root download {_OLD_PYTHON}
for package in *.deb; do dpkg-deb --extract $package /; done
cd /
rm -rf /tmp/old
python3.9 -c 'import ssl, ctypes, decimal, sqlite3'
# Nothing answers DHCP in the lab: cloud-init would wait for it before it asks the metadata service.
rm -f /usr/sbin/dhcpcd
apt-get clean
rm -rf /var/lib/apt/lists/* /etc/ssh/ssh_host_* /var/lib/dbus/machine-id
: > /etc/machine-id
echo 'nameserver 127.0.0.1' > /etc/resolv.conf
"""


def folder(home: Path) -> Path:
    """Return where root file systems are kept."""
    return Path(os.environ.get(VARIABLE) or home / "sim" / "roots")


def path(home: Path) -> Path:
    """Return where the root file system is when it has been made; its name depends on how it is made."""
    recipe = repr((_SUITE, _INCLUDED, _OLD_PYTHON, _ADDITIONS))
    return folder(home) / f"debian-13-{hashlib.sha256(recipe.encode()).hexdigest()[:12]}"


def is_complete(image: Path) -> bool:
    """Return whether a root file system is there, and not only its folder."""
    return (image / "etc/os-release").exists()


def unavailable_reason() -> str:
    """Return why machine nodes cannot run on this computer, in a sentence; '' if they can."""
    if os.getuid():
        return "they need root: systemd-nspawn boots an operating system"
    return programs.missing(PACKAGES)


def ensure(home: Path, report: Callable[[str], None]) -> Path:
    """Return the root file system, made if there is none. Raises CloudDDPError."""
    wanted = path(home)
    if is_complete(wanted):
        return wanted
    try:
        wanted.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with _lock(wanted.parent, report):
            if not is_complete(wanted):  # another simulator may have made it meanwhile
                _make(wanted, report)
    except OSError as error:
        raise CloudDDPError(f"cannot make the operating system of machine nodes: {error}") from None
    return wanted


def _make(wanted: Path, report: Callable[[str], None]) -> None:
    free = shutil.disk_usage(wanted.parent).free
    if free < _NEEDED:
        raise CloudDDPError(
            f"cannot make the operating system of machine nodes: {wanted.parent} has {free >> 20} MiB free, "
            f"and {_NEEDED >> 20} MiB are needed",
            hint=f"free some space, or set {VARIABLE} to a folder on another disk",
        )
    report("making the operating system of machine nodes, once, with debootstrap: about a minute")
    unfinished = wanted.with_suffix(".new")
    for folder in (unfinished, wanted):  # left by an interruption, or damaged
        shutil.rmtree(folder, ignore_errors=True)
    wanted.with_suffix(".log").unlink(missing_ok=True)
    try:
        _run(
            wanted.with_suffix(".log"),
            *("debootstrap", "--variant=minbase", f"--keyring={_KEYRING}", "--force-check-gpg"),
            *(f"--include={_INCLUDED}", _SUITE, str(unfinished)),
        )
        shutil.copy("/etc/resolv.conf", unfinished / "etc/resolv.conf")
        _run(wanted.with_suffix(".log"), "chroot", str(unfinished), "/bin/sh", "-c", _ADDITIONS)
    except BaseException:
        shutil.rmtree(unfinished, ignore_errors=True)
        raise
    unfinished.rename(wanted)


def _run(log: Path, *command: str) -> None:
    """Run a step, with its output in `log`. Raises CloudDDPError with the last lines of it.

    It has mount and pid namespaces of its own: whatever ends this process ends the step, with its processes
    and its mounts. What is removed next could otherwise be the computer's /dev, which debootstrap may mount.
    """
    environment = {name: value for name, value in os.environ.items() if name.lower().endswith("_proxy")}
    environment["PATH"] = f"{programs.search_path()}:/usr/bin:/bin"
    with log.open("ab") as output:
        done = subprocess.run(
            ("unshare", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc", *command),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env=environment,
            check=False,
            preexec_fn=lambda: kernel.die_with_parent(signal.SIGKILL),
        )
    if done.returncode:
        lines = log.read_text(errors="replace").strip().splitlines()[-3:]
        raise CloudDDPError(
            "\n  ".join(
                [f"cannot make the operating system of machine nodes: {command[0]} failed with:", *lines]
            ),
            hint=f"it downloads packages of Debian; the whole log: {log}",
        )


@contextmanager
def _lock(parent: Path, report: Callable[[str], None]) -> Iterator[None]:
    with (parent / "lock").open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            report("another simulator is making the operating system of machine nodes; waiting for it")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield
