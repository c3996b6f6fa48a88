"""Commands that are killed leave nodes that end when `status` says."""

from __future__ import annotations

import json
from typing import Any

import pytest
from support.harness import CommandLine, wait_for
from support.jobs import homes, newest, written

SCALE = 0.15
TOML = """\
[cluster]
idle_minutes = 0
[job]
rendezvous = "direct"
nproc_per_node = 1
heartbeat = 4
[setup]
run = ["true"]
"""
BUSY = "import time\nprint('began', flush=True)\ntime.sleep(1000)\n"
LAUNCH = ("launch", "-d", "--down", "--keep", "15", "busy.py")


@pytest.fixture
def cli(lab_cli: CommandLine) -> CommandLine:
    lab_cli.write("cloudddp.toml", TOML)
    lab_cli.write("busy.py", BUSY)
    lab_cli.env["CLOUDDDP_TIME_SCALE"] = str(SCALE)
    lab_cli.ok("up", "-n", "2", "-t", "g5.12xlarge")
    return lab_cli


def kill_at(process: Any, line: int) -> bool:
    """Kill a command when it has printed so many lines; return whether it was still running."""
    for _ in range(line):
        if not process.stderr.readline():
            break
    ran: bool = process.poll() is None
    process.kill()
    process.communicate()
    return ran


def plans(cli: CommandLine) -> list[tuple[str, float] | None]:
    """What lets each node of the cluster end, as root's timer reads it."""
    found: list[tuple[str, float] | None] = []
    for home in homes(cli):
        path = home / ".cloudddp" / "poweroff.json"
        plan = json.loads(path.read_text()) if path.exists() else None
        found.append(plan and (plan["job"], plan["seconds"] / SCALE / 60))
    return found


def check(cli: CommandLine) -> None:
    def shown() -> list[tuple[str, float] | None]:
        (cluster,) = json.loads(cli.ok("status", "--json"))
        plan = cluster["ends_after_job"] and (cluster["ends_after_job"], cluster["ends_after_job_minutes"])
        return [plan for node in cluster["nodes"] if node["state"] == "running"]

    wait_for(lambda: plans(cli) == shown(), "the nodes end as `status` says")


def test_launch(cli: CommandLine) -> None:
    for line in (0, 3, 5):
        assert kill_at(cli.start(*LAUNCH), line)
        check(cli)
        cli("cancel")


@pytest.mark.parametrize("verb", ["resume", "watch"])
def test_replacement(cli: CommandLine, verb: str) -> None:
    """Wherever it is killed, the next command replaces what is lost and starts the job again."""
    written(cli, "began", job=cli.ok(*LAUNCH).strip())
    for line in (4, 7, 9):
        process = cli.start(verb) if verb == "watch" else None
        cli.ok("sim", "fault", "kill", "1")
        wait_for(lambda: newest(cli)["state"] == "failed", "the job has ended")
        assert kill_at(process or cli.start("resume", "-d"), line)
        check(cli)
        if newest(cli)["state"] != "running":
            cli.ok("resume", "-d")
