"""Starts, finds and ends the simulator's server process; says what points an AWS client at it.

Standard library only: importing this must cost nothing, since every command with `--sim` does. What the server
does is none of its business; it knows the record the server leaves in `sim/sim.json` and the marks on processes.
"""

from __future__ import annotations

import contextlib
import fcntl
import importlib.util
import json
import os
import re
import shutil
import signal
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from cloudddp import safe_files
from cloudddp.errors import CloudDDPError, UsageError
from cloudddp.sim import processes, wishes

HIDDEN = (
    "AWS_PROFILE",
    "AWS_DEFAULT_PROFILE",
    "AWS_SESSION_TOKEN",
    "AWS_SECURITY_TOKEN",
    "AWS_CREDENTIAL_EXPIRATION",
    "AWS_ROLE_ARN",
    "AWS_ROLE_SESSION_NAME",
    "AWS_WEB_IDENTITY_TOKEN_FILE",
    "AWS_CONTAINER_CREDENTIALS_RELATIVE_URI",
    "AWS_CONTAINER_CREDENTIALS_FULL_URI",
    "AWS_CONTAINER_AUTHORIZATION_TOKEN",
    "AWS_CONTAINER_AUTHORIZATION_TOKEN_FILE",
    "AWS_IGNORE_CONFIGURED_ENDPOINT_URLS",
    "AWS_ENDPOINT_URL_EC2",
    "AWS_ENDPOINT_URL_SSM",
    "AWS_ENDPOINT_URL_STS",
    "AWS_ENDPOINT_URL_IAM",
    "AWS_ENDPOINT_URL_PRICING",
    "AWS_ENDPOINT_URL_SCHEDULER",
    "AWS_ENDPOINT_URL_SERVICE_QUOTAS",
    "AWS_USE_FIPS_ENDPOINT",
    "AWS_USE_DUALSTACK_ENDPOINT",
)
"""Variables to remove beside setting `environment`: each could send a call to, or take a key from, elsewhere."""

TIMING = {"pending": 0.0, "booting": 0.0, "shutting-down": 0.0, "unknown": 0.0, "visible": 3600.0}
"""How long EC2 takes for what, in seconds; see lifecycle.Timing."""

INTERFACE = "ens5"  # what the nodes' interface is called unless told

_LOG_LINES = 12
_CANNOT = "cannot start: "  # how the server begins its one sentence where it knows why
_children: set[int] = set()  # servers that this very process spawned, which nobody else can reap


@dataclass(frozen=True, slots=True)
class Simulator:
    """A running simulator. `network` holds every address of its nodes; `ssh_port` is the same on all of them."""

    pid: int
    endpoint: str
    region: str
    network: str
    ssh_port: int
    started: str  # ISO 8601, UTC
    home: Path
    nodes: str  # namespace: hosts of their own; process: they share this computer
    why: str  # why not namespaces, or ''
    interfaces: tuple[str, ...] = (INTERFACE,)
    timing: Mapping[str, float] = field(default_factory=lambda: dict(TIMING))


def start(
    home: Path,
    *,
    port: int = 0,
    ssh_port: int = 0,
    nodes: str = "auto",
    interfaces: Sequence[str] = (),
    timing: Mapping[str, float] = {},
    timeout: float = 30.0,
) -> Simulator:
    """The running simulator of `home`, started if there is none; it outlives the caller.

    Port 0 means any. `nodes` is auto, namespace or process; `interfaces` are the names that the nodes' interfaces
    take in turn; `timing` overrides TIMING; `timeout` (seconds) is how long the server may take to answer. Raises
    CloudDDPError if it cannot be started, or if one runs that is not as was asked for; UsageError for a name that no
    interface can have, or names for nodes that have none.
    """
    safe_files.check(home)
    home = safe_files.resolved(home)
    wishes.check(interfaces, nodes)
    with _locked(home):
        if running := find(home):
            if other := wishes.unlike(
                running, port=port, ssh_port=ssh_port, nodes=nodes, interfaces=interfaces, timing=timing
            ):
                raise CloudDDPError(
                    f"the simulator runs already, with {', '.join(other)}",
                    hint="cloudddp sim stop, then start it",
                )
            return running
        _require()
        _sweep(home)
        arguments = ["--home", str(home), "--port", str(port), "--ssh-port", str(ssh_port), "--nodes", nodes]
        arguments += [word for name in interfaces for word in ("--interface", name)]
        arguments += [word for name, value in timing.items() for word in (f"--{name}-seconds", str(value))]
        return _await_server(_spawn(home, arguments), home, timeout)


