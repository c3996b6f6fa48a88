"""The quickstart and some how-to pages, run in the simulator as they stand there. Commands of the others:
tests/unit/test_messages.py."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.harness import ROOT, CommandLine, clean_environment, remaining
from support.pages import BLOCK, script

PAGES = [ROOT / "docs/quickstart.md", *sorted((ROOT / "docs/how-to").glob("*.md"))]
RUN = {"quickstart", "continue-tomorrow", "fire-and-forget", "rehearse-failures", "spot-and-resume"}
HERE = [page for page in PAGES if page.stem in RUN]  # tests/witness has the page about trainers


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


@pytest.mark.parametrize("page", HERE, ids=[page.stem for page in HERE])
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
            check=False,
        )
        assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
        assert "Traceback" not in done.stderr
        assert remaining(ec2, name).instances == []
    finally:
        pages_cli.cwd = folder
        pages_cli("down", "-y", "-c", name)
