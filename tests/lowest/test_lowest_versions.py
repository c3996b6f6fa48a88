"""Whole commands with the lowest versions that pyproject.toml allows: `make lowest` runs this in their
environment.

Without PyTorch, whose lowest version is as large as the newest: the ranks are plain Python.
"""

from __future__ import annotations

import importlib.metadata
import re
import tomllib
from typing import Any

from support.harness import ROOT, TIMEOUT, CommandLine

SCRIPT = """
import os, pathlib
rank = os.environ["RANK"]
pathlib.Path("runs").mkdir(exist_ok=True)
pathlib.Path("runs", rank).write_text(f"rank {rank} of {os.environ['WORLD_SIZE']}")
"""


def test_lowest_versions_are_installed() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    needs = project["dependencies"] + project["optional-dependencies"]["sim"]
    bounds = dict(re.match(r"([\w-]+)(?:\[.*\])?>=([\d.]+)", need).groups() for need in needs)  # type: ignore[union-attr,misc]
    installed = {name: importlib.metadata.version(name) for name in bounds}
    assert {name for name, low in bounds.items() if not f"{installed[name]}.0".startswith(f"{low}.")} == set()


def test_up_launch_pull_and_down(cli: CommandLine, remains: Any) -> None:
    cli.write("job.py", SCRIPT)
    for words in (
        ("up", "-n", "2", "-t", "g5.xlarge"),
        ("launch", "--rendezvous", "direct", "job.py"),
        ("pull", "--all-nodes"),
        ("down", "-y"),
    ):
        process = cli.start(*words, cold=True)
        out, err = process.communicate(timeout=TIMEOUT)
        assert process.returncode == 0, f"{words}\n{out}\n{err}"
        assert "Warning" not in err  # of Python: an old paramiko uses what its own dependencies deprecate
    pulled = sorted(path.read_text() for path in (cli.cwd / "results").rglob("runs/*"))
    assert pulled == ["rank 0 of 2", "rank 1 of 2"]
    assert remains().nothing
