"""How a frozen record becomes a command line: each field is one flag, with its help, its type and its limits.

It must not know what the flags mean, nor torch: parsing, `--help` and every refusal happen before torch is imported.
"""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import math
from typing import Any, NoReturn

from train.errors import UsageError

FROM_RECIPE = "by dataset"


def option(default: Any, help_text: str, **limits: Any) -> Any:
    """A dataclass field which is also a flag. Limits: choices, at_least, above, below. A `section` is the heading in
    --help of this flag and of those after it."""
    return dataclasses.field(default=default, metadata={"help": help_text, **limits})


def read(record: type[Any], argv: list[str], *, prog: str, description: str) -> dict[str, Any]:
    """The values that `argv` gives to fields of `record`; what was not given is left out.

    Exits 0 after --help; raises `UsageError` for a flag that does not exist or a value of the wrong type.
    """
    placed = any(field.name == "place" for field in dataclasses.fields(record))
    usage = f"%(prog)s [--FLAG VALUE ...]{' [RANK LOCAL_RANK]' if placed else ''}"
    parser = _Parser(prog=prog, usage=usage, description=description, allow_abbrev=False)
    section: argparse._ActionsContainer = parser
    for field in dataclasses.fields(record):
        if "section" in field.metadata:
            section = parser.add_argument_group(field.metadata["section"])
        _add(parser if field.name == "place" else section, field)
    return vars(parser.parse_intermixed_args(argv))


def check(record: Any) -> None:
    """Raise `UsageError` for the first field of `record` that is out of its limits."""
    for field in dataclasses.fields(record):
        _check(field, getattr(record, field.name))


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        unknown = message.partition("unrecognized arguments: ")[2].partition(" ")[0].partition("=")[0]
        meant = difflib.get_close_matches(unknown, self._option_string_actions, n=1, cutoff=0.8)
        advice = f"did you mean {meant[0]}?" if meant else "--help lists the flags"
        raise UsageError(f"{message} ({advice})")


def _add(parser: argparse._ActionsContainer, field: dataclasses.Field[Any]) -> None:
    if field.name == "place":
        parser.add_argument(
            "place",
            nargs="*",
            type=int,
            default=argparse.SUPPRESS,
            metavar="RANK LOCAL_RANK",
            help="this process's place, for starts without torchrun",
        )
        return
    flag = "--" + field.name.replace("_", "-")
    # Suppressed defaults leave out what was not given, so that a recipe can fill it.
    shared: dict[str, Any] = {"dest": field.name, "default": argparse.SUPPRESS}
    if field.type == "bool":
        text = f"{field.metadata['help']} (default: {'on' if field.default else 'off'})"
        parser.add_argument(flag, action=argparse.BooleanOptionalAction, help=text, **shared)
        return
    choices = field.metadata.get("choices")
    text = field.metadata["help"] + (f"; one of {', '.join(choices)}" if choices else "")
    if field.default != "":
        text += f" (default: {field.default})"
    kind, word = {"int": (int, "N"), "float": (float, "X"), "str": (str, "TEXT")}[str(field.type)]
    parser.add_argument(flag, type=kind, metavar=word, help=text.replace("%", "%%"), **shared)


def _check(field: dataclasses.Field[Any], value: Any) -> None:
    flag = "--" + field.name.replace("_", "-")
    limits = field.metadata
    if "choices" in limits and value not in limits["choices"]:
        allowed = ", ".join(limits["choices"])
        raise UsageError(f"{flag} {value}: must be one of {allowed}")
    if isinstance(value, float) and not math.isfinite(value):
        raise UsageError(f"{flag} {value}: must be a finite number")
    if "at_least" in limits and value < limits["at_least"]:
        raise UsageError(f"{flag} {value}: must be at least {limits['at_least']}")
    if "above" in limits and value <= limits["above"]:
        raise UsageError(f"{flag} {value}: must be above {limits['above']}")
    if "below" in limits and value >= limits["below"]:
        raise UsageError(f"{flag} {value}: must be below {limits['below']}")
