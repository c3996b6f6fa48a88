"""Two commands that use one cluster at once: a job runs the files that its own launch has sent."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.harness import TIMEOUT, CommandLine
from support.jobs import direct, lines_by_rank

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


def test_second_launch_finds_on_all_nodes_what_rank_0_has_saved(cli: Any) -> None:
    """As multinode.py of pytorch/examples: rank 0 saves, and every rank continues from what it finds."""
    direct(cli, nodes=2)
    cli.write(
        "train.py",
        "import os\nprint('continues', os.path.exists('snapshot.pt'))\n"
        "if os.environ['RANK'] == '0': open('snapshot.pt', 'wb').write(b'saved')",
    )
    cli.ok("launch", "train.py")
    done = cli("launch", "train.py")
    assert lines_by_rank(done.stdout) == {0: ["continues True"], 1: ["continues True"]}
    assert "which only some nodes have, from node 0 to node 1" in done.stderr + done.stdout
    cli.ok("pull")
    assert "not pulled" not in cli("jobs").stderr
