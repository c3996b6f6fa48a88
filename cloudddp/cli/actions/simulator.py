"""The verbs of `sim`. Nodes, faults and conditions are defined by the simulator."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from cloudddp import signals
from cloudddp.cli.console import Console
from cloudddp.cli.views import simulator as views
from cloudddp.errors import CloudDDPError, Message, UsageError, q
from cloudddp.files import state_home
from cloudddp.formats import plural
from cloudddp.operations.load_settings import named_cluster
from cloudddp.simulator import control
from cloudddp.simulator.control import Simulator

_REPLACED = {
    "policy": "the user's full access",
    "scp": "FullAWSAccess, which AWS attaches by default: add a statement that allows * on *",
}
EXAMPLE = Message('for example: `cloudddp sim conditions \'{"latency": {"*": 0.2}}\'`')


def start(
    console: Console,
    *,
    port: int,
    nodes: str,
    interfaces: tuple[str, ...],
    policy: str | None,
    scp: str | None,
    **seconds: float | None,
) -> None:
    before = control.find(state_home())
    given = {name: value for name, value in seconds.items() if value is not None}
    timing = {name.removesuffix("_seconds").replace("_", "-"): value for name, value in given.items()}
    policies = {kind: Path(file) for kind, file in (("policy", policy), ("scp", scp)) if file}
    found = control.start(
        state_home(),
        port=port,
        nodes=nodes,
        interfaces=interfaces,
        timing=timing,
        policies=policies,
        report=console.log,
    )
    state = "is already running" if before else "started"
    console.print_text(f"simulator {state}: {found.endpoint}, {views.kind(found)}")
    for text in views.policies(found):
        console.print(f"calls are limited by {text}")
    for kind, file in policies.items():
        if control.denies_everything(file):
            console.warn(
                f"--{kind} {file} allows nothing, so every call is denied: it has no statement with Effect "
                f"Allow. It replaces {_REPLACED[kind]}"
            )
    if interfaces and found.nodes == "process":
        console.warn("--interface has no effect: these nodes have no network interface of their own")


def stop(console: Console) -> None:
    ended = control.stop(state_home())
    stopped = f"simulator stopped, {plural(ended, 'process')} ended"
    console.print(stopped if ended else "the simulator is not running")


def status(console: Console, *, as_json: bool) -> None:
    found = _running()
    nodes = control.nodes(found)
    if as_json:
        console.print_json(views.simulator_json(found, nodes))
    else:
        console.print(views.simulator(found, nodes))


def env(console: Console) -> None:
    found = _running()
    lines = [f"unset {name};" for name in control.HIDDEN]
    lines += [f"export {name}={q(value)};" for name, value in control.environment(found).items()]
    console.print("\n".join(lines))


def shell(console: Console) -> None:
    program = os.environ.get("SHELL") or "/bin/sh"
    _running()
    console.log("AWS clients in this shell use the simulator; `exit` leaves it")
    _replace_process(program, [program])


def exec_(_: Console, *, command: Sequence[str]) -> None:
    _replace_process(command[0], list(command))


def session(_: Console, *, target: str, port: int) -> None:
    # ssh ends its proxy command with SIGHUP when it is done: that is no interrupt.
    with contextlib.suppress(signals.HungUp):
        control.relay(_running(), target, port)


def fault(console: Console, *, kind: str, nodes: tuple[str, ...]) -> None:
    done = control.fault(_running(), kind, nodes, cluster=_cluster(console, nodes))
    healed = ""
    if kind == "heal":
        healed = f" ({', '.join(done['healed'])})" if done["healed"] else ": it had no fault"
    console.print(f"{done['kind']}: {' and '.join(done['nodes'])}{healed}")


def interrupt(console: Console, *, node: str, seconds: float) -> None:
    done = control.interrupt(_running(), node, seconds=seconds, cluster=_cluster(console, (node,)))
    console.print(f"{done['node']} will be terminated at {done['time']}")


def maintenance(console: Console, *, node: str, code: str, seconds: float) -> None:
    cluster = _cluster(console, (node,))
    done = control.maintenance(_running(), node, seconds=seconds, code=code, cluster=cluster)
    console.print(f"{done['node']}: {done['code']} is scheduled for {done['time']}")


def conditions(console: Console, *, changes: str | None, clear: bool) -> None:
    try:
        wanted: Any = json.loads(changes) if changes else {}
    except ValueError as error:
        raise UsageError(f"CHANGES are not JSON: {error}", hint=EXAMPLE) from None
    if not isinstance(wanted, dict):
        raise UsageError(f"CHANGES are not a JSON object: {changes}", hint=EXAMPLE)
    console.print_json(control.conditions(_running(), {"clear": True, **wanted} if clear else wanted))


def _cluster(console: Console, nodes: tuple[str, ...]) -> str | None:
    """Return the cluster whose ranks are meant; None if no node is named by its rank."""
    if not any(node.isdecimal() for node in nodes):
        return None
    return named_cluster(console.options, {node["cluster"] for node in control.nodes(_running())})


def _running() -> Simulator:
    found = control.find(state_home())
    if found is None:
        raise CloudDDPError("the simulator is not running", hint="start it: `cloudddp sim start`")
    return found


def _replace_process(program: str, argv: list[str]) -> NoReturn:
    control.use(_running())
    try:
        os.execvp(program, argv)  # noqa: S606  no shell
    except OSError as error:
        raise CloudDDPError(f"{program}: {error.strerror}") from None
