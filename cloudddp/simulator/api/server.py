"""The simulator's server process: `python -m cloudddp.simulator.api.server --home DIR`.

moto's EC2 and the admin API on a loopback port, and the nodes behind it, in one process. control/ starts and
stops it, and does all that has to work without it.
"""

from __future__ import annotations

import argparse
import errno
import gc
import logging
import os
import signal
import socket
import sys
import threading
from collections.abc import Iterable
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from cloudddp.errors import UsageError
from cloudddp.simulator.api.admin_api import PREFIX, AdminApi
from cloudddp.simulator.api.authorization import Permissions, Policies, with_authorization
from cloudddp.simulator.api.credential_checks import with_clock, with_credential_checks
from cloudddp.simulator.api.firewall import Firewall, LoopbackAddresses
from cloudddp.simulator.api.proxy import with_conditions, with_pricing
from cloudddp.simulator.api.wsgi import Application, Environ, StartResponse
from cloudddp.simulator.control import record
from cloudddp.simulator.control.options import KINDS, PolicyFile, read_policy
from cloudddp.simulator.control.process import CANNOT_START
from cloudddp.simulator.control.record import INTERFACE, TIMING, Simulator
from cloudddp.simulator.ec2 import install, speed
from cloudddp.simulator.ec2.catalog import ACCOUNT, CONDITIONS
from cloudddp.simulator.ec2.speed import fast_imports
from cloudddp.simulator.hosts import host_backend
from cloudddp.simulator.hosts.host_backend import HostBackend
from cloudddp.simulator.hosts.lifecycle import Lifecycle, Timing
from cloudddp.simulator.linux import processes
from cloudddp.simulator.linux.socket_owner import SocketOwners
from cloudddp.simulator.metadata.server import MetadataServer
from cloudddp.simulator.metadata.service import Metadata

if TYPE_CHECKING:
    from cloudddp.simulator.hosts.loopback import LoopbackHosts  # imports asyncssh

_REGION = "us-east-1"
_POLICIES = ("policy", "scp")


def main(arguments: list[str] | None = None) -> int:
    """Serve until SIGTERM. Returns an exit code; errors are on stderr."""
    options = _parse(arguments)
    os.umask(0o022)  # with the user's umask, the login user might be unable to read the node's files
    if os.environ.get(processes.HOME_MARK) != str(options.home):
        # Started by hand. `stop` finds this process by a mark, which has to be in its initial environment.
        marked = {**os.environ, processes.HOME_MARK: str(options.home)}
        os.execve(sys.executable, sys.orig_argv, marked)  # noqa: S606
    logging.getLogger("werkzeug").setLevel(logging.WARNING)
    stop_requested = _on_signals(signal.SIGTERM, signal.SIGINT)
    try:
        policies = _policies(options)
        # Before the lab is entered: this one is on the computer's own loopback.
        listener = _listen(options.port)
        owners = SocketOwners()
        with fast_imports():
            backend = host_backend.select(
                options.home,
                options.nodes,
                port=listener.getsockname()[1],
                ssh_port=options.ssh_port,
                interfaces=tuple(options.interface),
            )
            servers, lifecycle = _build(options, backend, listener, owners, policies)
    except (OSError, UsageError, host_backend.Unavailable) as error:
        print(f"{CANNOT_START}{error}", file=sys.stderr)
        return 1
    gc.freeze()  # moto's data is permanent: 100,000 objects that the garbage collector need not visit
    for server in servers:
        threading.Thread(target=server.serve_forever, name="api", daemon=True).start()
    record.write(_describe(options, backend, listener, policies))
    os.read(stop_requested, 1)
    for server in servers:
        server.shutdown()
    lifecycle.end_all()
    processes.kill(options.home)
    record.record_path(options.home).unlink(missing_ok=True)
    return 0


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="cloudddp.simulator.api.server", description=__doc__)
    parser.add_argument("--home", type=lambda value: Path(value).resolve(), required=True)
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--ssh-port", type=int, default=0)
    parser.add_argument("--nodes", choices=KINDS, default="auto")
    parser.add_argument("--interface", action="append", default=[])
    for kind in _POLICIES:
        parser.add_argument(f"--{kind}", type=Path)
    for name, value in TIMING.items():
        parser.add_argument(f"--{name}-seconds", type=float, default=value)
    options = parser.parse_args(arguments)
    options.interface = options.interface or [INTERFACE]
    return options


def _timing(options: argparse.Namespace) -> dict[str, float]:
    """Return the values of the --NAME-seconds options, by name."""
    return {name: getattr(options, f"{name.replace('-', '_')}_seconds") for name in TIMING}