def find(home: Path) -> Simulator | None:
    """The live simulator recorded under `home`, or None. A process that merely got its pid is not taken for it.

    Raises UsageError where others could have written the record.
    """
    safe_files.check(home)
    home = safe_files.resolved(home)
    try:
        record = json.loads(_record(home).read_text())
        ticks = record.pop("ticks")
        interfaces = tuple(record.pop("interfaces", (INTERFACE,)))
        simulator = Simulator(**{**record, "home": Path(record["home"]), "interfaces": interfaces})
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
    process = processes.look(simulator.pid)
    if process is None or process.started != ticks or process.home != str(home) or process.node:
        return None
    if processes.owner(simulator.pid) != os.getuid():
        return None
    return simulator


def stop(home: Path) -> int:
    """Ends the server and every process of every node, and removes the nodes' files.

    Works as well after the server was killed. Returns the number of processes ended: 0 if nothing ran.
    """
    safe_files.check(home)
    home = safe_files.resolved(home)
    if not (home / "sim").is_dir():
        return 0
    with _locked(home):
        return _sweep(home)


def environment(sim: Simulator) -> dict[str, str]:
    """The variables that point any AWS client, and cloudddp, at `sim`. Remove `HIDDEN` as well."""
    variables = {
        "AWS_ENDPOINT_URL": sim.endpoint,
        "AWS_ACCESS_KEY_ID": "simulated",
        "AWS_SECRET_ACCESS_KEY": "simulated",
        "AWS_DEFAULT_REGION": sim.region,
        "AWS_REGION": sim.region,
        "AWS_EC2_METADATA_DISABLED": "true",
        # With no files to read, a profile named by hand is an error instead of somebody's real account.
        "AWS_CONFIG_FILE": os.devnull,
        "AWS_SHARED_CREDENTIALS_FILE": os.devnull,
        "CLOUDDDP_CHECKIP_URL": f"{sim.endpoint}/_cloudddp/address",
        "CLOUDDDP_SSH_PORT": str(sim.ssh_port),
    }
    for name in ("NO_PROXY", "no_proxy"):
        kept = [item for item in os.environ.get(name, "").split(",") if item and item != "127.0.0.1"]
        variables[name] = ",".join([*kept, "127.0.0.1"])
    return variables


def enter(sim: Simulator) -> None:
    """Move this process to where the simulator's nodes can be reached; it cannot leave again.

    Nothing to do for process nodes. Call it while there is one thread. Raises CloudDDPError.
    """
    if sim.nodes != "namespace":
        return
    from cloudddp.sim import kernel

    spaces = Path(f"/proc/{sim.pid}/ns")
    try:
        if (spaces / "user").readlink() != Path("/proc/self/ns/user").readlink():
            kernel.enter(spaces / "user", kernel.NEW_USER)
        kernel.enter(spaces / "net", kernel.NEW_NETWORK)
    except OSError as error:
        raise CloudDDPError(
            f"the simulator's network cannot be entered: {error}", hint="cloudddp sim stop, then start it"
        ) from error


def fault(sim: Simulator, kind: str, nodes: Sequence[str], *, cluster: str | None = None) -> dict[str, Any]:
    """Break something (see pages.FAULTS); `cluster` says whose ranks are meant. Returns kind, nodes (instance ids)
    and healed (the faults that `heal` ended). Raises UsageError for a fault or node that does not exist."""
    return _post(sim, "fault", {"kind": kind, "nodes": list(nodes), "cluster": cluster})


