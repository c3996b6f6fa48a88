"""`tensorboard`: on the node of rank 0, fetched through the forwarded port; it ends with the command."""

from __future__ import annotations

import json
import signal
import subprocess
import urllib.request
from pathlib import Path
from typing import Any

import pytest
from support.harness import interrupt, wait_for
from support.jobs import direct, homes, newest

WRITE = """
import os
for name in ("a", "b c"):
    os.makedirs(f"runs/{name}")
    open(f"runs/{name}/events.out.tfevents.1", "w").close()
"""
STAND_IN = """#!/bin/sh
[ "$1" = -c ] && exit 0
echo "TensorBoard 2.19.0 at http://127.0.0.1:6006/ (Press CTRL+C to quit)"
sleep 600 & wait
"""


def running() -> list[str]:
    """The processes of TensorBoard on process nodes, which are this computer's."""
    words = ["pgrep", "-f", "tensorboard.main|tensorboard_data_server"]
    return subprocess.run(words, capture_output=True, text=True).stdout.split()


def test_tensorboard_shows_the_job_and_ends_with_the_command(cli: Any, tmp_path: Path) -> None:
    """By Ctrl-C, and if the command is killed (with a stand-in for TensorBoard). No browser is an
    information. Before: no event files in the configured outputs, and no TensorBoard where pip cannot install
    it."""
    pytest.importorskip("tensorboard")
    direct(cli, nodes=1)
    cli.write("write.py", WRITE)
    cli.ok("launch", "write.py")
    python = tmp_path / "python"
    python.write_text(STAND_IN)
    python.chmod(0o755)
    cli.env.update(BROWSER=str(tmp_path / "no-browser"), DISPLAY="", WAYLAND_DISPLAY="")
    err = cli.fails(1, "tensorboard", CLOUDDDP_OUTPUTS="logs")
    assert "node 0 has no event files of TensorBoard" in err
    assert "into logs?" in err
    no_pip = cli.write("python", '#!/bin/sh\necho "No module named pip" >&2\nexit 1\n')
    no_pip.chmod(0o755)
    assert "TensorBoard does not run" in cli.fails(1, "tensorboard", CLOUDDDP_PYTHON=str(no_pip))
    for words, number, expected, env in (
        (("--open",), signal.SIGINT, 0, {}),
        ((newest(cli)["id"],), signal.SIGKILL, -signal.SIGKILL, {"CLOUDDDP_PYTHON": str(python)}),
    ):
        process = cli.start("tensorboard", *words, **env)
        url = process.stdout.readline().strip()
        assert "starting TensorBoard on node 0 for runs" in process.stderr.readline()
        if "--open" in words:
            with urllib.request.urlopen(f"{url}/data/environment", timeout=300) as answer:
                assert json.load(answer)["data_location"].endswith("/project/runs")
            assert "no browser to open here: open the URL yourself" in process.stderr.readline()
        code, _, err = interrupt(process, number)
        assert code == expected, err
        wait_for(lambda: not running(), "nothing of it runs")
    left = [path for home in homes(cli) for path in home.parent.glob("tmp/tmp.*")]
    wait_for(lambda: not any(path.exists() for path in left), "its files are gone")
