"""A cluster whose node a rank has taken control of: it replies to each step what a test wants.

A rank runs as the login user, so it can put a `python3` earlier on PATH.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from support import serving_impostor
from support.harness import CommandLine, clean_environment
from support.programs import program

# For a step with a file of its name in `evil`, runs that shell script; every other step goes to the agent.
PYTHON3 = """#!/bin/bash
here="$(dirname "$0")/evil"
verb="$5"
[ "$verb" = serve ] && exec {python} -I {serving} "$here" "$@"
[ -f "$here/$verb" ] && exec bash "$here/$verb" "$@"
exec {python} "$@"
"""


@dataclass(frozen=True)
class Done:
    """A command that has ended. What it wrote is in files, since it may be large."""

    code: int
    folder: Path
    memory: int  # bytes at most

    @property
    def out(self) -> str:
        return (self.folder / "out.txt").read_text()

    @property
    def err(self) -> str:
        return (self.folder / "err.txt").read_text()

    def count(self, byte: bytes) -> int:
        with (self.folder / "out.txt").open("rb") as file:
            return sum(piece.count(byte) for piece in iter(lambda: file.read(1 << 20), b""))


@dataclass(frozen=True)
class Victim:
    """A cluster of one node that a rank has taken control of."""

    cli: CommandLine
    evil: Path
    home: Path  # of the node's login user
    outputs: Path

    @property
    def laptop(self) -> Path:
        """The folder with the project and the folder `elsewhere`, into which nothing may be written."""
        return self.cli.cwd.parent

    def answers(self, step: str, text: str | Iterable[bytes], before: str = "") -> None:
        """Make the node reply to a step with this text, after a shell command."""
        data = self.evil / f"{step}.data"
        with data.open("wb") as file:
            file.writelines([text.encode()] if isinstance(text, str) else text)
        self.runs(step, f"cat > /dev/null < /dev/stdin & {before}\nexec cat '{data}'")

    def runs(self, step: str, script: str) -> None:
        self.evil.mkdir(exist_ok=True)
        (self.evil / step).write_text(script)

    def __call__(self, *words: str) -> Done:
        """Run `cloudddp` to its end, and measure the most memory that it took."""
        folder = self.outputs / f"{next(COUNT)}"
        folder.mkdir()
        process = self.cli.to_files(folder, *words)
        assert process.returncode is not None
        assert process.peak_memory is not None
        return Done(process.returncode, folder, process.peak_memory)


COUNT = itertools.count()


@contextlib.contextmanager
def owned(simulator: Any, tmp: Path) -> Iterator[Victim]:
    """Yield a cluster of one node that has run a job, and whose agent was then replaced."""
    from cloudddp.simulator import control

    folder, elsewhere, outputs = (tmp / "laptop" / "project", tmp / "laptop" / "elsewhere", tmp / "outputs")
    for path in (folder, elsewhere, outputs):
        path.mkdir(parents=True)
    (elsewhere / "bait").write_text("unharmed\n")
    cluster = f"evil-{os.getpid()}"
    env = clean_environment(
        CLOUDDDP_HOME=str(simulator.home),
        CLOUDDDP_CLUSTER=cluster,
        CLOUDDDP_YES="1",
        CLOUDDDP_RENDEZVOUS="direct",
        CLOUDDDP_NPROC_PER_NODE="1",
        CLOUDDDP_STOP_GRACE="1",
        **control.environment(simulator),
    )
    cli = CommandLine(folder, cluster, env)
    cli.write("done.py", "print('done')")
    cli.ok("up", "-n", "1", "-t", "m5.xlarge", "--allow-cpu", "--price", "0.2")  # any number of ranks
    cli.ok("launch", "done.py")
    (found,) = json.loads(cli.ok("status", "--json"))
    node = Path(simulator.home) / "sim" / "nodes" / found["nodes"][0]["instance_id"]
    (node / "bin" / "python3").unlink(missing_ok=True)
    text = PYTHON3.format(python=sys.executable, serving=serving_impostor.__file__)
    program(node / "bin" / "python3", text)
    try:
        yield Victim(cli, node / "bin" / "evil", node / "home", outputs)
    finally:
        cli.end()
        cli("down", "-y")