def interrupt(sim: Simulator, node: str, *, seconds: float, cluster: str | None = None) -> dict[str, Any]:
    """Take a spot node back in so many seconds, with EC2's notice. Raises UsageError."""
    return _post(sim, "interrupt", {"node": node, "seconds": seconds, "cluster": cluster})


def conditions(sim: Simulator, changes: Mapping[str, Any]) -> dict[str, Any]:
    """Change what EC2 answers (see conditions.py); returns all that holds then. Raises UsageError."""
    return _post(sim, "conditions", changes)


def _post(sim: Simulator, page: str, body: Mapping[str, Any]) -> dict[str, Any]:
    request = urllib.request.Request(  # noqa: S310  the endpoint is our own
        f"{sim.endpoint}/_cloudddp/{page}",
        data=json.dumps(body).encode(),
        headers={"Content-Type": "application/json"},
    )
    try:
        return dict(json.loads(_get(request)))
    except urllib.error.HTTPError as error:
        raise _refused(error) from None
    except (OSError, ValueError) as error:
        raise CloudDDPError(f"the simulator at {sim.endpoint} does not answer: {error}") from error


def _refused(error: urllib.error.HTTPError) -> CloudDDPError:
    try:
        said = dict(json.loads(error.read()))
    except ValueError:  # not a page of ours that speaks
        return CloudDDPError(
            f"the simulator fails: {error}", hint="its log is sim/server.log of CLOUDDDP_HOME"
        )
    return UsageError(str(said.get("error", error)), hint=str(said.get("hint", "")))


def nodes(sim: Simulator) -> list[dict[str, Any]]:
    """One record per instance that is not terminated, by cluster and rank: cluster (a name, or None), rank (or None),
    instance_id, state, private_ip, public_ip, ssh_port, home, deadline (ISO 8601, UTC, or None), processes (pids),
    faults (those that hold, as `fault` calls them; `cut-between ID`), interruption (when a spot node is taken back,
    ISO 8601, UTC, or None). Raises CloudDDPError if the server does not answer.
    """
    try:
        listed = json.loads(_get(f"{sim.endpoint}/_cloudddp/nodes"))
    except (OSError, ValueError) as error:
        raise CloudDDPError(
            f"the simulator at {sim.endpoint} does not answer: {error}",
            hint="cloudddp sim stop, then start it",
        ) from error
    return [dict(node) for node in listed]


def record(sim: Simulator) -> None:
    """Written by the server about itself, once it answers; what `find` reads."""
    from cloudddp.state import write_atomic

    process = processes.look(sim.pid)
    if process is None:
        raise RuntimeError("a process that cannot see itself in /proc")
    write_atomic(
        _record(sim.home), json.dumps({**asdict(sim), "home": str(sim.home), "ticks": process.started})
    )


def _record(home: Path) -> Path:
    return home / "sim" / "sim.json"


def _log(home: Path) -> Path:
    return home / "sim" / "server.log"


def _get(url: str | urllib.request.Request) -> bytes:
    # No proxy: the address is this machine's own whatever the environment says.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(url, timeout=10) as answer:
        return bytes(answer.read())


@contextlib.contextmanager
def _locked(home: Path) -> Iterator[None]:
    with safe_files.private(home, "sim") as folder:
        lock = folder.append("lock")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
    finally:
        os.close(lock)


def _require() -> None:
    if not sys.platform.startswith("linux"):
        raise CloudDDPError(
            "the simulator needs Linux: it gives each node a loopback address of its own",
            hint="run it in a Linux container or virtual machine",
        )
    missing = [name for name in ("moto", "asyncssh") if importlib.util.find_spec(name) is None]
    if missing:
        raise CloudDDPError(
            f"the simulator needs {' and '.join(missing)}, which {'are' if missing[1:] else 'is'} not installed",
            hint="pip install 'cloudddp[sim]' (in a clone: pip install '.[sim]')",
        )


