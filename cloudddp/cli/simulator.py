"""The verbs on the simulator: `cloudddp sim start|stop|status|env|shell|exec|fault|interrupt|conditions`.

They ask control.py and show what it says; what a node, a fault or a condition is, they do not know.
"""

from __future__ import annotations

import math
import os
import shlex
from typing import TYPE_CHECKING, Any

import click

from cloudddp.cli.common import CONTEXT, Session, json_option, verb
from cloudddp.cli.say import note, print_json, table

if TYPE_CHECKING:
    from cloudddp.sim.control import Simulator


class Seconds(click.FloatRange):
    """So many seconds, from 0 to 600. nan passes every comparison, so click's own range lets it in."""

    def __init__(self) -> None:
        super().__init__(0, 600)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        found = super().convert(value, param, ctx)
        if not math.isfinite(found):
            self.fail(f"{value} is not in the range 0<=x<=600.", param, ctx)
        return found


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
    type=Seconds(),
    metavar="S",
    help="Least time in state pending.",
)
@click.option(
    "--booting-seconds",
    type=Seconds(),
    metavar="S",
    help="Time from state running to the first answer of SSH.",
)
@click.option(
    "--shutting-down-seconds",
    type=Seconds(),
    metavar="S",
    help="Least time in state shutting-down.",
)
@click.option(
    "--unknown-seconds",
    type=Seconds(),
    metavar="S",
    help="Time for which a new instance is InvalidInstanceID.NotFound.",
)
def start(port: int, nodes: str, interfaces: tuple[str, ...], **seconds: float | None) -> None:
    """Start the simulator, unless it runs as the options want it. All times are 0 unless given."""
    from cloudddp import state
    from cloudddp.sim import control

    before = control.find(state.home())
    timing = {
        name.removesuffix("_seconds").replace("_", "-"): value
        for name, value in seconds.items()
        if value is not None
    }
    found = control.start(state.home(), port=port, nodes=nodes, interfaces=interfaces, timing=timing)
    click.echo(f"simulator {'runs already' if before else 'started'}: {found.endpoint}, {_kind(found)}")
    if interfaces and found.nodes == "process":
        note("warning: --interface has no effect: these nodes have no interface of their own")


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
    if nodes:
        click.echo(table(HEADER, [_row(node, nodes) for node in nodes]))


HEADER = ("CLUSTER", "NODE", "INSTANCE", "STATE", "PRIVATE", "PUBLIC", "PROCESSES", "DEADLINE", "FAULTS")
FAULTS = {"freeze": "frozen", "fill-disk": "disk full", "slow-ssh": "slow ssh", "drop-ssh": "no ssh"}


def _row(node: dict[str, Any], nodes: list[dict[str, Any]]) -> tuple[str, ...]:
    rank = "-" if node["rank"] is None else str(node["rank"])
    names = (str(node[key] or "-") for key in ("instance_id", "state", "private_ip", "public_ip"))
    wrong = [_fault(kind, node, nodes) for kind in node["faults"]]
    wrong += [f"will be taken back at {node['interruption']}"] if node["interruption"] else []
    return (
        node["cluster"] or "-",
        rank,
        *names,
        str(len(node["processes"])),
        node["deadline"] or "-",
        ", ".join(wrong) or "-",
    )


def _fault(kind: str, node: dict[str, Any], nodes: list[dict[str, Any]]) -> str:
    """A fault in the words of the table: another node of the same cluster is called by its rank."""
    name, _, other = kind.partition(" ")
    if not other:
        return FAULTS.get(name, name)
    same = [n["rank"] for n in nodes if n["instance_id"] == other and n["cluster"] == node["cluster"]]
    return f"cut from {other if not same or same[0] is None else f'node {same[0]}'}"


