"""One node as a host of its own: namespaces, a root file system, an interface, and then its init as pid 1.

Run as a program by hosts.py, once per boot, with a line of JSON on stdin. It makes the namespaces, says `made`,
waits for `go` (the lab's end of the cable is plugged in meanwhile), and becomes the parent of the node's pid 1,
whose death ends everything on the node, and whose exit status it passes on (here.ENDS). Standard library only; it
never comes back to the lab's own namespaces.

What a node's owner wrote (bootcmd, for one) is run only when nothing in the node's pid namespace has more power
than the node may have: root of the node may make any process there do its will.
"""

from __future__ import annotations

import contextlib
import os
import signal
import stat
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

from cloudddp.sim import kernel, rootfs, seccomp
from cloudddp.sim.guest import cloudinit, here, init, log, sshd
from cloudddp.sim.rootfs import USER_ID, Machine

_OUT_OF_MEMORY_FIRST = "500"  # of 1000: as if it used half the memory more than it does
_LONGEST_WORD = 2000  # bytes that a boot's failure may be told in


def main() -> int:
    machine = Machine.from_json(sys.stdin.readline())
    # When memory runs out, the kernel is to take the nodes before the user's own programs.
    Path("/proc/self/oom_score_adj").write_text(_OUT_OF_MEMORY_FIRST)
    kernel.unshare(
        kernel.NEW_NETWORK | kernel.NEW_MOUNTS | kernel.NEW_NAME | kernel.NEW_IPC | kernel.NEW_CGROUPS
    )
    kernel.set_name(machine.name)
    print("made", flush=True)
    if sys.stdin.readline().strip() != "go":
        return 1
    _plug_in(machine)
    kernel.unshare(kernel.NEW_PIDS)  # not before: the first process that is forked in it is its pid 1
    heard, words = os.pipe()
    first = os.fork()
    if first == 0:
        os.close(heard)
        _run(machine, words)
    os.close(words)
    print(f"pid {first}", flush=True)
    _give_up_powers(())
    seccomp.confine()
    if word := os.read(heard, _LONGEST_WORD).decode(errors="replace"):
        print("".join(c if c.isprintable() else "?" for c in word), file=sys.stderr, flush=True)
    return os.waitstatus_to_exitcode(os.waitpid(first, 0)[1])


def _run(machine: Machine, words: int) -> None:
    """Be pid 1 of the node, which stands in for systemd. Never returns: says on `words` why it cannot be, and exits."""
    try:
        kernel.die_with_parent(signal.SIGKILL)
        _redirect(os.devnull)  # the lab's own ends: root of the node could write there
        rootfs.build(machine)
        _give_up_powers(kernel.HARMLESS)  # before any file is opened that the node's owner may have put there
        _redirect("/var/log/init.log")
        ssh = sshd.Sshd(
            prepare=lambda: _confine_sshd(machine, words),
            redirect=lambda: _redirect("/var/log/auth.log", mode=0o600),
        )
        seccomp.confine()
        ssh.await_ready()
        facts = here.facts()
        cloudinit.early(facts["cloud_config"], facts["login_keys"], user=rootfs.give_to_user)
        if problem := ssh.start():
            raise RuntimeError(problem)
        os.close(words)
        _close_all_but(ssh.descriptors)
        os.environ.clear()
        os.environ.update(PATH="/usr/sbin:/usr/bin:/sbin:/bin", HOME="/root", LANG="C.UTF-8")
    except Exception as error:
        os.write(words, f"{machine.name}: {error}".encode(errors="replace"))
        os._exit(1)
    try:
        init.main(ssh)  # not by execve: a second interpreter would be the larger part of a boot
    except Exception as error:
        log.say(f"init: {error!r}")
    finally:
        os._exit(1)


def _confine_sshd(machine: Machine, words: int) -> None:
    os.close(words)
    if not machine.as_root:
        # sshd as root would want other users, whom an ordinary user's lab has not: it runs as the login user.
        kernel.become(USER_ID)
    seccomp.confine()


def _close_all_but(kept: Iterable[int]) -> None:
    for descriptor in set(range(3, 256)) - set(kept):
        with contextlib.suppress(OSError):
            os.close(descriptor)


def _plug_in(machine: Machine) -> None:
    """Give the interface, which came from outside, its address."""
    subprocess.run(["ip", "-batch", "-"], input=machine.network, text=True, check=True)
    if not machine.as_root:
        Path("/proc/sys/net/ipv4/ip_unprivileged_port_start").write_text("0")  # sshd is the login user there
    highest = USER_ID if machine.as_root else 0  # an ordinary user's lab has one group, which is all of them
    # ping has no powers of its own here
    Path("/proc/sys/net/ipv4/ping_group_range").write_text(f"0 {highest}")


def _give_up_powers(kept: Iterable[int]) -> None:
    """Root here is the machine's own root, or an ordinary user: from here on with no power past this node."""
    kernel.keep_only(kept)
    kernel.no_new_privileges()


def _redirect(log: str, *, mode: int = 0o644) -> None:
    """What is said from here on goes to `log`, and nothing is heard."""
    if log != os.devnull and not _is_plain(log):
        Path(log).unlink()  # a pipe, for one, would hold up the boot
    nothing = os.open(os.devnull, os.O_RDWR)
    said = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW, mode)
    for target, source in ((0, nothing), (1, said), (2, said)):
        os.dup2(source, target)
    os.close(nothing)
    os.close(said)


def _is_plain(path: str) -> bool:
    try:
        return stat.S_ISREG(os.lstat(path).st_mode)
    except FileNotFoundError:
        return True


if __name__ == "__main__":
    sys.exit(main())
