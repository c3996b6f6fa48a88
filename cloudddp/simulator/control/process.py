"""The server process: starts it, waits until it serves, and stops it with everything that it started."""

from __future__ import annotations

import contextlib
import fcntl
import importlib.util
import os
import re
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from cloudddp.errors import CloudDDPError
from cloudddp.simulator.control.admin_client import is_healthy
from cloudddp.simulator.control.options import Options, read_policy
from cloudddp.simulator.control.record import Simulator, find, record_path
from cloudddp.simulator.hosts import node_folder
from cloudddp.simulator.hosts.machines import cgroups, root_image
from cloudddp.simulator.linux import private_files, processes, programs

SERVER_MODULE = "cloudddp.simulator.api.server"
CANNOT_START = "cannot start: "  # prefix of the server's error message, if the reason is known

_PACKAGE_PARENT = Path(__file__).resolve().parents[3]  # the folder that has the package `cloudddp`
_POLL_SECONDS = 0.02
_LOG_LINES = 12  # of the log in an error message
_children: set[int] = set()  # servers that this process has spawned, and therefore has to reap


def start(
    home: Path,
    *,
    port: int = 0,
    ssh_port: int = 0,
    nodes: str = "auto",
    interfaces: Sequence[str] = (),
    timing: Mapping[str, float] = {},
    policies: Mapping[str, Path] = {},
    timeout: float = 30.0,
    report: Callable[[str], None] = lambda _: None,
) -> Simulator:
    """Return the running simulator of `home`, started if there is none; it outlives the caller.

    The options are those of options.Options; `nodes` is auto, namespace, machine or process. `policies` are
    the files of `policy` and `scp`. `timeout` is in seconds, without the operating system of machine nodes,
    which is made once; `report` gets a line about that. Raises CloudDDPError if it cannot start, or if one
    is running with other options; UsageError for invalid options.
    """
    files = {kind: read_policy(path) for kind, path in policies.items()}
    options = Options(port, ssh_port, nodes, tuple(interfaces), timing, files)
    private_files.check(home)
    home = private_files.resolve(home)
    options.check()
    with _lock(home):
        if running := find(home):
            if differences := options.differences(running):
                raise CloudDDPError(
                    f"the simulator is already running, with {', '.join(differences)}",
                    hint="to start it anew, without its nodes: `cloudddp sim stop`, then "
                    f"`{options.command_line()}`",
                )
            return running
        _check_requirements()
        _clean_up(home)
        if nodes == "machine" and not root_image.unavailable_reason():  # else the server says it
            root_image.ensure(home, report)
        return _await_server(_spawn(home, options), home, timeout)


def stop(home: Path) -> int:
    """End the server and every process of every node, and remove the nodes' files. Works after a crash as
    well.

    Returns the number of processes ended: 0 if nothing was running.
    """
    private_files.check(home)
    home = private_files.resolve(home)
    if not (home / "sim").is_dir():
        return 0
    with _lock(home):
        return _clean_up(home)


@contextlib.contextmanager
def _lock(home: Path) -> Iterator[None]:
    lock = private_files.append(private_files.private_folder(home, "sim") / "lock")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
    finally:
        os.close(lock)


def _check_requirements() -> None:
    if not sys.platform.startswith("linux"):
        raise CloudDDPError(
            "the simulator requires Linux: it gives each node a loopback address of its own",
            hint="run it in a Linux container or virtual machine",
        )
    missing = [name for name in ("moto", "asyncssh") if importlib.util.find_spec(name) is None]
    if missing:
        raise CloudDDPError(
            f"the simulator needs {' and '.join(missing)}, which {'are' if missing[1:] else 'is'} not "
            "installed",
            hint="pip install 'cloudddp[sim]' (in a clone: pip install '.[sim]')",
        )


