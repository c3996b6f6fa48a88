"""Commands that are loaded when they are needed, and the options that all of them share.

A `LazyGroup` knows its commands by a table of names and short helps: `cloudddp --help` loads none of them.
A `Verb` knows its function by name: `cloudddp VERB --help` does not load what it needs to run.
"""

from __future__ import annotations

import importlib
import inspect
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import click

from cloudddp import timings
from cloudddp.cli.console import Console
from cloudddp.config.command_line import Flag, GlobalOptions
from cloudddp.config.descriptions import DESCRIPTIONS
from cloudddp.errors import UsageError

HELP_NAMES = ["-h", "--help"]
EVERY_OPTION = "cloudddp.every_option"  # of Context.meta: the help describes rare options, too
Table = Mapping[str, tuple[str | click.Command, str]]
"""Name -> (the command, or its "module:attribute" below cloudddp.cli.commands; its short help)."""


def load(path: str) -> Any:
    """Return the object that "module:attribute" names."""
    module, _, attribute = path.partition(":")
    return getattr(importlib.import_module(module), attribute)


class GlobalOption(click.Option):
    """An option whose value is a field of GlobalOptions."""


class Option(click.Option):
    """An option of a verb; the last of its names may be that of the parameter. One that is `rare`, `--help`
    only names and `--help-all` describes."""

    def __init__(
        self, names: str, metavar: str | None, text: str, kind: Any = None, rare: bool = False, **more: Any
    ) -> None:
        super().__init__(names.split(), metavar=metavar, help=text, type=kind, **more)
        self.rare = rare


class SettingOption(Option):
    """An option that stands for a setting. Its value is validated with the other settings, not by click."""

    def __init__(
        self, section: str, key: str, *names: str, standard: str = "", description: str = "", **settings: Any
    ) -> None:
        """`standard`: the default as the help shows it. `description`: where it is not the setting's."""
        shown = description or DESCRIPTIONS[section][key]
        if settings.get("flag_value") == "false":  # it switches the setting off
            shown = f"Do not {shown[0].lower()}{shown[1:]}"
        shown += f" [default: {standard}]" if standard else ""
        super().__init__(" ".join(names), settings.pop("metavar", None), shown, **settings)
        self.section = section
        self.key = key
        self.standard = standard

    def flag(self, value: Any) -> Flag | None:
        """Return the setting, None where it was not given. Raises UsageError for an item without '='."""
        if value in (None, False, ()):
            return None
        return Flag(self.opts[-1], self.section, self.key, self._table(value) if self.multiple else value)

    def _table(self, items: Iterable[str]) -> dict[str, str]:
        name, found = self.opts[-1], {}
        for item in items:
            key, equals, found[key] = item.partition("=")
            if not equals:
                raise UsageError(f"{name} {key!r} has no '='", hint=f"give it as {name} {self.metavar}")
        return found


def completes(kind: str) -> Any:
    """Return for `shell_complete` a function that completes clusters, jobs, nodes or files."""
    return lambda ctx, _, begun: load("cloudddp.cli.known_names:complete")(kind, ctx, begun)


def global_option(names: str, text: str, metavar: str | None = None, **settings: Any) -> GlobalOption:
    """Return a global option; a flag, if it has no `metavar` for a value."""
    is_flag = None if metavar else True  # False would make the value optional
    return GlobalOption(names.split(), metavar=metavar, is_flag=is_flag, help=text, **settings)


def global_options(*, after_verb: bool) -> list[GlobalOption]:
    """Return the global options: those of the group, or those that may follow a verb, which are hidden and do
    not read the environment: a variable must not override an option before the verb."""

    def option(
        names: str, text: str, metavar: str | None = None, envvar: str | None = None, complete: Any = None
    ) -> GlobalOption:
        envvar = None if after_verb else envvar
        return global_option(names, text, metavar, hidden=after_verb, envvar=envvar, shell_complete=complete)

    file = "Configuration file to use instead of ./cloudddp.toml; its folder is the project."
    return [
        option("-c --cluster", "Name of the cluster.", "NAME", complete=completes("clusters")),
        option("--config", file, "FILE", "CLOUDDDP_CONFIG", completes("files")),
        option("--region", "AWS region.", "REGION"),
        option("--profile", "AWS profile.", "PROFILE", "CLOUDDDP_PROFILE"),
        option("--sim", "Use the simulator on this computer instead of AWS.", envvar="CLOUDDDP_SIM"),
        option("-v --verbose", "Show more output."),
        option("--timings", "Show where the time went, at the end, on stderr."),
    ]


def given_options(context: click.Context) -> GlobalOptions:
    """Return the global options of a command line: those after the verb win over those before it."""
    values: dict[str, Any] = {}
    flags: list[Flag] = []
    current: click.Context | None = context
    is_run = not context.resilient_parsing  # otherwise a shell completes it, and an option may be unfinished
    while current is not None:
        for option in current.command.params:
            value = current.params.get(option.name or "")
            if isinstance(option, GlobalOption) and option.name and value not in (None, False, ()):
                values.setdefault(option.name, value)
            elif isinstance(option, SettingOption) and is_run and (flag := option.flag(value)) is not None:
                flags.append(flag)
        current = current.parent
    return GlobalOptions(**values, flags=tuple(flags))


def _help_all() -> click.Option:
    def show(ctx: click.Context, _: click.Parameter, wanted: bool) -> None:
        if wanted and not ctx.resilient_parsing:
            ctx.meta[EVERY_OPTION] = True
            click.echo(ctx.get_help(), color=ctx.color)
            ctx.exit()

    return click.Option(
        ["--help-all"],
        is_flag=True,
        is_eager=True,
        expose_value=False,
        callback=show,
        help="Show this message with every option, and exit.",
    )


