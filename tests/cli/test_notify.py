"""`[job] notify`, from the command line to the server: a detached job, and where its URL must not be."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.jobs import direct, homes, newest
from support.webhooks import SECRET, Webhook

FAILS = "import os, sys\nsys.exit(3 if os.environ['RANK'] == '1' else 0)\n"


@pytest.fixture
def hook() -> Iterator[Webhook]:
    server = Webhook()
    yield server
    server.close()


def holding(text: str, folder: Path) -> list[str]:
    """Return the names of the files below a folder that hold a text."""
    found = []
    for path in folder.rglob("*"):
        try:
            if path.is_file() and text.encode() in path.read_bytes():
                found.append(path.name)
        except OSError:  # it has gone
            continue
    return found


def test_verdict_of_a_detached_job_is_sent_and_its_url_is_nowhere(cli: Any, hook: Webhook) -> None:
    direct(cli, nodes=2)
    cli.write("fails.py", FAILS)
    cli.write("cloudddp.toml", '[job]\nnotify = "${HOOK}"\n')
    job = cli.ok("launch", "-d", "-v", "-e", "HOOK", "fails.py", HOOK=hook.url).strip()
    found = hook.wait("failed")
    where = {"job": job, "cluster": cli.cluster, "node": 1, "rank": 1, "exit_code": 3}
    assert {name: found[name] for name in where} == where
    out = cli.ok("jobs", "--json") + cli.ok("logs", "-v")
    assert newest(cli)["exit_code"] == 3
    assert SECRET not in out
    home = Path(cli.env["CLOUDDDP_HOME"])
    assert any(name == "launcher.log" or name == "state.json" for name in holding("fails.py", home))
    assert holding(SECRET, home) == []
    assert holding(SECRET, cli.cwd) == []


def test_url_in_the_configuration_is_not_recorded_and_a_resumed_job_has_it_again(
    cli: Any, hook: Webhook
) -> None:
    direct(cli)
    cli.write("fails.py", "import sys\nsys.exit(1)\n")
    job = cli.ok("launch", "-d", "fails.py", CLOUDDDP_NOTIFY=hook.url).strip()
    hook.wait("failed")
    again = cli("resume", job, CLOUDDDP_NOTIFY=hook.url)
    hook.wait("failed", "failed")
    home = Path(cli.env["CLOUDDDP_HOME"])
    assert holding(SECRET, home) == []
    assert SECRET not in again.stdout + again.stderr
    folders = [path for one in homes(cli) for path in one.glob(".cloudddp/jobs/*")]
    assert [len(list(one.glob("ranks/*.log"))) for one in folders] == [1, 1]


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ("$NOT_GIVEN", "job.notify is the variable NOT_GIVEN, which the job does not have"),
        ("$HOOK", "the variable HOOK, whose value is not allowed: http:// is for localhost"),
        ("https://user:hunter2@example.com/", "job.notify = **** is not allowed: the URL has a user name"),
    ],
)
def test_bad_value_is_refused_before_anything_is_called(line: Any, value: str, text: str) -> None:
    line.write("ok.py", "")
    line.write("cloudddp.toml", f"[job]\nnotify = '{value}'\n")
    done = line.exits(2, "launch", "-e", "HOOK=http://example.com/hunter2", "ok.py")
    assert text in done.stderr
    assert not re.search("hunter2", done.stderr + done.stdout)