def _spawn(home: Path, options: Options) -> int:
    """Start the server as a daemon that logs to sim/server.log. Returns its pid."""
    private_files.private_folder(home, "sim", "nodes")
    log = private_files.append(_log_path(home), truncate=True)
    # -P: a file in the current folder that is named like a standard module must not be imported.
    command = [sys.executable, "-P", "-m", SERVER_MODULE, "--home", str(home), *options.arguments()]
    try:
        pid = os.posix_spawn(
            sys.executable,
            command,
            _server_environment(home),
            file_actions=[
                (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
                (os.POSIX_SPAWN_DUP2, log, 1),
                (os.POSIX_SPAWN_DUP2, 1, 2),
            ],
            setsid=True,
            setsigmask=[],
            setsigdef=[signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGPIPE],
        )
    finally:
        os.close(log)
    _children.add(pid)
    return pid


def _server_environment(home: Path) -> dict[str, str]:
    environ = {name: value for name, value in os.environ.items() if not name.startswith(("AWS_", "MOTO_"))}
    # Launchers attach AWS's managed policies to their roles.
    environ["MOTO_IAM_LOAD_MANAGED_POLICIES"] = "true"
    environ["PATH"] = programs.search_path()
    environ[processes.HOME_MARK] = str(home)
    environ.pop(processes.NODE_MARK, None)
    search_path = [str(_PACKAGE_PARENT), os.environ.get("PYTHONPATH", "")]
    environ["PYTHONPATH"] = os.pathsep.join(filter(None, search_path))
    return environ


def _await_server(pid: int, home: Path, timeout: float) -> Simulator:
    deadline = time.monotonic() + timeout
    while time.monotonic() < deadline:
        if _has_ended(pid):
            raise _start_error("the simulator's server ended while starting", home)
        simulator = find(home)
        if simulator and simulator.pid == pid and is_healthy(simulator):
            return simulator
        time.sleep(_POLL_SECONDS)
    _clean_up(home)
    raise _start_error(f"the simulator did not respond within {timeout:g} s", home)


def _start_error(what: str, home: Path) -> CloudDDPError:
    """Return an error with the server's own message, or else the end of its log."""
    log = _log_path(home)
    try:
        lines = log.read_text(errors="replace").splitlines()[-_LOG_LINES:]
    except OSError:
        lines = []
    message = next((line for line in reversed(lines) if line.startswith(CANNOT_START)), "")
    if not message:
        return CloudDDPError("\n  ".join([f"{what}; its last lines:", *lines]), hint=f"the whole log: {log}")
    reason = re.sub(r"\[Errno \d+\] ", "", message.removeprefix(CANNOT_START))
    hint = f"the log: {log}"
    if reason.startswith("port "):
        hint = "another simulator? `cloudddp sim stop` with its CLOUDDDP_HOME; or use another --port, or none"
    elif "machine nodes are not available" in reason:
        hint = "or use --nodes namespace, with stand-ins for systemd and cloud-init (docs/simulator.md)"
    elif "nodes are not available" in reason:
        hint = "or use --nodes process, which needs none of this and is less faithful (docs/simulator.md)"
    return CloudDDPError(f"the simulator cannot start: {reason}", hint=hint)


def _clean_up(home: Path) -> int:
    """End and remove all that a simulator of `home` left, running or not. Call with the lock held."""
    try:
        ended = processes.kill(home)
    except TimeoutError as error:
        raise CloudDDPError(f"cannot stop the simulator: {error}", hint="cloudddp sim stop") from error
    for pid in list(_children):
        _has_ended(pid)
    record_path(home).unlink(missing_ok=True)
    folders = list(node_folder.nodes_folder(home).glob("*"))
    if os.getuid() == 0:  # only then there are machine nodes
        cgroups.clean_up([folder.name for folder in folders])
    for folder in folders:
        node_folder.remove(folder)
    return ended


def _has_ended(pid: int) -> bool:
    try:
        ended = os.waitpid(pid, os.WNOHANG) != (0, 0)
    except ChildProcessError:
        ended = True
    if ended:
        _children.discard(pid)
    return ended


def _log_path(home: Path) -> Path:
    return home / "sim" / "server.log"
