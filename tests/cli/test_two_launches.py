"""Two commands that use one cluster at once: a job runs the files that its own launch has sent."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.harness import TIMEOUT, CommandLine
from support.jobs import direct

WAITS = '[setup]\nrun = ["touch ~/began; while [ ! -e ~/go ]; do sleep 0.1; done"]\n'


@pytest.mark.parametrize("words", [("sync",), ("launch", "train.py")])
def test_no_other_project_replaces_the_files_between_a_launch_and_its_start(
    cli: Any, tmp_path: Path, words: tuple[str, ...]
) -> None:
    direct(cli)
    cli.write("cloudddp.toml", WAITS)
    cli.write("train.py", "print('of one', open('data.txt').read())")
    cli.write("data.txt", "1")
    other = CommandLine(tmp_path / "two", cli.cluster, cli.env, None, cli.started)
    other.cwd.mkdir()
    other.write("train.py", "print('of two')")
    launch = cli.start("launch", "train.py")
    cli.ok("exec", "while [ ! -e ~/began ]; do sleep 0.1; done")
    refused = other(*words)
    cli.ok("exec", "touch ~/go")
    out, err = launch.communicate(timeout=TIMEOUT)
    assert launch.returncode == 0, err
    assert "of one 1" in out
    assert refused.returncode == 1
    assert "Traceback" not in refused.stderr
    assert "of two" not in refused.stdout
