"""Every command of the quickstart and the how-to pages, run in the simulator as it stands there.

A block `sh` is run, and of a workflow (`yaml`) what its steps run, but for the installation. A block whose
first line is a comment with a file's name (`# train.py`) is that file; one for cloudddp.toml is added to it.
Other blocks are `text`: what they show cannot be run here.
"""

from __future__ import annotations

import re
import shlex
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from support.harness import ROOT, CommandLine, clean_environment, remaining

PAGES = [ROOT / "docs/quickstart.md", *sorted((ROOT / "docs/how-to").glob("*.md"))]
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
NAMED = re.compile(r"# ([\w.-]+\.\w+)\n")
LONGEST = 300  # seconds, a hang guard


def script(page: str) -> str:
    """Return a page's commands and files as one shell script."""
    lines = ["set -euo pipefail"]
    for kind, text in BLOCK.findall(page):
        if kind == "sh":
            lines.append(text)
        elif kind == "yaml":
            (job,) = yaml.safe_load(text)["jobs"].values()
            steps = [step["run"] for step in job["steps"] if "run" in step]
            assert steps[0].startswith("pip install ")
            lines += steps[1:]
        elif kind in ("python", "toml"):
            named = NAMED.match(text)
            assert named, f"this block does not begin with the name of its file:\n{text}"
            write = ">>" if named[1] == "cloudddp.toml" else ">"
            lines.append(f"printf '%s\\n' {shlex.quote(text)} {write} {named[1]}")
    return "\n".join(lines)


@pytest.fixture
def pages_cli(lab_cli: CommandLine) -> Iterator[CommandLine]:
    """The command line as a reader has it: the name of the cluster comes from the folder."""
    lab_cli.env = clean_environment(
        CLOUDDDP_HOME=lab_cli.env["CLOUDDDP_HOME"], CLOUDDDP_SIM="1", SHELL="/bin/bash"
    )
    yield lab_cli


def test_pages_have_commands_and_no_block_of_another_kind() -> None:
    assert len(PAGES) > 12
    for page in PAGES:
        text = page.read_text()
        kinds = {kind for kind, _ in BLOCK.findall(text)}
        assert "sh" in kinds, page
        assert kinds <= {"sh", "python", "toml", "yaml", "text"}, page
        shown = text.count("\n")
        assert shown <= 60, f"{page.name} has {shown} lines"


@pytest.mark.parametrize("page", PAGES, ids=[page.stem for page in PAGES])
def test_commands_of_a_page_work(page: Path, pages_cli: CommandLine, ec2: Any) -> None:
    name = f"{page.stem}-{pages_cli.cluster}"  # a folder and cluster of its own: tests may run at once
    folder = pages_cli.cwd / name
    if page.stem == "quickstart":  # begins with an empty folder
        folder.mkdir()
        (folder / "requirements.txt").write_text("torch\n")
    else:
        pages_cli.ok("init", "--example", name)
        (folder / "cloudddp.toml").write_text("")  # the pages say what is in it
    pages_cli.cluster = name
    try:
        done = subprocess.run(
            ["bash", "-c", script(page.read_text())],
            cwd=folder,
            env=pages_cli.env,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=LONGEST,
            check=False,
        )
        assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
        assert "Traceback" not in done.stderr
        assert remaining(ec2, name).instances == []
    finally:
        pages_cli.cwd = folder
        pages_cli("down", "-y", "-c", name)
