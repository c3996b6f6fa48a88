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
from support.terminal import Terminal

from cloudddp.config import settings
from cloudddp.files import EXAMPLES, payload_example
from cloudddp.local_state import ClusterFolder, ClusterRecord


def files(folder: Path) -> set[str]:
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}


def expected(example: str) -> set[str]:
    return {"cloudddp.toml", ".gitignore", *payload_example(example)}


@pytest.mark.parametrize(
    ("words", "example", "folder"),
    [
        (["--example"], "classic", "."),
        (["--example", "new/deep"], "classic", "new/deep"),
        (["new", "--example"], "classic", "new"),
        (["--example=digits", "new"], "exact", "new"),
        (["--example", "ddp", "new"], "exact", "new"),
        (["new", "--example", "trainer"], "trainer", "new"),
    ],
    ids=" ".join,
)
def test_example_is_copied_into_the_folder(
    line: CommandLine, words: list[str], example: str, folder: str
) -> None:
    err = line.messages("init", *words)
    made = line.cwd / folder
    assert files(made) == expected(example)
    for name, source in payload_example(example).items():
        assert (made / name).read_bytes() == source.read_bytes()
    config = settings.resolve([settings.read_toml(made / "cloudddp.toml")])
    assert config.setup.environment == "requirements.txt"
    assert folder == "." or config.cluster.name == made.name
    script = "train/main.py" if example == "trainer" else "train.py"
    there = "" if folder == "." else f"cd {folder} && "
    assert err.endswith(f"next, a rehearsal on this computer: {there}cloudddp --sim run {script}\n")


def test_project_is_looked_at(line: CommandLine) -> None:
    """What was found is in the file, which is short, and on the screen."""
    name = "src/own/train.py"
    saves = 'import torch\ntorch.save({}, "ckpt/a.pt")\ntorch.save({}, "/mnt/a.pt")\nopen("data/x")\n'
    main = 'from . import x\nif __name__ == "__main__":\n    torch.distributed.init_process_group()\n'
    line.write(name, saves + main)
    line.write("uv.lock", "")
    line.write("data/x", "1")
    line.write(".gitignore", "data/\n")
    other = ClusterRecord("c-0123456789", "other", "us-east-1", "", "2199-01-01T00:00:00Z")
    folder = ClusterFolder(other.id, root=Path(line.env["CLOUDDDP_HOME"]))
    folder.create(other, private_key="private", host_public="ssh-ed25519 AAAA")
    err = line.messages("init")
    assert "cluster 'other', created on this computer, may be up (-c other)" in err
    text = (line.cwd / "cloudddp.toml").read_text()
    assert len(text.splitlines()) <= 25
    config = settings.resolve([settings.read_toml(line.cwd / "cloudddp.toml")])
    assert config.setup.environment == "uv.lock"
    assert [one.source for one in config.data] == ["data"]
    assert config.job.env == {"PYTHONPATH": "src"}
    assert f"{name}: a training script; it saves to ckpt\n" in err
    assert f"{name} saves to /mnt/a.pt, outside the project" in err
    assert err.endswith("cloudddp --sim run -m own.train\n")


@pytest.mark.parametrize("name", ["empty", "home"])
def test_folder_without_a_project_gets_the_defaults(line: CommandLine, name: str) -> None:
    """A home folder is not searched."""
    if name == "home":
        line.env["HOME"] = str(line.cwd)
        line.write("train.py", 'if __name__ == "__main__":\n    torch.distributed.init_process_group()\n')
    assert "train.py" not in line.messages("init")
    config = settings.resolve([settings.read_toml(line.cwd / "cloudddp.toml")])
    assert (config.setup.environment, config.data, config.cluster.nodes) == (None, (), 2)


def test_questions_on_a_terminal(line: CommandLine) -> None:
    """An answer that is not allowed is asked for again."""
    asked = Terminal(line, "init")
    for question, answer in (
        (b"How many nodes? [2]", b"0"),
        (b"allowed", b"4"),
        (b"Which instance type?", b""),
        (b"How many USD", b"30"),
    ):
        asked.read_until(question)
        os.write(asked.ours, answer + b"\n")
    code, shown = asked.read_to_the_end()
    assert code == 0, shown
    found = settings.resolve([settings.read_toml(line.cwd / "cloudddp.toml")]).cluster
    assert (found.nodes, found.instance_type, found.max_cost) == (4, "g5.xlarge", 30)


def test_no_existing_file_is_replaced(line: CommandLine) -> None:
    name = "train.py"
    line.write(name, "mine")
    assert f"{name} already exists; nothing was written" in line.fails(2, "init", "--example")
    assert files(line.cwd) == {name}


def test_requirements_of_the_trainer_are_those_of_the_extra() -> None:
    extra = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]["train"]
    listed = (ROOT / "examples" / "trainer" / "requirements.txt").read_text().splitlines()
    assert sorted(listed) == sorted(extra)


@pytest.mark.torch
@pytest.mark.parametrize(("example", "test"), [("exact", "learns"), ("trainer", "two_ranks")])
def test_copy_of_an_example_trains_and_passes_its_tests(line: CommandLine, example: str, test: str) -> None:
    """One of them: each imports torch in several new processes. tests/examples has their properties."""
    pytest.importorskip("sklearn")
    line("init", "--example", example, "new")
    program = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", test]
    done = subprocess.run(
        program, cwd=line.cwd / "new", env=clean_environment(), capture_output=True, text=True
    )
    assert done.returncode == 0 and "1 passed" in done.stdout, done.stdout + done.stderr


@pytest.mark.parametrize("example", EXAMPLES)
def test_links_between_the_pages_of_an_example_resolve_in_a_copy(example: str) -> None:
    copied = payload_example(example)
    pages = {name: path for name, path in copied.items() if name.endswith(".md")}
    assert pages
    for name, path in pages.items():
        for link in re.findall(r"\]\((?!https?:|#)([^)#]+)", path.read_text(encoding="utf-8")):
            assert os.path.normpath(f"{Path(name).parent}/{link}") in copied, f"{name}: {link}"
