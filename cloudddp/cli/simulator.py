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
    "--nodes",
    type=click.Choice(["auto", "namespace", "process"]),
    default="auto",
    help="Hosts of their own, or processes of this computer; auto: the first where it can be had.",
)
@click.option(
    "--interface",
    "interfaces",
    multiple=True,
    metavar="NAME",
    help="Name of the nodes' interface (ens5); given several times, the nodes take them in turn.",
)
@click.option(
    "--pending-seconds",
    type=click.FloatRange(0, 600),
    default=0.0,
    metavar="S",
    help="Least time in state pending.",
)
@click.option(
    "--booting-seconds",
    type=click.FloatRange(0, 600),
    default=0.0,
    metavar="S",
    help="Time from state running to the first answer of SSH.",
)
@click.option(
    "--shutting-down-seconds",
    type=click.FloatRange(0, 600),
    default=0.0,
    metavar="S",
    help="Least time in state shutting-down.",
)
@click.option(
    "--unknown-seconds",
    type=click.FloatRange(0, 600),
    default=0.0,
    metavar="S",
    help="Time for which a new instance is InvalidInstanceID.NotFound.",
)
def start(port: int, nodes: str, interfaces: tuple[str, ...], **seconds: float) -> None:
    """Start the simulator, unless it runs."""
    from cloudddp import state
    from cloudddp.sim import control

    before = control.find(state.home())
    timing = {name.removesuffix("_seconds").replace("_", "-"): value for name, value in seconds.items()}
    found = control.start(state.home(), port=port, nodes=nodes, interfaces=interfaces, timing=timing)
    click.echo(f"simulator {'runs already' if before else 'started'}: {found.endpoint}, {_kind(found)}")


def _kind(found: Simulator) -> str:
    if found.nodes == "namespace":
        return "nodes are hosts of their own (namespaces)"
    return f"nodes are processes of this computer ({found.why})"


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
        about = {"endpoint": found.endpoint, "region": found.region, "pid": found.pid, "kind": found.nodes}
        print_json({**about, "why": found.why, "nodes": nodes})
        return
    click.echo(f"simulator at {found.endpoint}, region {found.region}, pid {found.pid}; {_kind(found)}")
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


@sim.command("fault")
@click.argument("kind")
@click.argument("nodes", nargs=-1, required=True)
def fault(kind: str, nodes: tuple[str, ...]) -> None:
    """Break something: KIND of fault, and the NODE (or two) that it befalls.

    A node is named by its rank, instance id or address.

    \b
      kill NODE          the machine fails, without a last word
      cut NODE           nothing gets to it or from it
      cut-between A B    nothing gets from one to the other
      freeze NODE        every process stands still
      fill-disk NODE     no space is left
      slow-ssh NODE      SSH crawls
      drop-ssh NODE      SSH packets are lost
      heal NODE          ends all of these but kill
    """
    from cloudddp.sim import control

    done = control.fault(_running(), kind, nodes)
    click.echo(f"{done['kind']}: {' and '.join(done['nodes'])}")


@sim.command("interrupt")
@click.argument("node")
@click.option(
    "--seconds", type=click.FloatRange(0, 600), default=120.0, metavar="S", help="Length of the notice."
)
def interrupt(node: str, seconds: float) -> None:
    """Take a spot NODE back, after EC2's notice of two minutes (or as told)."""
    from cloudddp.sim import control

    done = control.interrupt(_running(), node, seconds=seconds)
    click.echo(f"{done['node']} will be terminated at {done['time']}")


@sim.command("conditions")
@click.argument("changes", required=False)
@click.option("--clear", is_flag=True, help="All is well again.")
def conditions(changes: str | None, clear: bool) -> None:
    """Change what EC2 answers: capacity, quotas, throttling, lost answers, latency. CHANGES are JSON.

    Without CHANGES, show what holds. docs/simulator.md has the list.
    """
    import json

    from cloudddp.errors import UsageError
    from cloudddp.sim import control

    try:
        wanted = json.loads(changes) if changes else {}
    except ValueError as error:
        raise UsageError(f"CHANGES are no JSON: {error}", hint="for example '{\"latency\": 0.2}'") from None
    print_json(control.conditions(_running(), {**({"clear": True} if clear else {}), **wanted}))


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
    control.enter(found)
    environment = {k: v for k, v in os.environ.items() if k not in control.HIDDEN}
    try:
        os.execvpe(program, argv, {**environment, **control.environment(found)})  # noqa: S606  no shell
    except OSError as error:
        raise CloudDDPError(f"{program}: {error.strerror}") from None
