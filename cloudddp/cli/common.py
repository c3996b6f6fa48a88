"""What the verbs share: the global options, the settings they lead to, and the AWS and the nodes behind those."""

from __future__ import annotations

import contextlib
import os
import shlex
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from cloudddp import state
from cloudddp.cli import say
from cloudddp.cli.say import note

if TYPE_CHECKING:
    from cloudddp.aws.client import AWS
    from cloudddp.nodes import Runner
    from cloudddp.owners import Ownership
    from cloudddp.settings import Layer
    from cloudddp.spec import Config

CONTEXT: dict[str, Any] = {"help_option_names": ["-h", "--help"], "max_content_width": 100}


F = TypeVar("F", bound=Callable[..., Any])


def _nearest_config(folder: Path) -> Path | None:
    """Return the cloudddp.toml here, or above within the repository or, outside one, below the user's home.

    Never further: a file that somebody put into a folder that all share would decide what is sent and run.
    """
    from cloudddp.safe_files import resolved

    here, home = resolved(folder), resolved(os.path.expanduser("~"))  # noqa: PTH111  Path's raises where there is none
    repository = next((path for path in (here, *here.parents) if (path / ".git").exists()), None)
    for path in (here, *here.parents):
        ours = path == here or repository is not None or (path != home and path.is_relative_to(home))
        if not ours:
            return None
        if (path / "cloudddp.toml").is_file():
            return path / "cloudddp.toml"
        if path == repository:
            return None
    return None


