"""Folders that cannot be created or written, and huge numbers: a message and a hint, never a bug."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support.harness import CommandLine, cannot
from support.jobs import direct


@pytest.fixture
def sealed() -> Iterator[Callable[[Path], Path]]:
    """Make folders that even root cannot change."""
    done: list[Path] = []

    def seal(folder: Path) -> Path:
        folder.mkdir(parents=True, exist_ok=True)
        if os.geteuid():
            folder.chmod(0o500)
        elif not shutil.which("chattr") or subprocess.run(["chattr", "+i", folder], check=False).returncode:
            cannot("root, on a file system without `chattr +i`")
        done.append(folder)
        return folder

    yield seal
    for folder in done:
        if os.geteuid():
            folder.chmod(0o700)
        else:
            subprocess.run(["chattr", "-i", folder], check=True)


def refused(done: subprocess.CompletedProcess[str], *words: str) -> None:
    """It exits 2 with a message that has these words and a hint, and reports no bug."""
    assert done.returncode == 2, (done.stdout, done.stderr)
    assert "bug" not in done.stderr
    assert "\n  -> " in done.stderr
    for word in words:
        assert word in done.stderr


def test_init_in_an_unwritable_folder(line: CommandLine, sealed: Callable[[Path], Path]) -> None:
    folder = sealed(line.cwd / "sealed")
    refused(line("init", "sealed/new"), "sealed/new")
    refused(line("init", "--example", "ddp", "sealed/new"), "sealed/new")
    line.write("file", "x")
    refused(line("init", "file/new"), "file/new")
    assert list(folder.iterdir()) == []


def test_pull_into_an_unwritable_folder(line: CommandLine, sealed: Callable[[Path], Path]) -> None:
    """Reported before any call: there are no credentials here."""
    sealed(line.cwd / "sealed")
    line.write("file", "x")
    refused(line("pull", "--to", "sealed/new/deep"), "sealed", "--to")
    refused(line("pull", "--to", "file/new"), "file", "--to")
    (line.cwd / "loop").symlink_to("loop/x")
    assert "bug" not in line("pull", "--to", "loop/y").stderr
    assert "bug" not in line("pull", "--to", "x" * 300).stderr


def test_results_folder_must_be_writable(line: CommandLine, sealed: Callable[[Path], Path]) -> None:
    line.write("train.py", "")
    line.write("results", "notes on my results")
    refused(line("pull"), "results", "--to")
    (line.cwd / "results").unlink()
    sealed(line.cwd / "results")
    refused(line("run", "train.py"), "results", "cannot write")


def test_results_that_cannot_replace_what_is_there(cli: Any, sealed: Callable[[Path], Path]) -> None:
    """Found only while files are moved into place: the error names the file, and nothing else is written."""
    direct(cli)
    cli.write("write.py", "import os\nos.makedirs('runs/a')\nopen('runs/a/x', 'w').write('1')\n")
    cli.ok("launch", "write.py")
    cli.write("file/runs", "a file")
    assert "file/runs" in cli.fails(1, "pull", "--to", "file")
    cli.write("folder/runs/a/x/y", "a folder")
    assert "folder/runs/a/x" in cli.fails(1, "pull", "--to", "folder")
    sealed(cli.cwd / "to" / "runs" / "a")
    err = cli.fails(1, "pull", "--to", "to")
    assert "cannot write" in err
    assert "bug" not in err
    assert sorted(path.name for path in (cli.cwd / "to").iterdir()) == ["runs"]


def test_huge_numbers_and_deep_nesting_are_refused(line: CommandLine) -> None:
    for value in ("1" * 5000, "9" * 5000 + ".0", "[" * 5000 + "]" * 5000):
        line.write("cloudddp.toml", f"[cluster]\nmax_cost = {value}\n")
        done = line("up", "--dry-run")
        refused(done, "cloudddp.toml")
        assert len(done.stderr) < 2000
    (line.cwd / "cloudddp.toml").unlink()
    done = line("up", "--dry-run", CLOUDDDP_NODES="1" * 5000)
    refused(done, "CLOUDDDP_NODES")
    assert len(done.stderr) < 2000
