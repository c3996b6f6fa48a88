"""What the laptop's part uses is on macOS, too: no namespaces, no /proc, no programs with GNU's options. The
simulator and the node agent need Linux, and say so."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from cloudddp.errors import CloudDDPError
from cloudddp.simulator.control import process

ROOT = Path(__file__).parents[2]
# What Python has on Linux only.
LINUX = frozenset(
    """
    sched_getaffinity sched_setaffinity memfd_create pidfd_open eventfd splice setns unshare copy_file_range
    posix_fadvise posix_fallocate getresuid setresuid O_TMPFILE O_PATH O_DIRECT epoll prctl
    AF_NETLINK AF_PACKET SO_BINDTODEVICE TCP_USER_TIMEOUT TCP_KEEPIDLE SOCK_CLOEXEC SOCK_NONBLOCK MSG_ERRQUEUE
    sigtimedwait sigwaitinfo SIGRTMIN SIGPWR SIGSTKFLT pidfd_send_signal accept4 pipe2
    """.split()
)
# Programs that macOS has with other options, or not at all.
PROGRAMS = frozenset("stat sed date readlink find xargs tar cp mktemp base64 timeout ip ss setsid".split())
PATHS = ("/proc/", "/sys/", "/dev/shm", "/run/")
# Used only where it is there.
GUARDED = {("ssh/target.py", "TCP_USER_TIMEOUT"), ("timings.py", "/proc/self/stat")}


def laptop() -> Iterator[tuple[str, ast.AST]]:
    for path in sorted((ROOT / "cloudddp").rglob("*.py")):
        name = path.relative_to(ROOT / "cloudddp").as_posix()
        if not name.startswith("simulator/"):
            for node in ast.walk(ast.parse(path.read_text())):
                yield name, node


def used() -> Iterator[tuple[str, str]]:
    """Each file with what it uses: an attribute, a file of the kernel, or a program with its arguments."""
    for name, node in laptop():
        match node:
            case ast.Attribute(attr=attribute) if attribute in LINUX:
                yield name, attribute
            case ast.Constant(value=str(text)) if text.startswith(PATHS):
                yield name, text
            case ast.List(elts=[ast.Constant(value=str(text)), *_]) if text in PROGRAMS:
                yield name, text


def test_laptop_uses_nothing_that_macos_lacks() -> None:
    assert set(used()) == GUARDED


def test_simulator_says_that_it_needs_linux(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("sys.platform", "darwin")
    with pytest.raises(CloudDDPError, match="requires Linux") as caught:
        process.start(tmp_path, nodes="process")
    assert "virtual machine" in str(caught.value.hint)
