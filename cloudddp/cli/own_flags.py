"""Refuses options of cloudddp that come after the script, where every word belongs to the script.

`cloudddp run train.py --max-cost 5` would otherwise start nodes without that limit, and a script that ignores unknown
options would hide it. The options are read from click's own parameters. `--` before the script, or before
the word, says that it is meant for the script.
"""

from __future__ import annotations

import difflib
import shlex
from collections.abc import Iterable, Iterator, Sequence

import click

FOR_THE_SCRIPT = frozenset({"-v", "--verbose", "-h", "--help"})  # harmless, and scripts often have them
JOB_VERBS = ("launch", "run")
NEAR = 0.75  # similarity from which an unknown option is taken for a misspelt one of ours


class JobCommand(click.Command):
    """A verb with SCRIPT ARGS... that refuses options of its own among ARGS. Raises UsageError."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        words = list(args)
        try:
            rest = super().parse_args(ctx, args)
        except click.NoSuchOption as error:
            raise _unknown(ctx, self, error.option_name, words) from None
        except click.MissingParameter as error:
            if _asks_for_module(ctx, self, words):
                from cloudddp.errors import UsageError

                example = "for example -m train.main, which starts train/main.py"
                raise UsageError("-m needs the name of a module", hint=example) from None
            raise error
        if not ctx.resilient_parsing:
            self._refuse_strays(ctx, words)
        return rest

    def _refuse_strays(self, ctx: click.Context, words: list[str]) -> None:
        from cloudddp.errors import UsageError

        script, own = str(ctx.params["script"]), ctx.params["args"]
        at = len(words) - len(own) - 1
        if _ended(ctx, self, words[:at]):
            return
        options = _options(ctx, self)
        for word in own:
            if word == "--":
                return
            if not (stray := _stray(word, options)):
                continue
            line = shlex.join(["--", *words[at:]])
            meant = f"if it is meant for the script: cloudddp {ctx.info_name} {_again(ctx, self, words[:at])}{line}"
            if stray in _names(self):
                what, hint = f"{stray} comes after the script", f"put it before {script}; {meant}"
            else:
                what = f"{stray} is an option of {_owners(ctx, stray)}, not of {ctx.info_name}, and comes after the script"
                hint = meant
            raise UsageError(f"{what}, where every word belongs to the script", hint=hint)


def _ended(ctx: click.Context, command: click.Command, before: list[str]) -> bool:
    """Return whether the words before the script end with the `--` that ends options, and not with a value `--`."""
    if not before or before[-1] != "--":
        return False
    try:
        command.make_parser(ctx).parse_args(before[:-1])
    except click.UsageError:  # the option before it would lack its value
        return False
    return True


def _names(command: click.Command) -> frozenset[str]:
    """Return every spelling of a command's options, the hidden global ones included."""
    return frozenset(
        name
        for option in command.params
        if isinstance(option, click.Option)
        for name in (*option.opts, *option.secondary_opts)
    )


def _options(ctx: click.Context, command: click.Command) -> dict[str, click.Option]:
    """Return by spelling what may not stand after the script: the verb's options, and its sibling's long ones.

    A user who types `run train.py --dry-run` expects a dry run, although only `launch` has one.
    """
    found = dict(_spelt(command.params))
    if ctx.parent is not None and isinstance(group := ctx.parent.command, click.Group):
        for verb in JOB_VERBS:
            if (sibling := group.get_command(ctx.parent, verb)) is not None:
                longs = {n: o for n, o in _spelt(sibling.params) if n.startswith("--")}
                found = {**longs, **found}
    return {name: option for name, option in found.items() if name not in FOR_THE_SCRIPT}


def _spelt(params: Iterable[click.Parameter]) -> Iterator[tuple[str, click.Option]]:
    for option in params:
        if isinstance(option, click.Option):
            yield from ((name, option) for name in (*option.opts, *option.secondary_opts))


def _stray(word: str, options: dict[str, click.Option]) -> str:
    """Return the option of ours that click would read in this word (`--max-cost=5`, `-n4`, `-dn4`), or ''."""
    if word.startswith("--"):
        name = word.partition("=")[0]
        return name if name in options else ""
    if not word.startswith("-"):
        return ""
    first = ""
    for letter in word[1:]:
        option = options.get(f"-{letter}")
        if option is None:
            return ""
        first = first or f"-{letter}"
        if not option.is_flag:  # the rest of the word is its value
            return first
    return first


def _again(ctx: click.Context, command: click.Command, before: Sequence[str]) -> str:
    """Return the verb's options as they were given, without the global ones: a hint has those before the verb."""
    values, _, order = command.make_parser(ctx).parse_args(list(before))
    words: list[str] = []
    for parameter in order:
        if not isinstance(parameter, click.Option) or parameter.hidden or parameter.name is None:
            continue
        words.append(parameter.opts[0])
        if not parameter.is_flag:
            value = values[parameter.name]
            words.append(str(value.pop(0) if isinstance(value, list) else value))
    return shlex.join(words) + " " if words else ""


def _owners(ctx: click.Context, name: str) -> str:
    """Return the verbs that have an option: "launch, run and up"."""
    if ctx.parent is None or not isinstance(group := ctx.parent.command, click.Group):
        return "cloudddp"
    verbs = [
        verb
        for verb in group.list_commands(ctx.parent)
        if (command := group.get_command(ctx.parent, verb)) is not None and name in _names(command)
    ]
    return " and ".join([", ".join(verbs[:-1]), verbs[-1]]) if len(verbs) > 1 else verbs[0]


def _unknown(ctx: click.Context, command: click.Command, name: str, words: list[str]) -> Exception:
    """Return the error for an unknown option before the script: most often it is one of the script's own."""
    from cloudddp.errors import UsageError

    visible = [n for n, option in _spelt(command.params) if not option.hidden or n.startswith("--")]
    near = difflib.get_close_matches(name, visible, n=1, cutoff=NEAR)
    script = next((word for word in words if word.endswith(".py")), "SCRIPT")
    after = f"options of the script go after it: cloudddp {ctx.info_name} {shlex.quote(script)} {name}"
    hint = f"did you mean {near[0]}? {after[0].upper()}{after[1:]}" if near else after
    return UsageError(f"{ctx.info_name} has no option {name}", hint=hint)


def _asks_for_module(ctx: click.Context, command: click.Command, words: list[str]) -> bool:
    """Return whether -m was given without SCRIPT."""
    values, rest, _ = command.make_parser(ctx).parse_args(list(words))
    return bool(values.get("module")) and not rest
