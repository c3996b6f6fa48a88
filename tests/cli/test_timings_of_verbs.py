"""`--timings`: where the seconds of a command went, on stderr."""

from __future__ import annotations

from typing import Any

from support.jobs import direct


def spans(text: str) -> list[str]:
    """Return what the lines of the waterfall are about, in order."""
    lines = text.splitlines()
    (head,) = (number for number, line in enumerate(lines) if line.split() == ["begin", "took", "(seconds)"])
    return [line.split(None, 2)[2].rstrip(" #").partition(" (")[0] for line in lines[head + 1 :]]


def test_launch_shows_every_step_until_the_first_line(cli: Any) -> None:
    """And a command that fails its steps until then."""
    direct(cli, nodes=2, ranks=1)
    cli.write("hello.py", "print('hello')")
    cli.ok("launch", "hello.py")
    done = cli.exits(0, "--timings", "launch", "hello.py")
    assert "begin" not in done.stdout
    found = spans(done.stderr)
    assert {"start of Python", "imports: launch"} <= set(found)
    assert {"on the node: mesh", "on the node: preflight"} <= {name.strip() for name in found}
    steps = ["AWS ec2 describe_instances", "SSH connect", "agent: probe", "agent: start", "first line"]
    assert [name for name in found if name in steps] == steps
    assert [found.count(name) for name in ("imports: boto3", "AWS client: ec2")] == [1, 1]
    failed = cli.fails(1, "exec", "--timings", "-c", "absent", "--region", "us-east-1", "--", "true")
    assert "AWS ec2 describe_instances" in spans(failed)
