"""Verbs that take SCRIPT ARGS...: what follows the script belongs to it; some options are refused.

`cloudddp run train.py --max-cost 5` would otherwise create nodes without that limit, and a script that
ignores unknown options would hide it. `--` before the script or the word marks it as meant for the script.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping, Sequence
from itertools import takewhile
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
            values, given, _ = self.make_parser(ctx).parse_args(words)
            if values.get("module") and not given:
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
        own, known = _spellings(self), _known_options(ctx, self)
        for name in filter(None, (_option_in(word, known) for word in takewhile("--".__ne__, arguments))):
            path = ctx.command_path.split()[1:]
            again = q("cloudddp", *path, *_options_again(ctx, self, words[:at]), "--", *words[at:])
            what, before = "", f"put it before {script}; "
            if name not in own:
                what, before = f"is an option of {_verbs_with(ctx, name)}, not of {' '.join(path)}, and ", ""
            raise UsageError(
                f"{name} {what}comes after the script, where every word belongs to the script",
                hint=f"{before}if it is meant for the script: `{again}`",
            )


def _ends_options(ctx: click.Context, command: click.Command, before: list[str]) -> bool:
    """Return whether the words before the script end with the `--` that ends options, not with a value."""
    if before[-1:] != ["--"]:
        return False
    try:
        command.make_parser(ctx).parse_args(before[:-1])
    except click.UsageError:  # the option before it would lack its value
        return False
    return True


def _spellings(command: click.Command) -> dict[str, click.Option]:
    """Return a command's options by each spelling, the hidden global ones included."""
    options = (param for param in command.params if isinstance(param, click.Option))
    return {name: option for option in options for name in (*option.opts, *option.secondary_opts)}


def _known_options(ctx: click.Context, command: click.Command) -> dict[str, click.Option]:
    """Return by spelling the verb's options and the long ones of its sibling: who types `run train.py
    --dry-run` expects a dry run, although only `launch` has one."""
    siblings = [sibling for name, sibling in _verbs(ctx).items() if name in JOB_VERBS]
    found = {name: one for verb in siblings for name, one in _spellings(verb).items() if name[:2] == "--"}
    return {**found, **_spellings(command)}


def _verbs(ctx: click.Context) -> dict[str, click.Command]:
    """Return the verbs of the command line, by name."""
    root = ctx.find_root()
    if root is ctx or not isinstance(group := root.command, click.Group):
        return {}
    found = ((name, group.get_command(root, name)) for name in group.list_commands(root))
    return {name: command for name, command in found if command is not None}


def _option_in(word: str, options: Mapping[str, click.Option]) -> str:
    """Return the refused option that click would read in this word (`--max-cost=5`, `-n4`, `-yn4`), or ''."""
    if word.startswith("--"):
        name = word.partition("=")[0]
        return name if name in options and name in REFUSED else ""
    first = ""
    for letter in word[1:] if word.startswith("-") else "":
        name = f"-{letter}"
        if name not in options:
            return ""
        first = first or (name if name in REFUSED else "")
        if not options[name].is_flag:  # the rest of the word is its value
            break
    return first


def _options_again(ctx: click.Context, command: click.Command, before: Sequence[str]) -> list[str]:
    """Return the verb's options as they were given, without the values of variables, which may be secret, and
    without the global options, which a hint has before the verb."""
    values, _, order = command.make_parser(ctx).parse_args(list(before))
    words: list[str] = []
    for option in order:
        if not isinstance(option, click.Option) or option.hidden or option.name is None:
            continue
        words.append(option.opts[0])
        if not option.is_flag:
            value = values[option.name]
            word = str(value.pop(0) if isinstance(value, list) else value)
            secret = option.name == "variables"
            words.append(re.sub("=.*", "=****", word, flags=re.DOTALL) if secret else word)
    return words


def _verbs_with(ctx: click.Context, name: str) -> str:
    """Return the verbs that have an option: "launch, run and up"."""
    *verbs, last = [verb for verb, command in _verbs(ctx).items() if name in _spellings(command)]
    return f"{', '.join(verbs)} and {last}" if verbs else last


def _unknown_option(ctx: click.Context, command: click.Command, name: str, words: list[str]) -> UsageError:
    """Return the error for an unknown option before the script: most often it is one of the script's own."""
    path = ctx.command_path.split()[1:]
    verb = " ".join(path)
    if name in _known_options(ctx, command):
        what = f"{name} is an option of {_verbs_with(ctx, name)}, not of {verb}"
        return UsageError(what, hint=f"see `cloudddp {q(*path)} --help`")
    known = [n for n, option in _spellings(command).items() if not option.hidden or n.startswith("--")]
    similar = difflib.get_close_matches(name, known, n=1, cutoff=SIMILAR)
    script = next((word for word in words if word.endswith(".py")), "SCRIPT")
    suggestion = f"did you mean {similar[0]}? Options" if similar else "options"
    hint = f"{suggestion} of the script go after it: `cloudddp {q(*path)} {q(script)} {q(name)}`"
    return UsageError(f"{verb} has no option {name}", hint=hint)