def _policies(options: argparse.Namespace) -> dict[str, PolicyFile]:
    """Return the policies that limit callers, by kind. Raises UsageError."""
    return {kind: read_policy(path) for kind in _POLICIES if (path := getattr(options, kind)) is not None}


def _on_signals(*numbers: signal.Signals) -> int:
    """Return a descriptor that becomes readable when one of the signals arrives.

    Only the main thread runs Python's signal handlers, and the kernel may deliver the signal to another one.
    An Event would then not wake up the main thread: this happened in 3 of 60 stops on a busy computer.
    """
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    for number in numbers:
        signal.signal(number, lambda *_: None)
    return reader


def _listen(port: int) -> socket.socket:
    try:
        return socket.create_server(("127.0.0.1", port), backlog=256)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise OSError(errno.EADDRINUSE, f"port {port} of 127.0.0.1 is in use") from error
        raise


def _describe(
    options: argparse.Namespace,
    backend: HostBackend,
    listener: socket.socket,
    policies: dict[str, PolicyFile],
) -> Simulator:
    return Simulator(
        pid=os.getpid(),
        endpoint=f"http://127.0.0.1:{listener.getsockname()[1]}",
        region=_REGION,
        network=backend.network,
        ssh_port=backend.ssh_port,
        started=datetime.now(UTC).isoformat(timespec="seconds"),
        home=options.home,
        nodes=backend.kind,
        why=backend.why,
        interfaces=tuple(options.interface),
        timing=_timing(options),
        policies={kind: file.description for kind, file in policies.items()},
    )


def _build(
    options: argparse.Namespace,
    backend: HostBackend,
    listener: socket.socket,
    owners: SocketOwners,
    policies: dict[str, PolicyFile],
) -> tuple[list[Any], Lifecycle]:
    """Return the servers, ready to serve, and the lifecycle of the instances."""
    from moto.backends import get_backend
    from moto.moto_server.werkzeug_app import (
        DomainDispatcherApplication,
        MotoRequestHandler,
        create_backend_app,
    )

    from cloudddp.simulator.api.access_control import GuardedServer  # slow to import: werkzeug
    from cloudddp.simulator.api.node_s3 import NodeS3Server

    install.install()
    speed.install_in_server()
    timing = Timing(**{name.replace("-", "_"): value for name, value in _timing(options).items()})
    lifecycle = Lifecycle(backend.hosts, timing)
    lifecycle.install()
    # Created now, so that the first call is as fast as others, and an unsupported moto fails here.
    get_backend("ec2")[ACCOUNT][_REGION]
    firewall = _firewall(backend, lifecycle)
    lifecycle.on_change = firewall.update
    permissions = Permissions()
    admin = AdminApi(backend, lifecycle, CONDITIONS, permissions)
    limits = Policies(*(policies[kind].policy if kind in policies else None for kind in _POLICIES))
    services = with_pricing(DomainDispatcherApplication(create_backend_app))
    authorized = with_authorization(services, limits, permissions)
    moto = with_credential_checks(with_conditions(authorized, CONDITIONS), CONDITIONS)
    application = _combine(admin, moto, services, lifecycle, firewall)
    lab_owners = SocketOwners()  # of the network that this process is in now
    sockets = [(listener, owners), *((other, lab_owners) for other in backend.listeners)]
    servers: list[Any] = [
        GuardedServer(application, one, of, with_clock(MotoRequestHandler, CONDITIONS)) for one, of in sockets
    ]
    if backend.router:
        metadata = Metadata(lifecycle.instance_at, admin.notices)
        servers.append(MetadataServer(metadata))
        servers.append(NodeS3Server(moto, metadata.is_instance, MotoRequestHandler))
    return servers, lifecycle


def _firewall(backend: HostBackend, lifecycle: Lifecycle) -> Firewall | LoopbackAddresses:
    if backend.router is not None:
        return Firewall(backend.router, lifecycle)
    return LoopbackAddresses(cast("LoopbackHosts", backend.hosts), lifecycle)


def _combine(
    admin: AdminApi,
    moto: Application,
    services: Application,
    lifecycle: Lifecycle,
    firewall: Firewall | LoopbackAddresses,
) -> Application:
    """Return the application for all paths. Those below /moto-api are no calls of AWS."""

    def serve(environ: Environ, start_response: StartResponse) -> Iterable[bytes]:
        path = environ.get("PATH_INFO", "")
        if path.startswith(PREFIX):
            try:
                return admin.serve(environ, start_response)
            finally:
                firewall.update()  # a condition may have changed the network
        if path == "/moto-api/reset":
            lifecycle.end_all()
        called = services if path.startswith("/moto-api") else moto
        try:
            return called(environ, start_response)
        finally:  # also if the response is lost
            firewall.update()  # a changed rule is in effect when the response is sent

    return serve


if __name__ == "__main__":
    sys.exit(main())