def _spawn(home: Path, arguments: list[str]) -> int:
    root = str(Path(__file__).resolve().parents[2])
    environ = {name: value for name, value in os.environ.items() if not name.startswith(("AWS_", "MOTO_"))}
    environ["MOTO_IAM_LOAD_MANAGED_POLICIES"] = "true"  # launchers attach AWS's own policies to their roles
    environ[processes.HOME_MARK] = str(home)
    environ.pop(processes.NODE_MARK, None)
    environ["PYTHONPATH"] = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH", "")]))
    safe_files.private(home, "sim", "nodes").close()
    with safe_files.private(home, "sim") as folder:
        log = folder.append(_log(home).name, empty=True)
    try:
        pid = os.posix_spawn(
            sys.executable,
            # -P: a file of the user's named like a standard module must not be imported by the server.
            [sys.executable, "-P", "-m", "cloudddp.sim.server", *arguments],
            environ,
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


def _await_server(pid: int, home: Path, timeout: float) -> Simulator:
    patience = time.monotonic() + timeout
    while time.monotonic() < patience:
        if _reaped(pid):
            raise _failed("the simulator's server ended while starting", home)
        simulator = find(home)
        if simulator and simulator.pid == pid and _answers(simulator):
            return simulator
        time.sleep(0.02)
    _sweep(home)
    raise _failed(f"the simulator did not answer within {timeout:g} s", home)


def _answers(simulator: Simulator) -> bool:
    try:
        return _get(f"{simulator.endpoint}/_cloudddp/health") == b"ok\n"
    except OSError:
        return False


def _failed(what: str, home: Path) -> CloudDDPError:
    try:
        tail = _log(home).read_text(errors="replace").splitlines()[-_LOG_LINES:]
    except OSError:
        tail = []
    said = next((line for line in reversed(tail) if line.startswith(_CANNOT)), "")
    if said:
        return _explained(re.sub(r"\[Errno \d+\] ", "", said.removeprefix(_CANNOT)), home)
    return CloudDDPError(
        "\n  ".join([f"{what}; its last lines:", *tail]), hint=f"the whole log: {_log(home)}"
    )


def _explained(why: str, home: Path) -> CloudDDPError:
    """The server's own sentence, with what helps."""
    hint = f"the log: {_log(home)}"
    if why.startswith("port "):
        hint = "another simulator's? `cloudddp sim stop` with its CLOUDDDP_HOME; else take another --port, or leave it out"
    elif "namespace nodes cannot be had" in why:
        hint = "--nodes process needs none of that, and is less faithful (docs/simulator.md)"
    return CloudDDPError(f"the simulator cannot start: {why}", hint=hint)


def _sweep(home: Path) -> int:
    """Ends and removes whatever a simulator of `home` left, alive or dead. Call with the lock held."""
    try:
        ended = processes.end(home)
    except TimeoutError as error:
        raise CloudDDPError(f"the simulator could not be ended: {error}", hint="cloudddp sim stop") from error
    for pid in list(_children):
        _reaped(pid)
    _record(home).unlink(missing_ok=True)
    for node in (home / "sim" / "nodes").glob("*"):
        remove_node(node)
    return ended


def remove_node(folder: Path) -> None:
    """Removes a node's files, and the short name for its temporary folder where it had one (see nodes.py)."""
    with contextlib.suppress(OSError):
        short = Path((folder / "run" / "tmp-link").read_text())
        if short.is_symlink() and short.readlink() == folder / "tmp":
            short.unlink()
    shutil.rmtree(folder, ignore_errors=True)


def _reaped(pid: int) -> bool:
    try:
        gone = os.waitpid(pid, os.WNOHANG) != (0, 0)
    except ChildProcessError:
        gone = True
    if gone:
        _children.discard(pid)
    return gone
