"""Commands in messages, written as the user has to type them."""

from __future__ import annotations

import pytest

from cloudddp.config.command_line import GlobalOptions
from cloudddp.errors import Message, inert, q, render

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
        (GlobalOptions(), "cloudddp up", "cloudddp up"),
        (
            GIVEN,
            "cloudddp up",
            "cloudddp --sim -c 'a b' --config x.toml --region us-east-1 --profile work up",
        ),
        (GlobalOptions(sim=True), "cloudddp pull -- '-a b'", "cloudddp --sim pull -- '-a b'"),
        (GIVEN, "cloudddp sim stop", "cloudddp sim stop"),
        (GIVEN, "cloudddp init", "cloudddp init"),
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
        (GlobalOptions(profile="work"), "ssh a@b", "ssh a@b"),
        (GlobalOptions(profile="work"), "aws sso login", "aws sso login"),  # of the role's source profile
        (GIVEN, "aws ec2 x", "cloudddp sim exec -- aws ec2 x"),
        (GIVEN, "ssh a@b", "cloudddp sim exec -- ssh a@b"),
        # The options after `--` or a script are not cloudddp's.
        (NAMED, "cloudddp launch -- a.py -c y", "cloudddp -c x --region r launch -- a.py -c y"),
        (NAMED, "cloudddp launch a.py -c", "cloudddp -c x --region r launch a.py -c"),
        (NAMED, "cloudddp exec -- aws --region", "cloudddp -c x --region r exec -- aws --region"),
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
