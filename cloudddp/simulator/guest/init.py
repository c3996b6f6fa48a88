"""Pid 1 of a node, in place of systemd: runs cloud-init's last stage and timers, and acts for root.

As pid 1 it cannot be killed or stopped by signals of the node's own, and it reaps orphans. It serves requests
on a Unix socket that every user of the node may open, and identifies the caller by SO_PEERCRED. The timers of
a frozen node stop with it, as those of a real machine do. services.py keeps the units; power is handled here.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import pwd
import signal
import socket
import struct
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from . import child_processes, cloud_init, log, on_node, services
from .sshd import Sshd

GRACE_SECONDS = 3.0  # between SIGTERM and the end of the node; systemd's default is 90
_DESCRIPTORS = 3
NOLOGIN = Path("/run/nologin")
# What systemd-tmpfiles writes during the boot; systemd-user-sessions.service removes it
# (tmpfiles.d/systemd-nologin.conf).
_NOLOGIN_TEXT = (
    "System is booting up. Unprivileged users are not permitted to log in yet. Please come back later."
)
DPKG_LOCK = Path("/var/lib/dpkg/lock-frontend")
_reached_sysinit = threading.Event()  # D-Bus and logind are up
_is_init = False  # set once this process is known to be the init of a simulated node
_scheduled: list[threading.Timer] = []  # a shutdown that was requested for later


def main(ssh: Sshd, *, report: int = -1, chown_to_user: Callable[..., None] = lambda *_: None) -> None:
    """Run the node until it ends; never returns. Call once, as pid 1. Exits outside a simulated node.

    An error of the boot is written to the descriptor `report`, which is closed once sshd runs.
    """
    global _is_init
    on_node.require()
    _is_init = True
    os.setsid()
    Path("/proc/self/comm").write_text("init")
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # which the kernel does not deliver to pid 1
    manager = services.Services(ssh)
    threading.Thread(target=serve, args=(manager, listen()), daemon=True).start()
    threading.Thread(target=_boot, args=(manager, ssh, report, chown_to_user), daemon=True).start()
    manager.run_timers()


# -- the boot, as on Ubuntu ---------------------------------------------------------------------------------
# cloud-init-network.service (bootcmd, write_files, host keys) is ordered before sysinit.target, so nothing
# that waits for that target runs yet: no D-Bus and no logind, but systemd itself answers root on
# /run/systemd/private. sshd comes after it, and cloud-final.service (runcmd, scripts) last. Timers run from
# the beginning.


def _boot(manager: services.Services, ssh: Sshd, report: int, chown_to_user: Callable[..., None]) -> None:
    """Boot the node. An error before sshd runs ends the node, and is written to the descriptor `report`."""
    facts = on_node.facts()
    wanted = facts.get("boot", {})
    config = facts.get("cloud_config", {})
    try:
        cloud_init.early(config, facts.get("login_keys", []), chown_to_user=chown_to_user)
        _reached_sysinit.set()
        manager.start_enabled()
        if wanted.get("nologin_seconds"):
            NOLOGIN.write_text(f"{_NOLOGIN_TEXT}\n")
        time.sleep(wanted.get("ssh_seconds", 0))
        if problem := ssh.start():
            raise RuntimeError(problem)
        os.close(report)
    except Exception as error:
        os.write(report, str(error).encode(errors="replace")[:2000])
        os._exit(1)
    _later(_end_nologin, wanted.get("nologin_seconds", 0))
    _later(_hold_dpkg_lock, wanted.get("apt_lock_seconds", 0))
    time.sleep(wanted.get("final_seconds", 0))
    cloud_init.late(config, facts.get("script", ""))


def _later(action: Callable[[float], Any], seconds: float) -> None:
    if seconds:
        threading.Thread(target=action, args=(seconds,), daemon=True).start()


def _end_nologin(seconds: float) -> None:
    time.sleep(seconds)
    NOLOGIN.unlink(missing_ok=True)


def _hold_dpkg_lock(seconds: float) -> None:
    """Hold the lock that apt takes first, as unattended-upgrades does in the minutes after the first boot."""
    try:
        with DPKG_LOCK.open("a") as file:
            fcntl.lockf(file, fcntl.LOCK_EX)
            time.sleep(seconds)
    except OSError as error:
        log.write(f"{DPKG_LOCK}: {error}")


# -- power -------------------------------------------------------------------------------------------------


def power(action: str, *, force: bool) -> None:
    """End this node: `poweroff` or `reboot`. The simulator reads which from the exit status, and acts as EC2
    does."""
    if not _is_init:
        raise RuntimeError("not the init of a simulated node")
    if not force:
        with contextlib.suppress(OSError):  # no other process is left
            os.kill(-1, signal.SIGTERM)  # all but pid 1
        _await_others()
    os._exit(on_node.EXIT_STATUS[action])  # the kernel ends the pid namespace with pid 1


def _await_others() -> None:
    deadline = time.monotonic() + GRACE_SECONDS
    while time.monotonic() < deadline:
        child_processes.reap()
        if not [entry for entry in Path("/proc").iterdir() if entry.name.isdigit() and entry.name != "1"]:
            return
        time.sleep(0.05)


def _schedule_power(message: dict[str, Any]) -> dict[str, Any]:
    """Replace the scheduled shutdown; `cancel` only removes it.

    A shutdown at a later time is a D-Bus call to logind (systemd's systemctl-logind.c), so it fails in
    bootcmd; one that is due now falls back to a request to systemd.
    """
    if float(message.get("seconds", 0)) > 0 and not _reached_sysinit.is_set():
        return {"error": "Failed to connect to bus: No such file or directory"}
    while _scheduled:
        _scheduled.pop().cancel()
    if message["action"] == "cancel":
        return {}
    seconds = float(message.get("seconds", 0))
    timer = threading.Timer(seconds, power, (message["action"],), {"force": message["force"]})
    timer.daemon = True
    _scheduled.append(timer)
    timer.start()
    return {}


# -- requests ----------------------------------------------------------------------------------------------


def listen() -> socket.socket:
    """Create the socket for requests. Call before anything runs that may make one."""
    Path(on_node.SOCKET).unlink(missing_ok=True)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(on_node.SOCKET)
    Path(on_node.SOCKET).chmod(0o666)
    listener.listen(64)
    return listener


def serve(manager: services.Services, listener: socket.socket) -> None:
    """Serve requests until the node ends."""
    while True:
        connection, _ = listener.accept()
        threading.Thread(target=_handle, args=(manager, connection), daemon=True).start()


def _handle(manager: services.Services, connection: socket.socket) -> None:
    descriptors: list[int] = []
    with connection:
        try:
            data, descriptors, _, _ = socket.recv_fds(connection, 1 << 16, _DESCRIPTORS)
            while not data.endswith(b"\n") and (more := connection.recv(1 << 16)):
                data += more
            _, user, _ = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
            reply = _reply(manager, json.loads(data), user, descriptors, connection)
        except (OSError, ValueError, KeyError, TypeError) as error:
            reply = {"error": str(error)}
        finally:
            for descriptor in descriptors:
                os.close(descriptor)
        try:
            connection.sendall(json.dumps(reply).encode())
            connection.shutdown(socket.SHUT_RDWR)  # a thread that still reads would keep it open
        except OSError:
            pass  # the caller has exited


def _reply(
    manager: services.Services,
    message: dict[str, Any],
    user: int,
    descriptors: list[int],
    connection: socket.socket,
) -> dict[str, Any]:
    verb = message["verb"]
    if verb == "show":
        return {"units": [manager.show(name) for name in message["names"]]}
    if verb == "timers":
        return {"units": manager.timers()}
    if verb == "sudo" and user in (0, on_node.USER_ID):
        return _sudo(message, descriptors, connection)
    if user != 0:
        return {"error": "Access denied"}
    if verb == "power":
        return _schedule_power(message)
    changes: dict[str, Callable[[str], str]] = {
        "start": lambda name: manager.start(name, wait=message.get("wait", True)),
        "stop": manager.stop,
        "reload": manager.reload,
        "enable": manager.enable,
        "disable": manager.disable,
    }
    problems = [problem for name in message["names"] if (problem := changes[verb](name))]
    return {"error": "\n".join(problems)} if problems else {}


# -- sudo --------------------------------------------------------------------------------------------------


def _sudo(message: dict[str, Any], descriptors: list[int], connection: socket.socket) -> dict[str, Any]:
    """Run a command on the caller's terminal or pipes. On EC2, too, the login user may run anything as
    root."""
    stdin, stdout, stderr = descriptors
    try:
        account = pwd.getpwnam(message["user"])
    except KeyError:
        return {"error": f"unknown user {message['user']}"}
    environment = {
        "PATH": on_node.SYSTEM_PATH,
        "HOME": account.pw_dir,
        "USER": account.pw_name,
        "LOGNAME": account.pw_name,
    }
    identity: dict[str, Any] = {}
    if account.pw_uid:
        identity = {"user": account.pw_uid, "group": account.pw_gid, "extra_groups": []}
    try:
        process = child_processes.start(
            message["argv"],
            stdin=stdin,
            stdout=stdout,
            stderr=stderr,
            cwd=message["cwd"],
            env={**environment, **message["env"]},
            start_new_session=True,
            **identity,
        )
    except OSError as error:
        return {"error": f"{message['argv'][0]}: {error.strerror}", "exit_code": 1}
    threading.Thread(target=_relay_signals, args=(connection, process), daemon=True).start()
    code = child_processes.wait(process)
    return {"exit_code": code if code >= 0 else 128 - code}


def _relay_signals(connection: socket.socket, process: subprocess.Popen[bytes]) -> None:
    """Forward the signals that the waiting `sudo` receives, one byte each. A closed connection means
    SIGHUP."""
    while process.poll() is None:
        try:
            numbers = connection.recv(16) or bytes([signal.SIGHUP])
        except OSError:
            return
        if process.poll() is not None:
            return
        for number in numbers:
            try:
                os.killpg(process.pid, number)
            except OSError:
                return
        if numbers == bytes([signal.SIGHUP]):
            return