@dataclass
class Session:
    """What the global options said. Everything else follows from it when a verb asks."""

    cluster: str | None = None
    config: str | None = None
    region: str | None = None
    profile: str | None = None
    sim: bool = False
    verbose: bool = False
    anyone: bool = False
    flags: list[tuple[str, str, str, Any]] = field(default_factory=list)
    _told: bool = False

    def __post_init__(self) -> None:
        say.how_typed = lambda: self.typed

    @property
    def root(self) -> Path:
        """The project: the folder of the configuration file, else the current one."""
        if self.config:
            from cloudddp.safe_files import resolved

            return resolved(self.config).parent
        try:
            return found.parent if (found := _nearest_config(Path.cwd())) else Path.cwd()
        except PermissionError as error:  # after `su`, for one
            from cloudddp.errors import UsageError

            raise UsageError(
                f"{error.filename or 'the current folder'} cannot be read: {error.strerror}",
                hint="cd to your project",
            ) from None

    @property
    def typed(self) -> str:
        """`cloudddp` with the global options as they were given: what a hint has to begin with."""
        words = ["cloudddp", *(["--sim"] if self.sim else [])]
        named = (
            ("-c", self.cluster),
            ("--config", self.config),
            ("--region", self.region),
            ("--profile", self.profile),
        )
        for option, value in named:
            words += [option, shlex.quote(value)] if value else []
        return " ".join(words)

    def flag(self, name: str, section: str, key: str, value: Any) -> None:
        """Note a verb's flag as a setting; None and () mean that it was not given."""
        if value is not None and value != ():
            self.flags.append((name, section, key, value))

    def settings(self, *, rehearsed: bool = False) -> Config:
        """Return the validated settings. Raises UsageError before anything is called.

        With --sim the simulator is started next, since its SSH port is a setting; not for a rehearsal.
        """
        checked = self._resolve()
        if rehearsed:
            return checked
        state.check_home()
        if not self.sim:
            return checked
        if self.region:
            from cloudddp.aws.client import require_region

            require_region(self.region)  # before anything is started
        self._enter_simulator()
        return self._resolve()

    def chosen_cluster(self) -> str | None:
        """The cluster that a flag, a variable or a file names; None where only the default is left."""
        named = any("name" in layer.values.get("cluster", {}) for layer in self._layers())
        return self._resolve().cluster.name if named else None

    def _resolve(self) -> Config:
        from cloudddp import settings

        return settings.resolve(self._for_simulator(self._layers()))

    def _layers(self) -> list[Layer]:
        """What was said about the settings, the strongest first."""
        from cloudddp import settings

        flags = [
            *self.flags,
            *([("--cluster", "cluster", "name", self.cluster)] if self.cluster is not None else []),
            *([("--region", "cluster", "region", self.region)] if self.region is not None else []),
        ]
        layers = [settings.Layer(n, {s: {k: v}}, textual=True) for n, s, k, v in reversed(flags)]
        layers += settings.environment_layers(os.environ)
        return layers + [settings.read_toml(path) for path in self._files()]

    def _files(self) -> list[Path]:
        from cloudddp.settings import CONFIG_NAME

        if self.config:
            return [Path(self.config)]
        from cloudddp import state

        own, user = self.root / CONFIG_NAME, state.user_config()
        if own.exists() and own.parent != Path.cwd() and not self._told:
            note(f"using {own}")
            self._told = True
        return [path for path in (own, user) if path is not None and path.exists()]

    def _for_simulator(self, layers: list[Layer]) -> list[Layer]:
        """The simulator has its own region and SSH port, which override those of files and the environment.

        `--region` is kept: the simulator serves every region.
        """
        if not self.sim:
            return layers
        from cloudddp import settings

        region = self.region or os.environ.get("AWS_REGION", "us-east-1")
        origin = "--region" if self.region else "the simulator"
        ours = settings.Layer(origin, {"cluster": {"region": region}}, textual=True)
        port = [layer for layer in layers if layer.origin == "environment variable CLOUDDDP_SSH_PORT"]
        return [ours, *port, *layers]

    def _enter_simulator(self) -> None:
        """Start the simulator where it does not run, and point this process at it."""
        from cloudddp.sim import control

        found = control.find(state.home())
        if found is None:
            note("starting the simulator (cloudddp sim stop ends it)")
            found = control.start(state.home(), nodes=os.environ.get("CLOUDDDP_SIM_NODES", "auto"))
            if found.why:
                note(f"its nodes share this computer's network and processes: {found.why}")
        control.enter(found)
        for name in control.HIDDEN:
            os.environ.pop(name, None)
        os.environ.update(control.environment(found))

    def ownership(self, aws: AWS) -> Ownership:
        """Return the ownership check for clusters; with --anyone, every cluster passes it."""
        from cloudddp.owners import Ownership

        return Ownership(aws, anyone=self.anyone)

    def aws(self, settings: Config) -> AWS:
        from cloudddp.aws.client import AWS

        region = settings.cluster.region or os.environ.get("AWS_REGION")
        return AWS(region=region, profile=None if self.sim else self.profile)

    @contextlib.contextmanager
    def open(
        self, settings: Config, *, whole: bool = False, partly: bool = False
    ) -> Iterator[tuple[Any, Runner]]:
        """Yield (cluster, connections to its nodes) and close them.

        `whole`: refuse a cluster that has lost a node. `partly`: go on without the nodes that do not answer, and raise
        NodeError, naming them, once the others have been asked.
        """
        from cloudddp import cluster
        from cloudddp.errors import CloudDDPError

        aws = self.aws(settings)
        found = cluster.get(aws, settings.cluster.name, self.ownership(aws))
        warn(found.warnings)
        if found.missing:
            gone = f"{found.missing} of {found.missing + len(found.nodes)} nodes of cluster {found.name!r} {'is' if found.missing == 1 else 'are'} gone"
            if whole:
                raise CloudDDPError(
                    gone, hint="`cloudddp pull` what you need, then `cloudddp down` and `cloudddp up`"
                )
            note(f"warning: {gone}")
        silent: dict[int, Exception] = {}
        if partly:
            runner, silent = cluster.connect_some(found, settings.cluster, say=note)
        else:
            runner = cluster.connect(found, settings.cluster, say=note)
        try:
            for error in silent.values():
                note(f"warning: {error}")
            yield found, runner
        finally:
            runner.close()
        if silent:
            raise _not_asked(silent)


def warn(texts: Iterable[str]) -> None:
    for text in texts:
        note(f"warning: {text}")


def _not_asked(silent: dict[int, Exception]) -> Exception:
    from cloudddp.errors import NodeError

    names = f"node{'s' * (len(silent) > 1)} {', '.join(map(str, sorted(silent)))}"
    hint = getattr(silent[min(silent)], "hint", "")
    return NodeError(
        f"{names} could not be asked: the answer is without {'them' if len(silent) > 1 else 'it'}", hint=hint
    )


def _remember(key: str) -> Callable[[click.Context, click.Parameter, Any], Any]:
    def callback(ctx: click.Context, _: click.Parameter, value: Any) -> Any:
        session = ctx.find_root().ensure_object(Session)
        if value is not None and value is not False:
            setattr(session, key, value)
        return value

    return callback


def global_options(function: F) -> F:
    """Give a command the global options. They may stand before the verb or after it."""
    for decorate in reversed(_global_decorators(hidden=False)):
        function = decorate(function)
    return function


