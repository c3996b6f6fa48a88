"""The node's stand-in for systemd: cloud-init's last stage, the timers, and what only root may do.

Pid 1, so that no signal of the node's own ends or stops it; it reaps. Answers requests on a Unix socket that every
user of the node may open; who asks is known from the kernel. A frozen node's timers stand still with it, as a real
one's do. What is kept of units, and when they run, is services.py's; what ends the node is here.
"""

from __future__ import annotations

import contextlib
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

from . import children, cloudinit, here, services
from .sshd import Sshd

GRACE = 3.0  # seconds between SIGTERM and the end of everything; systemd's own 90 would only try patience
_DESCRIPTORS = 3
_SYSTEM_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_is_init = False  # set once this process is known to be the init of a simulated node, and no other
_planned: list[threading.Timer] = []  # a shutdown that was asked for later


def power(how: str, *, gently: bool) -> None:
    """End this node: `poweroff` or `reboot`. The simulator sees which by the exit status, and acts as EC2 does."""
    if not _is_init:
        raise RuntimeError("not the init of a simulated node")
    if gently:
        with contextlib.suppress(OSError):  # nobody else is left
            os.kill(-1, signal.SIGTERM)  # all but pid 1
        _await_others()
    os._exit(here.ENDS[how])  # with pid 1, the kernel ends the whole namespace


def _await_others() -> None:
    end = time.monotonic() + GRACE
    while time.monotonic() < end:
        children.reap()
        if not [entry for entry in Path("/proc").iterdir() if entry.name.isdigit() and entry.name != "1"]:
            return
        time.sleep(0.05)


def _plan_power(request: dict[str, Any]) -> dict[str, Any]:
    """Now, in so many seconds, or (`cancel`) not at all."""
    while _planned:
        _planned.pop().cancel()
    if request["how"] == "cancel":
        return {}
    timer = threading.Timer(
        float(request.get("seconds", 0)), power, (request["how"],), {"gently": request["gently"]}
    )
    timer.daemon = True
    _planned.append(timer)
    timer.start()
    return {}


# -- requests ----------------------------------------------------------------------------------------------


def open_door() -> socket.socket:
    """Where requests arrive. Open before anything runs that may make one."""
    here.SOCKET.unlink(missing_ok=True)
    door = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    door.bind(str(here.SOCKET))
    here.SOCKET.chmod(0o666)
    door.listen(64)
    return door


def serve(init: services.Services, door: socket.socket) -> None:
    """Answer requests until the node ends."""
    while True:
        caller, _ = door.accept()
        threading.Thread(target=_answer, args=(init, caller), daemon=True).start()


def _answer(init: services.Services, caller: socket.socket) -> None:
    descriptors: list[int] = []
    with caller:
        try:
            data, descriptors, _, _ = socket.recv_fds(caller, 1 << 16, _DESCRIPTORS)
            while not data.endswith(b"\n") and (more := caller.recv(1 << 16)):
                data += more
            _, user, _ = struct.unpack("3i", caller.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
            reply = _act(init, json.loads(data), user, descriptors, caller)
        except (OSError, ValueError, KeyError, TypeError) as error:
            reply = {"error": str(error)}
        finally:
            for descriptor in descriptors:
                os.close(descriptor)
        try:
            caller.sendall(json.dumps(reply).encode())
            caller.shutdown(socket.SHUT_RDWR)  # a thread that still reads would keep it open
        except OSError:
            pass  # who asked is gone


def _act(
    init: services.Services, request: dict[str, Any], user: int, descriptors: list[int], caller: socket.socket
) -> dict[str, Any]:
    verb = request["do"]
    if verb == "show":
        return {"units": [init.show(name) for name in request["names"]]}
    if verb == "timers":
        return {"units": init.timers()}
    if verb == "sudo" and user in (0, here.USER_ID):
        return _run_as(request, descriptors, caller)
    if user != 0:
        return {"error": "Access denied"}
    if verb == "power":
        return _plan_power(request)
    changes: dict[str, Callable[[str], str]] = {
        "start": lambda name: init.start(name, wait=request.get("wait", True)),
        "stop": init.stop,
        "reload": init.reload,
        "enable": init.enable,
        "disable": init.disable,
    }
    problems = [problem for name in request["names"] if (problem := changes[verb](name))]
    return {"error": "\n".join(problems)} if problems else {}


def _run_as(request: dict[str, Any], descriptors: list[int], caller: socket.socket) -> dict[str, Any]:
    """The command with the caller's own terminal or pipes: who may say `sudo` on EC2 may do anything there."""
    stdin, stdout, stderr = descriptors
    try:
        who = pwd.getpwnam(request["user"])
    except KeyError:
        return {"error": f"unknown user {request['user']}"}
    environment = {"PATH": _SYSTEM_PATH, "HOME": who.pw_dir, "USER": who.pw_name, "LOGNAME": who.pw_name}
    other: dict[str, Any] = (
        {"user": who.pw_uid, "group": who.pw_gid, "extra_groups": []} if who.pw_uid else {}
    )
    try:
        running = children.start(
            request["argv"], stdin=stdin, stdout=stdout, stderr=stderr, cwd=request["cwd"],
            env={**environment, **request["env"]}, start_new_session=True, **other,
        )  # fmt: skip
    except OSError as error:
        return {"error": f"{request['argv'][0]}: {error.strerror}", "exit_code": 1}
    threading.Thread(target=_pass_signals, args=(caller, running), daemon=True).start()
    code = children.wait(running)
    return {"exit_code": code if code >= 0 else 128 - code}


def _pass_signals(caller: socket.socket, running: subprocess.Popen[bytes]) -> None:
    """What the waiting `sudo` is sent, the command gets: a number a byte; a `sudo` that is gone has hung up."""
    while running.poll() is None:
        try:
            numbers = caller.recv(16) or bytes([signal.SIGHUP])
        except OSError:
            return
        if running.poll() is not None:
            return
        for number in numbers:
            try:
                os.killpg(running.pid, number)
            except OSError:
                return
        if numbers == bytes([signal.SIGHUP]):
            return


def main(ssh: Sshd) -> None:
    """Serve the node until it ends; never returns. Called once, as pid 1. Exits where this is no simulated node."""
    global _is_init
    here.require()
    _is_init = True
    os.setsid()
    Path("/proc/self/comm").write_text("init")
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # which the kernel keeps from a pid 1
    facts = here.facts()
    init = services.Services(ssh)
    threading.Thread(target=serve, args=(init, open_door()), daemon=True).start()
    init.start_wanted()
    threading.Thread(
        target=cloudinit.late, args=(facts.get("cloud_config", {}), facts.get("script", "")), daemon=True
    ).start()
    init.keep_time()
