"""Commands that are loaded when they are needed, and the options that all of them share.

A `LazyGroup` knows its commands by a table of names and short helps, so that `cloudddp --help` loads none of
them. A `Verb` knows its function by name, so that `cloudddp VERB --help` does not load what the verb needs to
run.
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
"""Name -> (the command, or its "module:attribute"; its short help)."""


def load(path: str) -> Any:
    """Return the object that "module:attribute" names."""
    module, _, attribute = path.partition(":")
    return getattr(importlib.import_module(module), attribute)


class GlobalOption(click.Option):
    """An option of every command, given before the verb or after it."""


def _negated(description: str, settings: Mapping[str, Any]) -> str:
    """Return the help of an option: for one that switches a setting off, that of the setting with "Do
    not"."""
    off = settings.get("flag_value") == "false"
    return f"Do not {description[0].lower()}{description[1:]}" if off else description


class RareOption(click.Option):
    """An option that `--help` only names, and `--help-all` describes."""

    rare = True


class SettingOption(click.Option):
    """An option that stands for a setting. Its value is validated with the other settings, not by click."""

    def __init__(
        self,
        section: str,
        key: str,
        *names: str,
        standard: str = "",
        rare: bool = False,
        description: str = "",
        **settings: Any,
    ) -> None:
        """`standard` is the default as the help shows it; '' where it shows none. `rare`: `--help` only names
        it, `--help-all` describes it. `description`: the help, where it is not that of the setting."""
        description = description or _negated(DESCRIPTIONS[section][key], settings)
        shown = f" [default: {standard}]" if standard else ""
        super().__init__(names, help=description + shown, **settings)
        self.section = section
        self.key = key
        self.standard = standard
        self.rare = rare

    def flag(self, value: Any) -> Flag | None:
        """Return the setting as it was given, or None where it was not. Raises UsageError for a table's item
        without '='."""
        if value is None or (self.is_flag and not value):
            return None
        if self.multiple:
            return Flag(self.opts[-1], self.section, self.key, self._table(value)) if value else None
        return Flag(self.opts[-1], self.section, self.key, value)

    def _table(self, items: Iterable[str]) -> dict[str, str]:
        pairs = [item.partition("=") for item in items]
        for key, equals, _ in pairs:
            if not equals:
                raise UsageError(
                    f"{self.opts[-1]} {key!r} has no '='", hint=f"give it as {self.opts[-1]} {self.metavar}"
                )
        return {key: value for key, _, value in pairs}


def completes(kind: str) -> Any:
    """Return a function for `shell_complete`: one of cli/known_names.py, which is loaded when it is
    called."""

    def complete(ctx: click.Context, parameter: click.Parameter, begun: str) -> Any:
        return load(f"cloudddp.cli.known_names:{kind}")(ctx, parameter, begun)

    return complete


def global_options(*, after_verb: bool) -> list[GlobalOption]:
    """Return the global options: those of the group, or those that may follow a verb.

    The latter are hidden, and do not read the environment: a variable must not override an option before the
    verb.
    """

    def option(names: str, metavar: str, text: str, variable: str = "", complete: Any = None) -> GlobalOption:
        return GlobalOption(
            names.split(),
            metavar=metavar or None,
            is_flag=None if metavar else True,  # False would make the value optional
            help=text,
            hidden=after_verb,
            envvar=None if after_verb else variable or None,
            shell_complete=complete,
        )

    file = "Configuration file to use instead of ./cloudddp.toml; its folder is the project."
    return [
        option("-c --cluster", "NAME", "Name of the cluster.", complete=completes("clusters")),
        option("--config", "FILE", file, "CLOUDDDP_CONFIG", completes("files")),
        option("--region", "REGION", "AWS region."),
        option("--profile", "PROFILE", "AWS profile.", "CLOUDDDP_PROFILE"),
        option("--sim", "", "Use the simulator on this computer instead of AWS.", "CLOUDDDP_SIM"),
        option("-v --verbose", "", "Show more output."),
        option("--timings", "", "Show where the time went, at the end, on stderr."),
    ]


def given_options(context: click.Context) -> GlobalOptions:
    """Return the global options of a command line: those after the verb win over those before it."""
    values: dict[str, Any] = {}
    current: click.Context | None = context
    while current is not None:
        for option in current.command.params:
            value = current.params.get(option.name or "")
            if isinstance(option, GlobalOption) and option.name and value not in (None, False):
                values.setdefault(option.name, value)
        current = current.parent
    return GlobalOptions(**values)


