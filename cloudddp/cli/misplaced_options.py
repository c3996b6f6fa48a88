"""Verbs that take SCRIPT ARGS...: what follows the script belongs to it, except for some options of cloudddp,
which are refused.

`cloudddp run train.py --max-cost 5` would otherwise create nodes without that limit, and a script that
ignores unknown options would hide it. `--` before the script, or before the word, marks it as meant for the
script.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import click

from cloudddp.cli.lazy_commands import Verb
from cloudddp.errors import UsageError, q

# Options of `launch` and `run` whose loss costs money or results. All others reach the script: `--config`,
# `-c`, `--env`, `--nodes`, `--tag` and `--profile` are common in scripts, and losing them changes nothing
# that lasts.
REFUSED = frozenset(
    # The nodes would be real, more expensive, or billed for longer.
    """
        --dry-run --sim --max-cost --max-hours --spot --reservation -n -t --instance-type --region
        --regions --idle-minutes --down --keep --keep-on-failure --discard --allow-cpu
    """.split()
    # Another cluster's files would be overwritten, results not copied, a job cancelled by Ctrl-C, or a run
    # wasted.
    + "--cluster --results-s3 -d --detach --nproc-per-node".split()
)
JOB_VERBS = ("launch", "run")
SIMILAR = 0.75  # similarity above which an unknown option counts as a misspelt option of ours


class JobVerb(Verb):
    """A verb with SCRIPT ARGS... that refuses some options among ARGS. Raises UsageError."""

    def __init__(self, action: str, **settings: Any) -> None:
        super().__init__(action, passes_arguments=True, **settings)

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        words = list(args)
        try:
            rest = super().parse_args(ctx, args)
        except click.NoSuchOption as error:
            raise _unknown_option(ctx, self, error.option_name, words) from None
        except click.MissingParameter as error:
            if _lacks_module(ctx, self, words):
                hint = "for example -m train.main, which starts train/main.py"
                raise UsageError("-m needs the name of a module", hint=hint) from None
            raise error
        if not ctx.resilient_parsing:
            self._refuse_misplaced(ctx, words)
        return rest

    def _refuse_misplaced(self, ctx: click.Context, words: list[str]) -> None:
        script, arguments = str(ctx.params["script"]), ctx.params["args"]
        at = len(words) - len(arguments) - 1
        if _ends_options(ctx, self, words[:at]):
            return
        known = _known_options(ctx, self)
        for word in arguments:
            if word == "--":
                return
            if not (name := _option_in(word, known)):
                continue
            path = ctx.command_path.split()[1:]
            verb = " ".join(path)
            again = q("cloudddp", *path, *_options_again(ctx, self, words[:at]), "--", *words[at:])
            if name in _names(self):
                raise UsageError(
                    f"{name} comes after the script, where every word belongs to the script",
                    hint=f"put it before {script}; if it is meant for the script: `{again}`",
                )
            raise UsageError(
                f"{name} is an option of {_verbs_with(ctx, name)}, not of {verb}, and comes after the "
                "script, where every word belongs to the script",
                hint=f"if it is meant for the script: `{again}`",
            )


def _ends_options(ctx: click.Context, command: click.Command, before: list[str]) -> bool:
    """Return whether the words before the script end with the `--` that ends options, not with a value
    `--`."""
    if not before or before[-1] != "--":
        return False
    try:
        command.make_parser(ctx).parse_args(before[:-1])
    except click.UsageError:  # the option before it would lack its value
        return False
    return True


def _names(command: click.Command) -> frozenset[str]:
    """Return every spelling of a command's options, the hidden global ones included."""
    return frozenset(name for name, _ in _spellings(command.params))


def _known_options(ctx: click.Context, command: click.Command) -> dict[str, click.Option]:
    """Return by spelling the options that a user may mean: the verb's, and the long ones of its sibling.

    A user who types `run train.py --dry-run` expects a dry run, although only `launch` has one.
    """
    found = dict(_spellings(command.params))
    for verb in JOB_VERBS:
        if (sibling := _verbs(ctx).get(verb)) is not None:
            long = {name: option for name, option in _spellings(sibling.params) if name.startswith("--")}
            found = {**long, **found}
    return found


def _verbs(ctx: click.Context) -> dict[str, click.Command]:
    """Return the verbs of the command line, by name."""
    root = ctx.find_root()
    if root is ctx or not isinstance(group := root.command, click.Group):
        return {}
    found = {name: group.get_command(root, name) for name in group.list_commands(root)}
    return {name: command for name, command in found.items() if command is not None}


def _spellings(params: Iterable[click.Parameter]) -> Iterator[tuple[str, click.Option]]:
    for option in params:
        if isinstance(option, click.Option):
            yield from ((name, option) for name in (*option.opts, *option.secondary_opts))


def _option_in(word: str, options: dict[str, click.Option]) -> str:
    """Return the refused option that click would read in this word (`--max-cost=5`, `-n4`, `-yn4`), or ''."""
    if word.startswith("--"):
        name = word.partition("=")[0]
        return name if name in options and name in REFUSED else ""
    if not word.startswith("-"):
        return ""
    first = ""
    for letter in word[1:]:
        name = f"-{letter}"
        if name not in options:
            return ""
        if name in REFUSED:
            first = first or name
        if not options[name].is_flag:  # the rest of the word is its value
            break
    return first


def _options_again(ctx: click.Context, command: click.Command, before: Sequence[str]) -> list[str]:
    """Return the verb's options as they were given, without the values of variables, which may be secret, and
    without the global options, which a hint has before the verb."""
    values, _, order = command.make_parser(ctx).parse_args(list(before))
    words: list[str] = []
    for parameter in order:
        if not isinstance(parameter, click.Option) or parameter.hidden or parameter.name is None:
            continue
        words.append(parameter.opts[0])
        if not parameter.is_flag:
            value = values[parameter.name]
            word = str(value.pop(0) if isinstance(value, list) else value)
            words.append(
                re.sub("=.*", "=****", word, flags=re.DOTALL) if parameter.name == "variables" else word
            )
    return words


def _verbs_with(ctx: click.Context, name: str) -> str:
    """Return the verbs that have an option: "launch, run and up"."""
    verbs = [verb for verb, command in _verbs(ctx).items() if name in _names(command)]
    return " and ".join([", ".join(verbs[:-1]), verbs[-1]]) if len(verbs) > 1 else "".join(verbs)


def _unknown_option(ctx: click.Context, command: click.Command, name: str, words: list[str]) -> UsageError:
    """Return the error for an unknown option before the script: most often it is one of the script's own."""
    path = ctx.command_path.split()[1:]
    verb = " ".join(path)
    if name in _known_options(ctx, command):
        return UsageError(
            f"{name} is an option of {_verbs_with(ctx, name)}, not of {verb}",
            hint=f"see `cloudddp {q(*path)} --help`",
        )
    known = [n for n, option in _spellings(command.params) if not option.hidden or n.startswith("--")]
    similar = difflib.get_close_matches(name, known, n=1, cutoff=SIMILAR)
    script = next((word for word in words if word.endswith(".py")), "SCRIPT")
    suggestion = f"did you mean {similar[0]}? Options" if similar else "options"
    return UsageError(
        f"{verb} has no option {name}",
        hint=f"{suggestion} of the script go after it: `cloudddp {q(*path)} {q(script)} {q(name)}`",
    )


def _lacks_module(ctx: click.Context, command: click.Command, words: list[str]) -> bool:
    """Return whether -m was given without SCRIPT."""
    values, rest, _ = command.make_parser(ctx).parse_args(list(words))
    return bool(values.get("module")) and not rest
