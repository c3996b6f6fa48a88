"""Where settings come from: options, the environment, files, the project's folder and the simulator."""

from __future__ import annotations

import os
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import replace

from cloudddp import timings
from cloudddp.config import project, settings, tolerant
from cloudddp.config.command_line import Flag, GlobalOptions
from cloudddp.config.project import Project
from cloudddp.config.schema import example_name
from cloudddp.config.settings import Layer
from cloudddp.config.spec import Config
from cloudddp.errors import UsageError, q
from cloudddp.files import state_home
from cloudddp.operations.reporter import Reporter


def tolerated(warn: Callable[[str], None], options: GlobalOptions, where: Project, verb: str) -> Config:
    """Return the settings without what is wrong with them, after a warning for each part. Raises UsageError
    if the name of the cluster may be in such a part, and `verb` needs it."""
    *given, folder = layers_of(options, (), replace(where, files=()), {})
    settings.resolve(given)  # options have to be valid
    messages: list[str] = []

    def note(error: UsageError) -> None:
        messages.append(error.message)

    try:
        found = tolerant.resolve(given, os.environ, where.files, note, named=verb != "ls", default=folder)
    except UsageError as doubt:
        raise UsageError(
            f"{doubt.message}. It may be about the cluster's name",
            hint=f"fix it, or give the name: `cloudddp {q(verb)} -c NAME`",
        ) from None
    for message in dict.fromkeys(messages):
        warn(message)
    return found


def named_cluster(options: GlobalOptions, known: Container[str] = ()) -> str | None:
    """Return the cluster that an option, a variable or a file names; where only the folder's name is left,
    that if it is among `known`, else None."""
    layers = layers_of(options, (), project.find(options.config))
    named = any("name" in layer.values.get("cluster", {}) for layer in layers[:-1])
    name = settings.resolve(layers).cluster.name
    return name if named or name in known else None


def layers_of(
    options: GlobalOptions, flags: Sequence[Flag], where: Project, environ: Mapping[str, str] = os.environ
) -> list[Layer]:
    """Return every source of settings, the one with the highest precedence first. The simulator's region and
    SSH port override those of files and the environment; `--region` is kept, since it serves every region."""
    own = (("--cluster", "name", options.cluster), ("--region", "region", options.region))
    given = [*flags, *(Flag(option, "cluster", key, text) for option, key, text in own if text is not None)]
    layers = [settings.from_flags(given), *settings.environment_layers(environ)]
    layers += [settings.read_toml(path) for path in where.files]
    layers.append(Layer("the project's folder", {"cluster": {"name": example_name(where.root)}}))
    if not options.sim:
        return layers
    region = options.region or (os.environ.get("AWS_REGION") or "us-east-1")
    origin = "--region" if options.region else "the simulator"
    regions = {} if any(flag.key == "regions" for flag in flags) else {"regions": ""}
    simulated = Layer(origin, {"cluster": {"region": region, **regions}}, textual=True)
    port = [layer for layer in layers if layer.origin == "environment variable CLOUDDDP_SSH_PORT"]
    return [simulated, *port, *layers]


def report_other_region(
    reporter: Reporter, options: GlobalOptions, checked: Config, layers: Sequence[Layer]
) -> None:
    """Log that the simulator's region overrides the one that a file or the environment sets."""
    if not options.sim or options.region:
        return
    used, others = checked.cluster.region, layers[1:]  # the first one is the simulator's
    regions = [(other.values.get("cluster", {}).get("region"), other.origin) for other in others]
    given, origin = next((region for region in regions if region[0] is not None), (used, ""))
    if given != used:
        text = f"--sim uses its own region, {used}, and not {given} ({origin})"
        reporter.log(f"{text}; --region chooses another")


def enter_simulator(reporter: Reporter) -> None:
    """Start the simulator unless it runs, and point this process at it."""
    # 20 ms, which commands for AWS need not take.
    from cloudddp.simulator import control

    found = control.find(state_home())
    wanted = os.environ.get("CLOUDDDP_SIM_NODES", "auto")
    if found is not None and wanted not in ("auto", found.nodes):
        reporter.warn(f"CLOUDDDP_SIM_NODES={wanted} has no effect: a simulator with {found.nodes} nodes runs")
    if found is None:
        reporter.suggest("starting the simulator (`cloudddp sim stop` stops it)")
        with timings.span("start of the simulator"):
            found = control.start(state_home(), nodes=wanted, report=reporter.log)
        if found.why:
            reporter.log(f"its nodes share this computer's network and processes: {found.why}")
    control.use(found)