def _global_decorators(*, hidden: bool) -> list[Callable[[F], F]]:
    common: dict[str, Any] = {"expose_value": False, "hidden": hidden}
    return [
        click.option("-c", "--cluster", metavar="NAME", callback=_remember("cluster"), help="Name of the cluster.", **common),
        click.option("--config", metavar="FILE", envvar="CLOUDDDP_CONFIG", callback=_remember("config"), help="Configuration instead of ./cloudddp.toml; its folder is the project.", **common),
        click.option("--region", metavar="REGION", callback=_remember("region"), help="AWS region.", **common),
        click.option("--profile", metavar="PROFILE", envvar="CLOUDDDP_PROFILE", callback=_remember("profile"), help="AWS profile.", **common),
        click.option("--sim", is_flag=True, envvar="CLOUDDDP_SIM", callback=_remember("sim"), help="Use the simulator on this computer instead of AWS.", **common),
        click.option("-v", "--verbose", is_flag=True, callback=_remember("verbose"), help="Say more.", **common),
    ]  # fmt: skip


def verb(
    name: str, *, passes_arguments: bool = False, cls: type[click.Command] = click.Command
) -> Callable[[Callable[..., Any]], click.Command]:
    """Make a command of a function that takes the Session first; the global options work after its name too."""

    def decorate(function: Callable[..., Any]) -> click.Command:
        def entry(*args: Any, **kwargs: Any) -> Any:
            context = click.get_current_context()
            return function(context.find_root().ensure_object(Session), *args, **kwargs)

        entry.__doc__ = function.__doc__
        entry.__click_params__ = getattr(function, "__click_params__", [])  # type: ignore[attr-defined]
        wrapped: Any = entry
        for decorator in _global_decorators(hidden=True):
            wrapped = decorator(wrapped)
        settings: dict[str, Any] = {**CONTEXT, "allow_interspersed_args": not passes_arguments}
        return click.command(name, cls=cls, context_settings=settings)(wrapped)

    return decorate


json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON, with stable keys.")
yes_option = click.option("-y", "--yes", is_flag=True, envvar="CLOUDDDP_YES", help="Do not ask.")
anyone_option = click.option(
    "--anyone",
    is_flag=True,
    expose_value=False,
    callback=_remember("anyone"),
    help="Also act on a cluster that somebody else made.",
)
dry_run_option = click.option(
    "--dry-run",
    is_flag=True,
    help="Rehearse in this process: print every AWS call and node command, call nothing. Needs no account.",
)


def setting(
    section: str, key: str, *names: str, metavar: str | None = None, is_flag: bool = False
) -> Callable[[F], F]:
    """Return an option for a setting. Its value is checked with the settings, not by click."""

    def callback(ctx: click.Context, parameter: click.Parameter, value: Any) -> Any:
        given = list(value) if isinstance(value, tuple) and value else value
        if is_flag:
            given = True if value else None
        session = ctx.find_root().ensure_object(Session)
        session.flag(parameter.opts[-1], section, key, given)
        return value

    def decorate(function: F) -> F:
        option = click.option(
            *names,
            # click reads `is_flag=False` as "a flag whose value may be left out": say it only for flags
            **({"is_flag": True} if is_flag else {"metavar": metavar}),
            expose_value=False,
            callback=callback,
            help=_SETTING_HELP[(section, key)],
        )
        return option(function)

    return decorate


# Said again here, shorter, because reading them from spec.py would import msgspec for `--help`.
_SETTING_HELP = {
    ("cluster", "nodes"): "How many nodes.",
    ("cluster", "instance_type"): "EC2 instance type of every node.",
    ("cluster", "max_hours"): "The nodes end themselves after so many hours (default 8).",
    ("cluster", "max_cost"): "Most that the cluster may cost; becomes an earlier deadline.",
    ("cluster", "price"): "USD per node and hour, where cloudddp does not know it.",
    ("cluster", "spot"): "Ask for spot capacity.",
    ("cluster", "allow_cpu"): "Accept an instance type without a GPU.",
    ("cluster", "zone"): "Availability zone.",
    ("cluster", "subnet"): "Subnet id.",
    ("cluster", "vpc"): "VPC id.",
    ("cluster", "image"): "Image id, or SSM parameter that holds one.",
    ("cluster", "ssh_from"): "Address block that may use SSH (default: this computer's own address).",
    ("cluster", "disk_gb"): "Root volume, GiB.",
    ("job", "nproc_per_node"): "Ranks on each node: a number, a list such as 4,2, or 'gpu'.",
    ("job", "rendezvous"): "c10d, static or direct.",
}


def must_confirm(question: str, *, yes: bool, session: Session) -> None:
    """Ask, except with -y or in the simulator. Raises CloudDDPError if the answer is no, UsageError without a terminal."""
    if yes or session.sim:
        return
    if not sys.stdin.isatty():
        raise click.UsageError("there is no terminal to ask on; add -y")
    if not click.confirm(question, err=True):
        from cloudddp.errors import CloudDDPError

        raise CloudDDPError("not confirmed; nothing was changed")
