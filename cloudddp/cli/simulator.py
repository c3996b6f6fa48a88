"""The verbs on the simulator: `cloudddp sim start|stop|status|env|shell|exec`."""

from __future__ import annotations

import os
import shlex
from typing import TYPE_CHECKING, Any

import click

from cloudddp.cli.common import CONTEXT, json_option, note, print_json, table

if TYPE_CHECKING:
    from cloudddp.sim.control import Simulator


@click.group("sim", context_settings=CONTEXT)
def sim() -> None:
    """EC2 on this computer: rehearse a job without an AWS account. Any AWS client can use it.

    \b
      cloudddp --sim up                starts it by itself
      eval "$(cloudddp sim env)"       points this shell's AWS clients at it
    """


@sim.command("start")
@click.option(
    "--port", type=click.IntRange(0, 65535), default=0, metavar="PORT", help="Port of the endpoint (0: any)."
)
@click.option(
    "--pending-seconds",
    type=click.FloatRange(0, 600),
    default=0.0,
    metavar="S",
    help="Least time in state pending.",
)
def start(port: int, pending_seconds: float) -> None:
    """Start the simulator, unless it runs."""
    from cloudddp import state
    from cloudddp.sim import control

    before = control.find(state.home())
    found = control.start(state.home(), port=port, pending_seconds=pending_seconds)
    click.echo(f"simulator {'runs already' if before else 'started'}: {found.endpoint}")


@sim.command("stop")
def stop() -> None:
    """End the simulator and every process of its nodes, also after a crash."""
    from cloudddp import state
    from cloudddp.sim import control

    ended = control.stop(state.home())
    count = f"{ended} process{'es' * (ended != 1)}"
    click.echo(f"simulator stopped, {count} ended" if ended else "the simulator does not run")


@sim.command("status")
@json_option
def status(as_json: bool) -> None:
    """Show the simulator and its nodes."""
    from cloudddp.sim import control

    found = _running()
    nodes = control.nodes(found)
    if as_json:
        print_json({"endpoint": found.endpoint, "region": found.region, "pid": found.pid, "nodes": nodes})
        return
    click.echo(f"simulator at {found.endpoint}, region {found.region}, pid {found.pid}")
    header = ("INSTANCE", "STATE", "PRIVATE", "PUBLIC", "PROCESSES", "DEADLINE")
    keys = ("instance_id", "state", "private_ip", "public_ip")
    rows = [
        (*(str(n[key] or "-") for key in keys), str(len(n["processes"])), n["deadline"] or "-") for n in nodes
    ]
    if rows:
        click.echo(table(header, rows))


@sim.command("env")
def env() -> None:
    """Print the exports that point any AWS client at the simulator."""
    from cloudddp.sim import control

    found = _running()
    for name in control.HIDDEN:
        click.echo(f"unset {name};")
    for name, value in control.environment(found).items():
        click.echo(f"export {name}={shlex.quote(value)};")


@sim.command("shell")
def shell() -> None:
    """Open a shell in which every AWS client uses the simulator."""
    program = os.environ.get("SHELL") or "/bin/sh"
    note("AWS clients in this shell use the simulator; `exit` leaves it")
    _replace(program, [program])


@sim.command(
    "exec", context_settings={**CONTEXT, "ignore_unknown_options": True, "allow_interspersed_args": False}
)
@click.argument("command", nargs=-1, required=True, type=click.UNPROCESSED)
def exec_(command: tuple[str, ...]) -> None:
    """Run COMMAND with the environment that points AWS clients at the simulator."""
    _replace(command[0], list(command))


def _running() -> Simulator:
    from cloudddp import state
    from cloudddp.errors import CloudDDPError
    from cloudddp.sim import control

    found = control.find(state.home())
    if found is None:
        raise CloudDDPError("the simulator does not run", hint="start it: cloudddp sim start")
    return found


def _replace(program: str, argv: list[str]) -> Any:
    from cloudddp.errors import CloudDDPError
    from cloudddp.sim import control

    found = _running()
    environment = {k: v for k, v in os.environ.items() if k not in control.HIDDEN}
    try:
        os.execvpe(program, argv, {**environment, **control.environment(found)})  # noqa: S606  no shell
    except OSError as error:
        raise CloudDDPError(f"{program}: {error.strerror}") from None