def _is_rare(parameter: click.Parameter) -> bool:
    return getattr(parameter, "rare", False)


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
        _console(ctx).options = given_options(ctx)
        return rest


class Verb(_WithGlobalOptions):
    """A command whose function is imported when it is invoked.

    `action` is "module:function" below cloudddp.cli.actions; the command has the name of the function. It
    gets the console and the global options, and by name the values of the command's own parameters; the
    settings among them together, as `flags`.
    """

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
        settings = {
            "allow_interspersed_args": not passes_arguments,
            "help_option_names": HELP_NAMES,
            **(context_settings or {}),
        }
        every = [*params, *([] if only_own_options else global_options(after_verb=True))]
        if any(map(_is_rare, every)):
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
            if "unexpected extra argument" in error.message and any("-c" in one.opts for one in self.params):
                raise click.UsageError(f"{error.message}. -c NAME names a cluster.", ctx) from None
            raise

    def own_words(self, ctx: click.Context, args: Sequence[str]) -> int:
        """Return how many words at the beginning are options of this verb, with their values."""
        has_value = {
            name: isinstance(one, click.Option) and not one.is_flag
            for one in self.get_params(ctx)
            for name in one.opts
        }
        at = 0
        while at < len(args) and (name := args[at].partition("=")[0]) in has_value and args[at] != "--":
            at += 2 if has_value[name] and name == args[at] else 1
        return at

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Describe the options; of rare ones only the names, unless all are wanted."""
        params = [one for one in self.get_params(ctx) if isinstance(one, click.Option)]
        shown = [one for one in params if ctx.meta.get(EVERY_OPTION) or not _is_rare(one)]
        with formatter.section("Options"):
            formatter.write_dl([record for one in shown if (record := one.get_help_record(ctx))])
        names = ", ".join(one.opts[-1] for one in params if one not in shown)
        if names:
            with formatter.section(f"More options, described by `{ctx.command_path} --help-all`"):
                width = max(formatter.width - formatter.current_indent, 20)
                for line in textwrap.wrap(names, width, break_on_hyphens=False):
                    formatter.write_text(line)

    def invoke(self, ctx: click.Context) -> Any:
        console = _console(ctx)
        if console.options.timings:
            timings.enable()
        with timings.span(f"imports: {self.name}"):
            action = load(self.action)
        return action(console, console.options, **self.arguments(ctx.params))

    def arguments(self, params: Mapping[str, Any]) -> dict[str, Any]:
        """Return the keyword arguments of the function for the parsed parameters."""
        found: dict[str, Any] = {}
        for parameter in self.params:
            name = parameter.name or ""
            if isinstance(parameter, SettingOption):
                flags = found.setdefault("flags", [])
                if (flag := parameter.flag(params[name])) is not None:
                    flags.append(flag)
            elif parameter.expose_value and not isinstance(parameter, GlobalOption):
                found[name] = params[name]
        return found


def listed(*commands: click.Command) -> Table:
    """Return the table of commands that are loaded with their group."""
    return {str(one.name): (one, one.get_short_help_str(limit=1000)) for one in commands}


# Verbs, and the words of other programs for them.
_MEANT = {"up": "create start", "pull": "download fetch", "down": "delete destroy terminate stop rm"}


class LazyGroup(_WithGlobalOptions, click.Group):
    """A group that loads a command when it is used, and lists all of them from its table: below these
    headings, which have every command once, or below one."""

    def __init__(
        self, name: str, table: Table, headings: Mapping[str, Sequence[str]] | None = None, **settings: Any
    ) -> None:
        super().__init__(name, **settings)
        self.table = table
        self.headings = headings or {"Commands": sorted(table)}

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002  click's signature
        return sorted(self.table)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:  # noqa: ARG002
        if cmd_name not in self.table:
            return None
        command = self.table[cmd_name][0]
        return load(command) if isinstance(command, str) else command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Raise UsageError with similar names for a verb that does not exist (click 8.4 does it only for
        `commands`)."""
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
            near = [repr(name) for name in meant or difflib.get_close_matches(args[0], self.table)]
            ctx.fail(
                f"No such command {args[0]!r}." + (f" Did you mean {' or '.join(near)}?" if near else "")
            )
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:  # noqa: ARG002
        width = max(map(len, self.table))
        for heading, names in self.headings.items():
            with formatter.section(heading):
                formatter.write_dl([(name.ljust(width), self.table[name][1]) for name in names])


def _console(context: click.Context) -> Console:
    """Return the console of this run, which knows the global options for the commands that messages
    suggest."""
    return context.ensure_object(Console)
