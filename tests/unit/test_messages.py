"""Commands in the messages of cloudddp: each exists, with its options, and its values are quoted."""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator
from pathlib import Path

import click

import cloudddp
from cloudddp.cli.main import main

FOLDER = Path(cloudddp.__file__).parent
# Those that only set up credentials are shown as they are.
COMMAND = re.compile(r"`((?:cloudddp|ssh|aws(?! (?:configure|login|sso))) [^`]+)`")


@functools.cache
def modules() -> dict[Path, ast.Module]:
    return {path: ast.parse(path.read_text()) for path in FOLDER.rglob("*.py")}


def texts(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Yield each string but docstrings, with VALUE for what `q` quotes and UNQUOTED for other values."""
    others = {id(part) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for part in node.values}
    others |= {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            yield node.lineno, "".join(map(shown, node.values))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in others:
            yield node.lineno, node.value


def shown(part: ast.expr) -> str:
    if isinstance(part, ast.Constant):
        return str(part.value)
    value = part.value if isinstance(part, ast.FormattedValue) else part
    is_quoted = isinstance(value, ast.Call) and isinstance(value.func, ast.Name) and value.func.id == "q"
    return "VALUE" if is_quoted else "UNQUOTED"


def problem(words: list[str]) -> str:
    """Return what is wrong with a command, or ''."""
    command: click.Command = main
    for word in words[1:]:
        if words[0] != "cloudddp":
            return word if "UNQUOTED" in words else ""
        options = {name for one in command.params for name in (*one.opts, *one.secondary_opts)}
        if word in ("--", "--help"):
            return ""
        if word == "VALUE":
            if command is main:
                return ""
            continue
        if word == "UNQUOTED" or (word.startswith("-") and word.partition("=")[0] not in options):
            return f"{word!r} of {command.name}"
        if isinstance(command, click.Group) and not word.startswith("-"):
            found = command.get_command(click.Context(command), word)
            if found is None:
                return f"{word!r} of {command.name}"
            command = found
    return ""


def test_commands_are_in_backticks() -> None:
    """Otherwise they would lack the options of this run. `sim` and `init` take none."""
    verb = "|".join(sorted(set(main.table) - {"init", "sim"}))
    for path, tree in modules().items():
        is_help = path.parent.name == "commands" or path.name == "main.py"
        for line, text in () if is_help else texts(tree):
            assert not re.search(rf"(?<!`)\bcloudddp ({verb})\b", text), f"{path}:{line}"


def test_commands_of_messages_exist_and_quote_their_values() -> None:
    commands = [
        (f"{path.relative_to(FOLDER)}:{line}: {command}", problem(command.split()))
        for path, tree in modules().items()
        for line, text in texts(tree)
        for command in COMMAND.findall(text)
    ]
    assert len(commands) > 200
    assert [one for one in commands if one[1]] == []