@sim.command("env")
def env() -> None:
    """Print the exports that point any AWS client at the simulator.

    Only variables: enough for API calls from here. Where nodes are hosts of their own (namespaces) their addresses
    exist only inside the simulator's network: for SSH to them use `cloudddp sim shell` or `cloudddp sim exec`.
    """
    from cloudddp.sim import control

    found = _running()
    for name in control.HIDDEN:
        click.echo(f"unset {name};")
    for name, value in control.environment(found).items():
        click.echo(f"export {name}={shlex.quote(value)};")


@sim.command("shell")
def shell() -> None:
    """Open a shell inside the simulator's network, in which every AWS client uses the simulator.

    Only there can nodes that are hosts of their own (namespaces) be reached; nothing else can, neither this
    computer's other networks nor the internet. Process nodes need no network of theirs: there the shell stays on this computer's.
    """
    program = os.environ.get("SHELL") or "/bin/sh"
    _running()
    note("AWS clients in this shell use the simulator; `exit` leaves it")
    _replace(program, [program])


@sim.command(
    "exec", context_settings={**CONTEXT, "ignore_unknown_options": True, "allow_interspersed_args": False}
)
@click.argument("command", nargs=-1, required=True, type=click.UNPROCESSED)
def exec_(command: tuple[str, ...]) -> None:
    """Run COMMAND inside the simulator's network, with every AWS client pointed at the simulator.

    As in `cloudddp sim shell`: the nodes can be reached, and where they are hosts of their own nothing else can.

    \b
    Example:
      cloudddp sim exec -- aws ec2 describe-instances
    """
    _replace(command[0], list(command))


@verb("fault")
@click.argument("kind")
@click.argument("nodes", nargs=-1, required=True)
def fault(session: Session, kind: str, nodes: tuple[str, ...]) -> None:
    """Break something: KIND of fault, and the NODE (or two) that it befalls.

    A node is named by its rank (in the cluster of -c, of cloudddp.toml, or the only one), its instance id or a
    beginning of it, or its address. `cloudddp sim status` shows them, and what is broken.

    \b
      kill NODE          the machine fails, without a last word
      cut NODE           nothing gets to it or from it
      cut-between A B    nothing gets from one to the other
      freeze NODE        every process stands still
      fill-disk NODE     no space is left
      slow-ssh NODE      SSH crawls
      drop-ssh NODE      SSH packets are lost
      heal NODE          ends all of these but kill

    \b
    Example:
      cloudddp sim fault freeze 1 -c demo
    """
    from cloudddp.sim import control

    done = control.fault(_running(), kind, nodes, cluster=_cluster(session, nodes))
    click.echo(f"{done['kind']}: {' and '.join(done['nodes'])}{_ended(done) if kind == 'heal' else ''}")


def _ended(done: dict[str, Any]) -> str:
    return f" ({', '.join(done['healed'])})" if done["healed"] else " was healthy: there was nothing to heal"


def _cluster(session: Session, nodes: tuple[str, ...]) -> str | None:
    """The cluster whose ranks are meant; not asked for where no rank is, so that a bad file is in nobody's way."""
    return session.chosen_cluster() if any(node.isdecimal() for node in nodes) else None


@verb("interrupt")
@click.argument("node")
@click.option("--seconds", type=Seconds(), default=120.0, metavar="S", help="Length of the notice.")
def interrupt(session: Session, node: str, seconds: float) -> None:
    """Take a spot NODE back, after EC2's notice of two minutes (or as told). A node is named as for `sim fault`."""
    from cloudddp.sim import control

    done = control.interrupt(_running(), node, seconds=seconds, cluster=_cluster(session, (node,)))
    click.echo(f"{done['node']} will be terminated at {done['time']}")


sim.add_command(fault)
sim.add_command(interrupt)


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
        raise UsageError(f"CHANGES are no JSON: {error}", hint=EXAMPLE) from None
    if not isinstance(wanted, dict):
        raise UsageError(f"CHANGES are no JSON object: {changes}", hint=EXAMPLE)
    print_json(control.conditions(_running(), {**({"clear": True} if clear else {}), **wanted}))


EXAMPLE = """for example: cloudddp sim conditions '{"latency": {"*": 0.2}}'"""


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
