"""What the user sees on a terminal of 80 x 24, compared with the recordings in tests/golden/screens: `run` of
the example, which is docs/demo.svg, and a job from `up` to `down`, which is docs/screens.md.

After a change that is wanted: UPDATE_GOLDEN=1 python -m pytest tests/cli/test_screens.py
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.harness import ROOT, CommandLine, clean_environment
from support.screens import SPINNER, Recording, steady

from cloudddp.simulator import control
from docs import record

FOLDER = ROOT / "tests/golden/screens"
SCRIPT = """
import os, sys, time
rank, world = os.environ["RANK"], os.environ["WORLD_SIZE"]
print(f"rank {rank} of {world}: begins", flush=True)
time.sleep(1 + int(rank) / 2)
wide = "812 lines of data/validation/\u65e5\u672c\u8a9e/sentences.txt have been read"
print(f"rank {rank}: {wide}, accuracy 0.5117", flush=True)
os.makedirs("out", exist_ok=True)
open("out/model.pt", "w").write("weights")
"""
SETTINGS = """
[cluster]
nodes = 2
max_hours = 2

[job]
rendezvous = "direct"
nproc_per_node = 1

[setup]
run = ["echo unpacking data/validation.zip; sleep 2; echo 812 files"]
"""


# Three threads begin a step at the same time, again and again.
STEPS = """
import sys, threading
from concurrent.futures import ThreadPoolExecutor
from cloudddp.cli.console import Console
sys.setswitchinterval(1e-5)
barrier, console = threading.Barrier(3), Console()
def begin(step):
    barrier.wait()
    progress(f"step {step}")
for number in range(100):
    with console.progress() as progress, ThreadPoolExecutor(3) as threads:
        list(threads.map(begin, (f"{number} of {name}" for name in "abc")))
"""


def test_steps_of_several_threads_have_a_row_each(line: CommandLine) -> None:
    recording = Recording()
    assert recording.run(line, program=("-c", STEPS)) == 0
    steps = [f"step {number} of {name}" for number in range(100) for name in "abc"]
    assert sorted(row for row in recording.rows() if row.startswith("step")) == sorted(steps)
    assert [row for row in recording.rows() if SPINNER.search(row)] == []


def compare(name: str, rows: list[str]) -> None:
    """Compare with the recording; how wide columns are depends on addresses. The picture has its own ids and
    times: its numbers have to fit together."""
    text, path = "\n".join(rows) + "\n", FOLDER / f"{name}.txt"
    if os.environ.get("UPDATE_GOLDEN"):
        path.parent.mkdir(exist_ok=True)
        path.write_text(text if name == record.PICTURE else steady(text))
    assert _words(steady(text)) == _words(steady(path.read_text()))


def _words(text: str) -> list[str]:
    """Return the lines without what a race decides: the order of lines of different ranks and nodes, and
    steps and times that are shown only if they take long enough."""
    text = re.sub(r"\bloss \d+\.\d+", "loss", text)
    lines = [re.sub(r" {2,}", "  ", re.sub(r" +\([\d.]+ s\)$", "", line)) for line in text.splitlines()]
    # "creating the nodes" becomes "nodes running", unless they run before the first look at them.
    brief = ("not yet:", "waiting for", "creating the nodes", "nodes running:")
    kept = [line for line in lines if not any(text in line for text in brief)]
    raced = ("[", "node ")
    return sorted(line for line in kept if line.startswith(raced)) + [
        line for line in kept if not line.startswith(raced)
    ]


@pytest.fixture
def cli(tmp_path: Path, project: Path) -> Iterator[CommandLine]:
    """The command line of an account without other clusters, which `up` would name."""
    home = tmp_path / "home"
    simulator = control.start(home, nodes="process")
    made = CommandLine(
        project,
        "project",
        clean_environment(CLOUDDDP_HOME=str(home), CLOUDDDP_YES="1", **control.environment(simulator)),
    )
    made.env.pop("COLUMNS", None)
    yield made
    made.end()
    control.stop(home)


def test_job_on_a_terminal_from_up_to_down(cli: CommandLine) -> None:
    cli.write("train_image_classifier_from_scratch.py", SCRIPT)
    cli.write("cloudddp.toml", SETTINGS)
    screens: dict[str, list[str]] = {}
    for name, words in {
        "up": ("up",),
        "launch": ("launch", "train_image_classifier_from_scratch.py", "--epochs", "10", "--lr", "0.1"),
        "jobs": ("jobs",),
        "status": ("status",),
        "pull": ("pull",),
        "down": ("down",),
    }.items():
        recording = Recording()
        assert recording.run(cli, "--sim", *words) == 0, recording.rows()
        screens[name] = recording.rows()
        assert recording.broken_words() == []
        assert [row for row in recording.rows() if SPINNER.search(row)] == []
    for name, rows in screens.items():
        compare(name, rows)


def test_training_of_the_example_in_one_command(cli: CommandLine) -> None:
    cli.ok("init", "--example", "handwriting")
    cli.cwd /= "handwriting"
    recording = Recording()
    assert recording.run(cli, *record.COMMAND.split()) == 0, recording.rows()
    assert recording.broken_words() == []
    compare(record.PICTURE, recording.rows())


def test_pictures_are_of_the_recording() -> None:
    assert (ROOT / "docs/screens.md").read_text() == record.page()
    assert Path(ROOT / "docs/demo.svg").read_text() == record.picture()
    assert (FOLDER / f"{record.PICTURE}.txt").read_text().isascii()  # fonts lack others
