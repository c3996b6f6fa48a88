"""Commands in messages, written as the user has to type them."""

from __future__ import annotations

import pytest

from cloudddp.config.command_line import GlobalOptions
from cloudddp.errors import Command, ToolCommand, render

GIVEN = GlobalOptions(
    cluster="a b",
    config="x.toml",
    region="us-east-1",
    profile="work",
    sim=True,
    verbose=True,
    timings=True,
)


NAMED = GlobalOptions(cluster="x", region="r")


@pytest.mark.parametrize(
    ("options", "command", "line"),
    [
        (GlobalOptions(), Command("up"), "cloudddp up"),
        (
            GIVEN,
            Command("up"),
            "cloudddp --sim -c 'a b' --config x.toml --region us-east-1 --profile work up",
        ),
        (GlobalOptions(sim=True), Command("pull", "--", "-a b"), "cloudddp --sim pull -- '-a b'"),
        (GIVEN, Command("sim", "stop"), "cloudddp sim stop"),
        (GIVEN, Command("init"), "cloudddp init"),
        (GIVEN, Command("--sim", "up"), "cloudddp --sim up"),
        (
            GlobalOptions(cluster="x", region="us-west-2"),
            Command("down", "--region", "us-east-1"),
            "cloudddp -c x down --region us-east-1",
        ),
        (GlobalOptions(), ToolCommand("ssh", "a@b"), "ssh a@b"),
        (
            GlobalOptions(profile="my work"),
            ToolCommand("aws", "ec2", "create-default-vpc", "--region", "us-west-2"),
            "aws ec2 create-default-vpc --region us-west-2 --profile 'my work'",
        ),
        (GlobalOptions(profile="work"), ToolCommand("ssh", "a@b"), "ssh a@b"),
        (GIVEN, ToolCommand("aws", "ec2", "x"), "cloudddp sim exec -- aws ec2 x"),
        (GIVEN, ToolCommand("ssh", "a@b"), "cloudddp sim exec -- ssh a@b"),
        # The options after `--` or a script are not cloudddp's.
        (NAMED, Command("launch", "--", "a.py", "-c", "y"), "cloudddp -c x --region r launch -- a.py -c y"),
        (NAMED, Command("launch", "a.py", "-c"), "cloudddp -c x --region r launch a.py -c"),
        (NAMED, Command("exec", "--", "aws", "--region"), "cloudddp -c x --region r exec -- aws --region"),
        (NAMED, Command("down", "-c", "y", "--region", "q"), "cloudddp down -c y --region q"),
    ],
)
def test_command_line_has_the_options_that_were_given(
    options: GlobalOptions, command: Command, line: str
) -> None:
    assert options.command_line(command) == line


def test_commands_of_a_message_are_in_backticks() -> None:
    text = ("first ", Command("down"), ", then ", Command("up", "-n", "2"))
    assert render(text) == "first `cloudddp down`, then `cloudddp up -n 2`"
    assert render(text, GlobalOptions(sim=True).command_line).startswith("first `cloudddp --sim down`")
    assert render(ToolCommand("ssh", "a b")) == "`ssh 'a b'`"
    assert render("no command") == "no command"
    assert render(Command("up")) == "`cloudddp up`"
