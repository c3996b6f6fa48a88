"""Tasks of a first hour, as shell commands of somebody who knows torchrun only: what they need, what they
show, and how many commands there are. To install is in tests/cli/test_packaging.py; the first job, results,
another day and the detached job are in test_pages.py."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
from support.harness import CommandLine, clean_environment, remaining
from support.local_packages import wheel

SCRIPT = """
import os
rank = int(os.environ["RANK"])
print("rank", rank, "of", os.environ["WORLD_SIZE"], flush=True)
"""
READS = SCRIPT + 'print("lines:", len(open("data/train.txt").readlines()), flush=True)\n'
FAILS = SCRIPT + 'if rank == 1:\n    raise ValueError("the third batch is empty")\n'
SECRET = SCRIPT + 'print("key of", len(os.environ["API_KEY"]), "characters")\n'
GREETS = "import greeting\n" + SCRIPT + "print(greeting.TEXT)\n"
RUN = "cloudddp run train.py"


@dataclass
class Task:
    """`commands` end with exit code `code` and print `shows`; `commands[:-1]` with 0, but those in
    `fail`."""

    commands: list[str]
    files: dict[str, str] = field(default_factory=dict)
    code: int = 0
    shows: tuple[str, ...] = ()
    fail: tuple[int, ...] = ()


TASKS = {
    "a project with requirements": Task(
        # Nodes of the simulator reach no package index: the message names the two lines that help.
        ["cloudddp init", RUN, "sed -i 's/^environment.*/&\\nwheels = \"wheels\"/' cloudddp.toml", RUN],
        {"train.py": GREETS, "requirements.txt": "greeting\n"},
        fail=(1,),
        shows=("pip download -d wheels pip -r requirements.txt", 'wheels = "wheels"', "hello from the wheel"),
    ),
    "a data folder": Task(
        ["cloudddp init", RUN],
        {"train.py": READS, ".gitignore": "data/\n", "data/train.txt": "line\n" * 1000},
        shows=("data/: git ignores it and a script names it", "lines: 1000"),
    ),
    "a rank that fails": Task(
        [RUN],
        {"train.py": FAILS},
        code=1,
        shows=("failed: rank 1 on node ", "ValueError: the third batch is empty", "nothing is left"),
    ),
    "a secret": Task(
        ["export API_KEY=0123456789", "cloudddp run -e API_KEY train.py"],
        {"train.py": SECRET},
        shows=("key of 10 characters",),
    ),
}


@pytest.fixture
def reader(lab_cli: CommandLine) -> Iterator[CommandLine]:
    """The command line as a newcomer has it, in a folder whose name is that of the cluster."""
    folder = lab_cli.cwd / lab_cli.cluster
    folder.mkdir()
    lab_cli.cwd = folder
    lab_cli.env = clean_environment(CLOUDDDP_HOME=lab_cli.env["CLOUDDDP_HOME"], CLOUDDDP_SIM="1")
    yield lab_cli
    lab_cli("down", "-y")


@pytest.mark.parametrize("name", TASKS)
def test_task_of_the_first_hour(name: str, reader: CommandLine, ec2: Any) -> None:
    task, folder = TASKS[name], reader.cwd
    for path, text in task.files.items():
        reader.write(path, text)
    if "greeting" in "".join(task.files.values()):
        wheel(folder / "wheels", "greeting", 'TEXT = "hello from the wheel"\n')
    shown, env = "", dict(reader.env)
    for number, command in enumerate(task.commands):
        if command.startswith("export "):
            env.update([command.removeprefix("export ").split("=")])
            continue
        done = subprocess.run(
            ["bash", "-c", command],
            cwd=folder,
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
        shown += done.stdout
        is_last = number == len(task.commands) - 1
        expected = task.code if is_last else 1 if number in task.fail else 0
        assert done.returncode == expected, f"{command}: {shown}"
    for text in task.shows:
        assert text in shown, shown
    assert remaining(ec2, reader.cluster).instances == []
