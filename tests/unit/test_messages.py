"""Commands in the messages of cloudddp: each exists, with its options, and is what the user has to type."""

from __future__ import annotations

import ast
import functools
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
from support.harness import ROOT
from support.pages import BLOCK

import cloudddp
from cloudddp.cli.main import main
from cloudddp.config.command_line import GlobalOptions
from cloudddp.errors import Message, inert, q, render

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


def test_commands_of_the_pages_exist() -> None:
    pages = [ROOT / "docs/quickstart.md", *(ROOT / "docs/how-to").glob("*.md")]
    found = 0
    for page in pages:
        text = "".join(block for kind, block in BLOCK.findall(page.read_text()) if kind == "sh")
        for line in text.replace("\\\n", " ").splitlines():
            words = shlex.split(line, comments=True)
            script = next((at for at, word in enumerate(words) if word.endswith(".py")), len(words))
            if words and words[0] == "cloudddp":
                found += 1
                assert problem(words[:script]) == "", f"{page.name}: {line}"
    assert found > 40


GIVEN = GlobalOptions(
    cluster="a b", config="x.toml", region="us-east-1", profile="work", sim=True, verbose=True, timings=True
)


NAMED = GlobalOptions(cluster="x", region="r")


@pytest.mark.parametrize(
    ("options", "command", "line"),
    [
        (
            GIVEN,
            "cloudddp up",
            "cloudddp --sim -c 'a b' --config x.toml --region us-east-1 --profile work up",
        ),
        (GlobalOptions(sim=True), "cloudddp pull -- '-a b'", "cloudddp --sim pull -- '-a b'"),
        (GIVEN, "cloudddp sim stop", "cloudddp sim stop"),
        (GIVEN, "cloudddp --sim up", "cloudddp --sim up"),
        (
            GlobalOptions(cluster="x", region="us-west-2"),
            "cloudddp down --region us-east-1",
            "cloudddp -c x down --region us-east-1",
        ),
        (
            GlobalOptions(profile="my work"),
            "aws ec2 create-default-vpc --region us-west-2",
            "aws ec2 create-default-vpc --region us-west-2 --profile 'my work'",
        ),
        (GlobalOptions(profile="work"), "aws sso login", "aws sso login"),
        (GIVEN, "aws ec2 x", "cloudddp sim exec -- aws ec2 x"),
        (NAMED, "cloudddp launch -- a.py -c y", "cloudddp -c x --region r launch -- a.py -c y"),
        (NAMED, "cloudddp launch a.py -c", "cloudddp -c x --region r launch a.py -c"),
        (NAMED, "cloudddp down -c y --region q", "cloudddp down -c y --region q"),
    ],
)
def test_command_of_a_message_has_the_options_that_were_given(
    options: GlobalOptions, command: str, line: str
) -> None:
    assert render(Message(f"then `{command}`"), options.command_line) == f"then `{line}`"


def test_only_commands_of_messages_get_options() -> None:
    as_typed = GlobalOptions(sim=True).command_line
    text = Message(f"first `cloudddp down`, then `cloudddp up -n {q('a b')}`; `sudo x`")
    assert text == "first `cloudddp down`, then `cloudddp up -n 'a b'`; `sudo x`"
    assert (
        render(text, as_typed) == "first `cloudddp --sim down`, then `cloudddp --sim up -n 'a b'`; `sudo x`"
    )
    assert render(Message(f"`cloudddp pull {q('a`b')}`"), as_typed) == "`cloudddp --sim pull 'a`b'`"
    assert render(Message("of `aws  `"), as_typed) == "of `aws  `"
    assert render(Message("of `aws \\`"), as_typed) == "of `aws \\`"
    assert render(Message(inert("a`b `cloudddp down`")), as_typed) == "a`b 'cloudddp down`"
    assert render("a rank printed `cloudddp down`", as_typed) == "a rank printed `cloudddp down`"
