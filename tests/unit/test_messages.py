"""Commands in the messages of cloudddp: each exists, with its options, and is what the user has to type."""

from __future__ import annotations

import ast
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
from support.harness import ROOT
from support.pages import BLOCK

import cloudddp
from cloudddp.cli.console import Console
from cloudddp.cli.main import main
from cloudddp.config.command_line import GlobalOptions
from cloudddp.errors import CloudDDPError, Message, inert, q, render

FOLDER = Path(cloudddp.__file__).parent
# Those that only set up credentials are shown as they are.
COMMAND = re.compile(r"`((?:cloudddp|ssh|aws(?! (?:configure|login|sso))) [^`]+)`")


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


def test_commands_of_messages_are_in_backticks_exist_and_quote_their_values() -> None:
    """Without backticks they would lack the options of this run. `sim` and `init` take none."""
    verb = "|".join(sorted(set(main.table) - {"init", "sim"}))
    bare = re.compile(rf"(?<!`)\bcloudddp ({verb})\b")
    commands = []
    for path in FOLDER.rglob("*.py"):
        is_help = path.parent.name == "commands" or path.name == "main.py"
        for line, text in texts(ast.parse(path.read_text())):
            place = f"{path.relative_to(FOLDER)}:{line}"
            assert is_help or not bare.search(text), place
            commands += [(f"{place}: {one}", problem(one.split())) for one in COMMAND.findall(text)]
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


def test_commands_in_an_error_have_the_options_of_the_run(capsys: pytest.CaptureFixture[str]) -> None:
    text = "the nodes stay; `cloudddp down` ends them"
    for message, command in ((Message(text), "cloudddp --sim down"), (text, "cloudddp down")):
        error = CloudDDPError(message)
        error.more_nodes = 1
        Console(GlobalOptions(sim=True)).error(error)
        assert f"`{command}` ends them (and 1 more node)" in capsys.readouterr().err


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
        (NAMED, "cloudddp down --region us-east-1", "cloudddp -c x down --region us-east-1"),
        (
            GlobalOptions(profile="my work"),
            "aws ec2 x --region y",
            "aws ec2 x --region y --profile 'my work'",
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
    for given, line in (
        (text, "first `cloudddp --sim down`, then `cloudddp --sim up -n 'a b'`; `sudo x`"),
        (Message(f"`cloudddp pull {q('a`b')}`"), "`cloudddp --sim pull 'a`b'`"),
        (Message("of `aws  `"), "of `aws  `"),
        (Message("of `aws \\`"), "of `aws \\`"),
        (Message(inert("a`b `cloudddp down`")), "a`b 'cloudddp down`"),
        ("a rank printed `cloudddp down`", "a rank printed `cloudddp down`"),
    ):
        assert render(given, as_typed) == line
