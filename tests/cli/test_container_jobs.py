"""--container: jobs of the command line in containers of the simulator's nodes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from support.jobs import direct, homes


def calls(home: Path, verb: str) -> list[list[str]]:
    lines = (home / ".simulated-docker").read_text().splitlines()
    return [words for words in map(json.loads, lines) if words[0] == verb]


SCRIPT = "import os; print('rank', os.environ['RANK'], os.environ['TOKEN'], 'SSH_CONNECTION' in os.environ)\n"
WITHOUT_TORCH = '#!/bin/sh\nexec python3 -IS "$@"\n'


def test_job_in_a_container(cli: Any) -> None:
    """Setup, ranks, environment, and what is refused."""
    direct(cli, nodes=2)
    cli.write("cloudddp.toml", '[setup]\nrun = ["echo set up in $HOME"]\n[job]\ncontainer = "train:1"\n')
    cli.write("ok.py", SCRIPT)
    done = cli.exits(0, "launch", "--rendezvous", "direct", "-e", "TOKEN=s3cret", "ok.py")
    assert "rank 0 s3cret False" in done.stdout
    assert "rank 1 s3cret False" in done.stdout
    assert "pulling train:1 where it is missing" in done.stderr
    for home in homes(cli):
        assert len(calls(home, "pull")) == 1
        assert not any("s3cret" in word for words in calls(home, "run") for word in words)
    cli.write("bare", WITHOUT_TORCH)
    (cli.cwd / "bare").chmod(0o755)
    cli.write("cloudddp.toml", '[job]\ncontainer = "train:1"\npython = "./bare"\n')
    err = cli.fails(1, "launch", "--rendezvous", "c10d", "ok.py")
    assert "node 0: train:1: it has no torch, and torchrun needs it" in err
    assert json.loads(cli.ok("jobs", "--json"))[-1]["state"] == "failed"
