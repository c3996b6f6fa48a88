"""`init`: what it writes, which example it copies, and that the copies work."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from support.harness import ROOT, CommandLine, clean_environment

from cloudddp.config import settings
from cloudddp.files import EXAMPLES, payload_example


def files(folder: Path) -> set[str]:
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}


def expected(example: str) -> set[str]:
    return {"cloudddp.toml", ".gitignore", *payload_example(example)}


@pytest.mark.parametrize(
    ("words", "example", "folder"),
    [
        (["--example"], "ddp", "."),
        (["--example=ddp", "new"], "ddp", "new"),
        (["--example", "new/deep"], "ddp", "new/deep"),
        (["new", "--example"], "ddp", "new"),
        (["--example", "digits", "new"], "ddp", "new"),
        (["new", "--example", "trainer"], "trainer", "new"),
    ],
    ids=" ".join,
)
def test_example_is_copied_into_the_folder(
    line: CommandLine, words: list[str], example: str, folder: str
) -> None:
    done = line("init", *words)
    assert done.returncode == 0, done.stderr
    made = line.cwd / folder
    assert files(made) == expected(example)
    for name, source in payload_example(example).items():
        assert (made / name).read_bytes() == source.read_bytes()
    launch = {"ddp": "train.py", "trainer": "train/main.py"}[example]
    there = "" if folder == "." else f"cd {folder} && "
    assert f"next: {there}cloudddp --sim up && cloudddp --sim launch {launch}\n" in done.stderr


def test_nodes_install_the_requirements_of_an_example(line: CommandLine) -> None:
    line("init", "--example", "new")
    config = settings.resolve([settings.read_toml(line.cwd / "new" / "cloudddp.toml")])
    (command,) = config.setup.run
    assert command.endswith(" || pip install -r requirements.txt")
    assert config.setup.inputs == ("requirements.txt",)
    assert config.cluster.name == "new"


def test_unknown_example_is_refused(line: CommandLine) -> None:
    err = line.fails(2, "init", "new", "--example", "digit")
    assert "--example: no example" in err
    assert "available: ddp, trainer; for a folder of that name: `cloudddp init --example=ddp FOLDER`" in err
    assert files(line.cwd) == set()


def test_no_existing_file_is_replaced(line: CommandLine) -> None:
    name = "train.py"
    line.write(name, "mine")
    err = line.fails(2, "init", "--example")
    assert f"{name} already exists; nothing was written" in err
    assert files(line.cwd) == {name}


def test_requirements_of_the_trainer_are_those_of_the_extra() -> None:
    extra = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]["train"]
    listed = (ROOT / "examples" / "trainer" / "requirements.txt").read_text().splitlines()
    assert sorted(listed) == sorted(extra)


def run_tests(folder: Path) -> str:
    program = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    done = subprocess.run(program, cwd=folder, env=clean_environment(), capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.torch
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("example", "passed"), [("ddp", 3), ("trainer", 2)])
def test_copy_of_an_example_trains_and_passes_its_tests(line: CommandLine, example: str, passed: int) -> None:
    pytest.importorskip("sklearn")
    line("init", "--example", example, "new")
    assert f"{passed} passed" in run_tests(line.cwd / "new")


@pytest.mark.parametrize("example", EXAMPLES)
def test_links_between_the_pages_of_an_example_resolve_in_a_copy(example: str) -> None:
    copied = payload_example(example)
    pages = {name: path for name, path in copied.items() if name.endswith(".md")}
    assert pages
    for name, path in pages.items():
        for link in re.findall(r"\]\((?!https?:|#)([^)#]+)", path.read_text(encoding="utf-8")):
            assert os.path.normpath(f"{Path(name).parent}/{link}") in copied, f"{name}: {link}"
