"""`[job] notify`, from the command line to the server: a detached job, and where its URL must not be.
tests/unit/test_spec.py has the values that are refused."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.exposed import files_with
from support.jobs import direct, homes, newest
from support.webhooks import SECRET, Webhook

FAILS = "import os, sys\nsys.exit(3 if os.environ['RANK'] == '1' else 0)\n"


@pytest.fixture
def hook() -> Iterator[Webhook]:
    server = Webhook()
    yield server
    server.close()


def test_verdict_of_a_detached_job_is_sent_and_its_url_is_nowhere(cli: Any, hook: Webhook) -> None:
    """From a variable of the job; and from the configuration of this computer, which a resumed job has
    again."""
    direct(cli, nodes=2)
    cli.write("fails.py", FAILS)
    cli.write("cloudddp.toml", '[job]\nnotify = "${HOOK}"\n')
    job = cli.ok("launch", "-d", "-v", "-e", "HOOK", "fails.py", HOOK=hook.url).strip()
    found = hook.wait("failed")
    where = {"job": job, "cluster": cli.cluster, "node": 1, "rank": 1, "exit_code": 3}
    assert {name: found[name] for name in where} == where
    assert newest(cli)["exit_code"] == 3
    (cli.cwd / "cloudddp.toml").unlink()
    job = cli.ok("launch", "-d", "fails.py", CLOUDDDP_NOTIFY=hook.url).strip()
    hook.wait("failed", "failed")
    again = cli("resume", job, CLOUDDDP_NOTIFY=hook.url)
    hook.wait("failed", "failed", "failed")
    assert SECRET not in again.stdout + again.stderr + cli.ok("jobs", "--json") + cli.ok("logs", "-v")
    home = Path(cli.env["CLOUDDDP_HOME"])
    assert {"launcher.log", "state.json"} & {path.name for path in files_with("fails.py", home)}
    assert files_with(SECRET, home, cli.cwd) == []
    folders = [path for one in homes(cli) for path in one.glob(".cloudddp/jobs/*")]
    assert [len(list(one.glob("ranks/*.log"))) for one in folders] == [1] * 6  # three jobs on two nodes