class _WithGlobalOptions(click.Command):
    """A command that gives the console the global options of its command line."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        rest = super().parse_args(ctx, args)
        ctx.ensure_object(Console).options = given_options(ctx)
        return rest


class Verb(_WithGlobalOptions):
    """A command whose function is imported when it is invoked: `action`, "module:function" below
    cloudddp.cli.actions. It gets the console, which has the global options, and its own parameters."""

    def __init__(
        self,
        action: str,
        *,
        help: str,  # noqa: A002  click's own name
        params: Iterable[click.Parameter] = (),
        passes_arguments: bool = False,
        only_own_options: bool = False,
        context_settings: Mapping[str, Any] | None = None,
    ) -> None:
        settings = {"allow_interspersed_args": not passes_arguments, "help_option_names": HELP_NAMES}
        settings |= context_settings or {}
        every = [*params, *([] if only_own_options else global_options(after_verb=True))]
        if any(isinstance(one, Option) and one.rare for one in every):
            every.append(_help_all())
        name = action.partition(":")[2].rstrip("_").replace("_", "-")
        super().__init__(name, params=every, help=inspect.cleandoc(help), context_settings=settings)
        self.action = f"cloudddp.cli.actions.{action}"

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Read `--spot prefer` as one option. To click a flag has no value, and an option that may have one
        would take the script in `run --spot train.py` for it."""
        while args[(at := self.own_words(ctx, args)) - 1 : at + 1] == ["--spot", "prefer"]:
            args = [*args[: at - 1], "--prefer-spot", *args[at + 1 :]]
        own = ["--prefer-spot" if word == "--spot=prefer" else word for word in args[:at]]
        try:
            return super().parse_args(ctx, [*own, *args[at:]])
        except click.UsageError as error:
            if "unexpected extra argument" in error.message and any(
                "-c" in param.opts for param in self.params
            ):
                raise click.UsageError(f"{error.message}. -c NAME names a cluster.", ctx) from None
            raise

    def own_words(self, ctx: click.Context, args: Sequence[str]) -> int:
        """Return how many words at the beginning are options of this verb, with their values."""
        has_value = {
            name: isinstance(param, click.Option) and not param.is_flag
            for param in self.get_params(ctx)
            for name in param.opts
        }
        at = 0
        while at < len(args) and (name := args[at].partition("=")[0]) in has_value and args[at] != "--":
            at += 2 if has_value[name] and name == args[at] else 1
        return at

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Describe the options; of rare ones only the names, unless all are wanted."""
        params = [param for param in self.get_params(ctx) if isinstance(param, click.Option)]
        rare = [param for param in params if isinstance(param, Option) and param.rare]
        rare = [] if ctx.meta.get(EVERY_OPTION) else rare
        records = [param.get_help_record(ctx) for param in params if param not in rare]
        with formatter.section("Options"):
            formatter.write_dl([record for record in records if record])
        if names := ", ".join(one.opts[-1] for one in rare):
            with formatter.section(f"More options, described by `{ctx.command_path} --help-all`"):
                width = max(formatter.width - formatter.current_indent, 20)
                for line in textwrap.wrap(names, width, break_on_hyphens=False):
                    formatter.write_text(line)

    def invoke(self, ctx: click.Context) -> Any:
        console = ctx.ensure_object(Console)
        if console.options.timings:
            timings.enable()
        with timings.span(f"imports: {self.name}"):
            action = load(self.action)
        return action(console, **self.arguments(ctx.params))

    def arguments(self, params: Mapping[str, Any]) -> dict[str, Any]:
        """Return the keyword arguments of the function for the parsed parameters."""
        shared = {param.name for param in self.params if isinstance(param, GlobalOption | SettingOption)}
        return {name: value for name, value in params.items() if name not in shared}


def listed(*commands: click.Command) -> dict[str, Table]:
    """Return the table of commands that are loaded with their group."""
    return {
        "Commands": {
            str(command.name): (command, command.get_short_help_str(limit=1000)) for command in commands
        }
    }


# Verbs, and the words of other programs for them.
_MEANT = {"up": "create start", "pull": "download fetch", "down": "delete destroy terminate stop rm"}


class LazyGroup(_WithGlobalOptions, click.Group):
    """A group that loads a command when it is used, and lists all of them from its tables, by heading."""

    def __init__(self, name: str, tables: Mapping[str, Table], **settings: Any) -> None:
        super().__init__(name, **settings)
        self.tables = tables
        self.table = {name: row for table in tables.values() for name, row in table.items()}

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002  click's signature
        return sorted(self.table)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:  # noqa: ARG002
        command, _ = self.table.get(cmd_name, (None, ""))
        return load(f"cloudddp.cli.commands.{command}") if isinstance(command, str) else command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Raise UsageError with similar names for an unknown verb (click 8.4 does it only for `commands`)."""
        if args[0] == "help" and not ctx.resilient_parsing:
            if not args[1:]:
                click.echo(ctx.get_help(), color=ctx.color)
                ctx.exit()
            args = [*args[1:], "--help"]
        if args[0] not in self.table and not args[0].startswith("-") and not ctx.resilient_parsing:
            # `--help` loads this module and needs no difflib.
            import difflib

            meant = [
                name for name, words in _MEANT.items() if args[0] in words.split() and name in self.table
            ]
            near = " or ".join(map(repr, meant or difflib.get_close_matches(args[0], self.table)))
            ctx.fail(f"No such command {args[0]!r}." + (f" Did you mean {near}?" if near else ""))
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:  # noqa: ARG002
        width = max(map(len, self.table))
        for heading, table in self.tables.items():
            with formatter.section(heading):
                formatter.write_dl([(name.ljust(width), short) for name, (_, short) in table.items()])
