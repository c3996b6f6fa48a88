"""The simulator's server process: `python -m cloudddp.sim.server --home DIR`.

moto's EC2 on a loopback port with three pages of its own in front (/_cloudddp/...), and the nodes behind it, all
in one process. Started and ended by control.py, which owns everything that must work without this process.
"""

from __future__ import annotations

import argparse
import errno
import json
import logging
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from cloudddp.sim import aws, control, peers, processes
from cloudddp.sim.lifecycle import Lifecycle
from cloudddp.sim.network import place
from cloudddp.sim.nodes import LoopbackNodes

_REGION = "us-east-1"
_ACCOUNT = "123456789012"  # whose requests moto takes all to be
_GUARD_PORT = 61022  # above the ephemeral range of Linux, so that no outgoing connection sits on it
_SSH_PORTS = (22, 2222, 22022)


class NoNetwork(Exception):
    """No free loopback network, or none on which the wanted SSH port can be had."""


def main(arguments: list[str] | None = None) -> int:
    """Serve until SIGTERM. Returns an exit code; what went wrong is on stderr."""
    options = _options(arguments)
    if os.environ.get(processes.HOME_MARK) != str(options.home):
        # Started by hand. The mark by which `stop` finds us has to be there from the first instruction.
        marked = {**os.environ, processes.HOME_MARK: str(options.home)}
        os.execve(sys.executable, sys.orig_argv, marked)  # noqa: S606
    logging.getLogger("werkzeug").setLevel(logging.WARNING)
    asked_to_end = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: asked_to_end.set())
    try:
        guard, network, ssh_port = _claim_network(options.ssh_port)
        server, lifecycle = _build(options, network, ssh_port)
    except (OSError, NoNetwork) as error:
        print(f"cannot start: {error}", file=sys.stderr)
        return 1
    with guard:
        threading.Thread(target=server.serve_forever, name="api", daemon=True).start()
        control.record(
            control.Simulator(
                pid=os.getpid(),
                endpoint=f"http://127.0.0.1:{server.server_port}",
                region=_REGION,
                network=network,
                ssh_port=ssh_port,
                started=datetime.now(UTC).isoformat(timespec="seconds"),
                home=options.home,
            )
        )
        asked_to_end.wait()
        server.shutdown()
        lifecycle.end_all()
    processes.end(options.home)
    (options.home / "sim" / "sim.json").unlink(missing_ok=True)
    return 0


def _options(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="cloudddp.sim.server", description=__doc__)
    parser.add_argument("--home", type=lambda value: Path(value).resolve(), required=True)
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--ssh-port", type=int, default=0)
    parser.add_argument("--pending-seconds", type=float, default=0.0)
    return parser.parse_args(arguments)


def _build(options: argparse.Namespace, network: str, ssh_port: int) -> tuple[Any, Lifecycle]:
    from moto.backends import get_backend
    from moto.moto_server.werkzeug_app import (
        DomainDispatcherApplication,
        MotoRequestHandler,
        create_backend_app,
    )
    from werkzeug.serving import make_server

    aws.prepare()
    place(network)
    lifecycle = Lifecycle(
        LoopbackNodes(options.home, ssh_port=ssh_port), pending_seconds=options.pending_seconds
    )
    lifecycle.install()
    # Made now, so that the first call is as quick as the next and a moto that does not fit fails here.
    get_backend("ec2")[_ACCOUNT][_REGION]
    front = _front(DomainDispatcherApplication(create_backend_app), lifecycle)
    try:
        server = make_server(
            "127.0.0.1", options.port, front, threaded=True, request_handler=MotoRequestHandler
        )
    except SystemExit as error:  # werkzeug's way to say that the port is taken; it has printed so
        raise OSError(errno.EADDRINUSE, f"port {options.port} of 127.0.0.1 is in use") from error
    return server, lifecycle


def _front(
    application: Callable[..., Iterable[bytes]], lifecycle: Lifecycle
) -> Callable[..., Iterable[bytes]]:
    def answer(environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        path = environ.get("PATH_INFO", "")
        if not peers.is_ours(environ["REMOTE_ADDR"], int(environ["REMOTE_PORT"])):
            return _reply(start_response, "text/plain", "another user's simulator\n", "403 Forbidden")
        if path == "/_cloudddp/health":
            return _reply(start_response, "text/plain", "ok\n")
        if path == "/_cloudddp/address":
            return _reply(start_response, "text/plain", f"{environ['REMOTE_ADDR']}\n")
        if path == "/_cloudddp/nodes":
            return _reply(start_response, "application/json", json.dumps(lifecycle.describe()))
        if path == "/moto-api/reset":
            lifecycle.end_all()
        return application(environ, start_response)

    return answer


def _reply(
    start_response: Callable[..., Any], kind: str, text: str, status: str = "200 OK"
) -> Iterable[bytes]:
    body = text.encode()
    start_response(status, [("Content-Type", kind), ("Content-Length", str(len(body)))])
    return [body]


def _claim_network(ssh_port: int) -> tuple[socket.socket, str, int]:
    """A /16 of loopback nobody else simulates on; it is held as long as the returned socket is open.

    Raises NoNetwork.
    """
    for number in range(64, 127):
        guard = _listen(f"127.{number}.0.1", _GUARD_PORT)
        if guard is None:
            continue
        for port in (ssh_port,) if ssh_port else _SSH_PORTS:
            if probe := _listen(f"127.{number}.0.1", port):
                probe.close()
                return guard, f"127.{number}.0.0/16", port
        guard.close()
        raise NoNetwork(f"no SSH port for the nodes: tried {ssh_port or ', '.join(map(str, _SSH_PORTS))}")
    raise NoNetwork("63 simulators run on this machine already")


def _listen(host: str, port: int) -> socket.socket | None:
    try:
        return socket.create_server((host, port))
    except OSError:
        return None


if __name__ == "__main__":
    sys.exit(main())
