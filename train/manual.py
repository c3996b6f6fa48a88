"""Prints the table of flags in docs/training.md: `python -m train.manual`."""

from __future__ import annotations

import dataclasses
import inspect
import re
from typing import Any, get_args, get_type_hints

from train.config import RECIPES, Config, flag


def flag_rows() -> list[str]:
    """Return a row for each flag: its name, its default, and what it does."""
    rows, recipe = [], set().union(*RECIPES.values())
    for kind in get_type_hints(Config).values():
        if not dataclasses.is_dataclass(kind):
            continue
        texts = _docstrings(kind)
        for one in dataclasses.fields(kind):
            default = "by dataset" if one.name in recipe else _shown(one.default)
            rows.append(f"| `{flag(one.name)}` | {default} | {texts[one.name]}{_choices(kind, one.name)} |")
    return rows


def _docstrings(kind: Any) -> dict[str, str]:
    """Return the text below each field, in one line."""
    source = inspect.getsource(kind)
    found = re.findall(r"^    (\w+): [^\n]*\n    \"\"\"(.*?)\"\"\"", source, re.DOTALL | re.MULTILINE)
    return {name: " ".join(text.split()) for name, text in found}


def _choices(kind: Any, name: str) -> str:
    choices = [one for one in get_args(get_type_hints(kind)[name]) if isinstance(one, str)]
    return f" One of {', '.join(choices)}." if choices else ""


def _shown(value: Any) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    return " ".join(map(str, value)) if isinstance(value, tuple) else str(value)


if __name__ == "__main__":
    print("\n".join(flag_rows()))
