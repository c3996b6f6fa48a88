"""`--timings`: where the seconds of a command went, on stderr."""

from __future__ import annotations

from typing import Any

from support.jobs import direct

from cloudddp.cli.main import VERBS

# Spans of every verb that connects to the nodes.
START = {"total", "start of Python", "imports: command line", "settings"}
AWS = START | {"imports: boto3", "AWS client: ec2", "AWS ec2 describe_instances"}
NODES = AWS | {"connections", "SSH connect"}
# Verb -> the words after it, and its spans, in the order in which they can be run.
STEPS: dict[str, tuple[list[str], set[str]]] = {
    "init": (["fresh"], START - {"settings"}),
    "sim": (["status"], START - {"settings"}),
    "export": (["slurm", "hello.py"], START),
    "doctor": ([], AWS),
    "up": ([], AWS),
    "status": ([], AWS),
    "ls": ([], AWS),
    "allow-me": ([], AWS - {"AWS ec2 describe_instances"} | {"AWS ec2 describe_security_groups"}),
    "sync": ([], NODES | {"project files", "agent: probe"}),
    "exec": (["--", "true"], NODES | {"command"}),
    "ssh": (["0", "true"], AWS),
    "launch": (["hello.py"], NODES | {"project files", "agent: probe", "agent: start", "first line", "job"}),
    "run": (
        ["hello.py"],
        NODES
        | {
            "project files",
            "agent: start",
            "first line",
            "job",
            "wait: nodes run",
            "wait: nodes are terminated",
        },
    ),
    "jobs": ([], NODES | {"agent: jobs"}),
    "logs": ([], NODES | {"agent: jobs", "logs"}),
    "stacks": ([], NODES | {"agent: jobs"}),
    "cancel": ([], NODES | {"agent: jobs"}),
    "pull": ([], NODES | {"agent: jobs", "agent: pack"}),
    "watch": ([], NODES | {"agent: jobs"}),
    "resume": ([], NODES | {"agent: jobs"}),
    "down": (["-y"], AWS | {"wait: nodes are terminated"}),
}


def spans(text: str) -> list[str]:
    """Return what the lines of the waterfall are about, in order."""
    lines = text.splitlines()
    (head,) = (number for number, line in enumerate(lines) if line.split() == ["begin", "took", "(seconds)"])
    return [line.split(None, 2)[2].rstrip(" #").partition(" (")[0] for line in lines[head + 1 :]]


def agent_steps(found: list[str]) -> list[str]:
    """Return the agent's steps until the ranks are started, in order."""
    before = found[: found.index("agent: start") + 1]
    return [name.removeprefix("agent: ") for name in before if name.startswith("agent: ")]


def test_ranks_are_started_one_step_after_the_files_are_there(cli: Any) -> None:
    direct(cli, nodes=2, ranks=1)
    cli.ok("jobs")  # the agent is on the nodes, whatever became of them in another test
    found = []
    for text in ("first", "", "changed"):
        if text:
            cli.write("hello.py", f"print('{text}')")
        found.append(agent_steps(spans(cli("--timings", "launch", "hello.py").stderr)))
    assert found == [["probe", "receive", "start"], ["probe", "start"], ["probe", "receive", "start"]]


def test_every_verb_shows_its_steps(cli: Any) -> None:
    assert STEPS.keys() == VERBS.keys()
    direct(cli, nodes=2, ranks=1)
    cli.write("hello.py", "print('hello')")
    missing = {}
    for verb, (words, expected) in STEPS.items():
        before = ["--timings", "-c", f"{cli.cluster}-run"] if verb == "run" else ["--timings"]
        options = ["-n", "1", "-t", "g5.xlarge", "-y"] if verb == "run" else []
        done = cli(*before, verb, *options, *words)
        if lacking := expected - set(spans(done.stderr)):
            missing[verb] = (done.returncode, lacking, spans(done.stderr))
    assert missing == {}


def test_one_connection_to_aws_is_made_for_a_cluster_that_was_created_here(cli: Any) -> None:
    direct(cli)
    found = spans(cli("exec", "--timings", "--", "true").stderr)
    assert [found.count(name) for name in ("imports: boto3", "AWS client: ec2")] == [1, 1]


def test_paramiko_is_imported_while_aws_answers(cli: Any) -> None:
    """Not while boto3 is imported: the two would compete, and the request would be sent later."""
    direct(cli)
    _, errors = cli.start("exec", "--timings", "--", "true", cold=True).communicate(timeout=60)
    found = spans(errors)
    steps = ["imports: boto3", "AWS client: ec2", "imports: paramiko", "SSH connect"]
    assert [name for name in found if name in steps] == steps


def test_launch_shows_every_step_until_the_first_line(cli: Any) -> None:
    direct(cli, nodes=2, ranks=1)
    cli.write("hello.py", "print('hello')")
    cli.ok("launch", "hello.py")
    done = cli("--timings", "launch", "hello.py")
    assert done.returncode == 0
    assert "begin" not in done.stdout
    found = spans(done.stderr)
    assert {"start of Python", "imports: launch"} <= set(found)
    assert {"on the node: mesh", "on the node: preflight"} <= {name.strip() for name in found}
    steps = ["AWS ec2 describe_instances", "SSH connect", "agent: probe", "agent: start", "first line"]
    assert [name for name in found if name in steps] == steps


def test_timings_of_a_command_that_fails(cli: Any) -> None:
    done = cli("status", "--timings", "-c", "absent")
    assert "AWS ec2 describe_instances" in spans(done.stderr)
    failed = cli("exec", "--timings", "-c", "absent", "--", "true")
    assert failed.returncode == 1
    assert "AWS ec2 describe_instances" in spans(failed.stderr)


def test_nothing_is_shown_without_the_option(cli: Any) -> None:
    assert "begin   took" not in cli("status").stderr
