"""The simulator's server process: `python -m cloudddp.sim.server --home DIR`.

moto's EC2 on a loopback port with pages of its own in front (/_cloudddp/...), and the nodes behind it, all in one
process. Started and ended by control.py, which owns everything that must work without this process.
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
from collections.abc import Callable, Iterable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from cloudddp.sim import aws, control, front, ground, peers, processes, wishes
from cloudddp.sim.ground import Ground
from cloudddp.sim.lifecycle import Lifecycle, Timing
from cloudddp.sim.metadata import Metadata
from cloudddp.sim.pages import Pages

_REGION = "us-east-1"
_ACCOUNT = "123456789012"  # whose requests moto takes all to be


def main(arguments: list[str] | None = None) -> int:
    """Serve until SIGTERM. Returns an exit code; what went wrong is on stderr."""
    options = _options(arguments)
    os.umask(0o022)  # the user's umask would decide what a node's login user may read
    if os.environ.get(processes.HOME_MARK) != str(options.home):
        # Started by hand. The mark by which `stop` finds us has to be there from the first instruction.
        marked = {**os.environ, processes.HOME_MARK: str(options.home)}
        os.execve(sys.executable, sys.orig_argv, marked)  # noqa: S606
    logging.getLogger("werkzeug").setLevel(logging.WARNING)
    asked_to_end = _on_signals(signal.SIGTERM, signal.SIGINT)
    try:
        door = _open(options.port)  # before the ground: this one is on the computer's own loopback
        computer = peers.Network()
        standing = ground.prepare(
            options.home,
            options.nodes,
            port=door.getsockname()[1],
            ssh_port=options.ssh_port,
            interfaces=tuple(options.interface),
        )
        servers, lifecycle = _build(options, standing, door, computer)
    except (OSError, ground.Unavailable) as error:
        print(f"cannot start: {error}", file=sys.stderr)
        return 1
    gc.freeze()  # moto and its data, to the end: 100,000 objects that need not be looked through again
    for server in servers:
        threading.Thread(target=server.serve_forever, name="api", daemon=True).start()
    control.record(
        control.Simulator(
            pid=os.getpid(),
            endpoint=f"http://127.0.0.1:{door.getsockname()[1]}",
            region=_REGION,
            network=standing.network,
            ssh_port=standing.ssh_port,
            started=datetime.now(UTC).isoformat(timespec="seconds"),
            home=options.home,
            nodes=standing.kind,
            why=standing.why,
            interfaces=tuple(options.interface),
            timing={name: getattr(options, f"{name.replace('-', '_')}_seconds") for name in control.TIMING},
        )
    )
    os.read(asked_to_end, 1)
    for server in servers:
        server.shutdown()
    lifecycle.end_all()
    processes.end(options.home)
    (options.home / "sim" / "sim.json").unlink(missing_ok=True)
    return 0


def _on_signals(*numbers: signal.Signals) -> int:
    """Return a descriptor that can be read once one of these signals has come.

    Only the main thread runs Python's handlers, and the kernel may give the signal to another: the main thread then
    sleeps on in the wait of an Event, which went wrong in 3 of 60 ends on a busy machine.
    """
    woken, wake = os.pipe()
    os.set_blocking(wake, False)
    signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
    for number in numbers:
        signal.signal(number, lambda *_: None)
    return woken


def _open(port: int) -> socket.socket:
    try:
        return socket.create_server(("127.0.0.1", port), backlog=256)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise OSError(errno.EADDRINUSE, f"port {port} of 127.0.0.1 is in use") from error
        raise


def _options(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="cloudddp.sim.server", description=__doc__)
    parser.add_argument("--home", type=lambda value: Path(value).resolve(), required=True)
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--ssh-port", type=int, default=0)
    parser.add_argument("--nodes", choices=wishes.KINDS, default="auto")
    parser.add_argument("--interface", action="append", default=[])
    for name, value in control.TIMING.items():
        parser.add_argument(f"--{name}-seconds", type=float, default=value)
    options = parser.parse_args(arguments)
    options.interface = options.interface or [control.INTERFACE]
    return options


def _build(
    options: argparse.Namespace, standing: Ground, door: socket.socket, computer: peers.Network
) -> tuple[list[Any], Lifecycle]:
    from moto.backends import get_backend
    from moto.moto_server.werkzeug_app import (
        DomainDispatcherApplication,
        MotoRequestHandler,
        create_backend_app,
    )

    from cloudddp.sim.door import Door  # werkzeug takes its time

    aws.prepare()
    timing = Timing(
        **{
            name.replace("-", "_"): getattr(options, f"{name.replace('-', '_')}_seconds")
            for name in control.TIMING
        }
    )
    lifecycle = Lifecycle(standing.nodes, timing)
    lifecycle.install()
    # Made now, so that the first call is as quick as the next and a moto that does not fit fails here.
    get_backend("ec2")[_ACCOUNT][_REGION]
    pages = Pages(standing, lifecycle)
    moto = front.wrap(DomainDispatcherApplication(create_backend_app), aws.CONDITIONS)
    application = _front(moto, lifecycle, pages)
    told = [Metadata(lifecycle.at, pages.notices).server()] if standing.router else []
    lab = peers.Network()
    answering = [
        Door(application, one, network, MotoRequestHandler)
        for one, network in ((door, computer), *((other, lab) for other in standing.doors))
    ]
    return [*answering, *told], lifecycle


def _front(
    application: Callable[..., Iterable[bytes]], lifecycle: Lifecycle, pages: Pages
) -> Callable[..., Iterable[bytes]]:
    def answer(environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        path = environ.get("PATH_INFO", "")
        if path.startswith("/_cloudddp/") and path != front.PAGE:
            status, kind, text = pages.answer(path.removeprefix("/_cloudddp/"), environ)
            body = text.encode()
            start_response(status, [("Content-Type", kind), ("Content-Length", str(len(body)))])
            return [body]
        if path == "/moto-api/reset":
            lifecycle.end_all()
        try:
            return application(environ, start_response)
        finally:  # also where the answer is lost
            pages.settle()  # a rule that was changed holds from the answer on

    return answer


if __name__ == "__main__":
    sys.exit(main())
