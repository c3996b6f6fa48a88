"""Turns a frozen dataclass into a command line: each field is one flag with its help text, type and limits.

Independent of the meaning of the flags and of torch: parsing, `--help` and all checks run before torch is imported.
"""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import math
from collections.abc import Sequence
from typing import Any, NoReturn

from train.errors import UsageError

FROM_RECIPE = "by dataset"


def option(default: Any, help_text: str, **limits: Any) -> Any:
    """Return a dataclass field that is also a flag.

    Limits: choices, at_least, above, below. `section` starts a new heading in --help, for this flag and those after
    it.
    """
    return dataclasses.field(default=default, metadata={"help": help_text, **limits})


def positional(metavar: str, help_text: str) -> Any:
    """Return a dataclass field of type tuple[int, ...] that holds the positional arguments."""
    return dataclasses.field(default=(), metadata={"help": help_text, "metavar": metavar})


def flag_name(field: dataclasses.Field[Any]) -> str:
    return "--" + field.name.replace("_", "-")


def is_positional(field: dataclasses.Field[Any]) -> bool:
    return "metavar" in field.metadata


def parse_args(record: type[Any], argv: Sequence[str], *, prog: str, description: str) -> dict[str, Any]:
    """Return the values that `argv` gives to fields of `record`, without the defaults of the others.

    Exits 0 after --help; raises `UsageError` for an unknown flag or a value of the wrong type.
    """
    fields = dataclasses.fields(record)
    usage = "%(prog)s [--FLAG VALUE ...]"
    usage += "".join(f" [{field.metadata['metavar']}]" for field in fields if is_positional(field))
    parser = _Parser(prog=prog, usage=usage, description=description, allow_abbrev=False)
    section: argparse._ActionsContainer = parser
    for field in fields:
        if "section" in field.metadata:
            section = parser.add_argument_group(field.metadata["section"])
        if is_positional(field):
            _add_positional(parser, field)
        else:
            _add_flag(section, field)
    return vars(parser.parse_intermixed_args(argv))


def validate(record: Any) -> None:
    """Raise `UsageError` for the first field of `record` that is out of its limits."""
    for field in dataclasses.fields(record):
        if not is_positional(field):
            _check_limits(field, getattr(record, field.name))


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        unknown = message.partition("unrecognized arguments: ")[2].partition(" ")[0].partition("=")[0]
        similar = difflib.get_close_matches(unknown, self._option_string_actions, n=1, cutoff=0.8)
        advice = f"did you mean {similar[0]}?" if similar else "see --help"
        raise UsageError(f"{message} ({advice})")


def _add_positional(parser: argparse.ArgumentParser, field: dataclasses.Field[Any]) -> None:
    parser.add_argument(
        field.name,
        nargs="*",
        type=int,
        default=argparse.SUPPRESS,
        metavar=field.metadata["metavar"],
        help=field.metadata["help"],
    )


def _add_flag(parser: argparse._ActionsContainer, field: dataclasses.Field[Any]) -> None:
    # Suppressed defaults leave out what was not given, so that a recipe can supply it.
    shared: dict[str, Any] = {"dest": field.name, "default": argparse.SUPPRESS}
    if field.type == "bool":
        text = f"{field.metadata['help']} (default: {'on' if field.default else 'off'})"
        parser.add_argument(flag_name(field), action=argparse.BooleanOptionalAction, help=text, **shared)
        return
    choices = field.metadata.get("choices")
    text = field.metadata["help"] + (f"; one of {', '.join(choices)}" if choices else "")
    if field.default != "":
        text += f" (default: {field.default})"
    kind, metavar = {"int": (int, "N"), "float": (float, "X"), "str": (str, "TEXT")}[str(field.type)]
    parser.add_argument(flag_name(field), type=kind, metavar=metavar, help=text.replace("%", "%%"), **shared)


def _check_limits(field: dataclasses.Field[Any], value: Any) -> None:
    flag = flag_name(field)
    limits = field.metadata
    if "choices" in limits and value not in limits["choices"]:
        raise UsageError(f"{flag} {value}: must be one of {', '.join(limits['choices'])}")
    if isinstance(value, float) and not math.isfinite(value):
        raise UsageError(f"{flag} {value}: must be a finite number")
    if "at_least" in limits and value < limits["at_least"]:
        raise UsageError(f"{flag} {value}: must be at least {limits['at_least']}")
    if "above" in limits and value <= limits["above"]:
        raise UsageError(f"{flag} {value}: must be above {limits['above']}")
    if "below" in limits and value >= limits["below"]:
        raise UsageError(f"{flag} {value}: must be below {limits['below']}")
