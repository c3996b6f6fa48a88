"""`sync` over a link that is lossy or slow, and what a job runs after a transfer that was interrupted."""

from __future__ import annotations

import contextlib
import hashlib
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.harness import CommandLine, interrupt, wait_for
from support.jobs import homes

from cloudddp.cluster.connect import PROJECT
from cloudddp.simulator import control

# Prints what it finds when it begins, so that a file that changes later does not count.
LIST = (
    "import hashlib, os, pathlib\n"
    "names = sorted(p for p in pathlib.Path().rglob('*') if p.is_file() and 'runs' not in p.parts)\n"
    "for p in names: print('file', hashlib.sha256(p.read_bytes()).hexdigest(), p, flush=True)\n"
)
CONFIGURATION = '[job]\nrendezvous = "direct"\nnproc_per_node = 1\n'


@pytest.fixture
def cli(lab: control.Simulator, lab_cli: CommandLine, tmp_path: Path) -> Iterator[CommandLine]:
    """The command line of a user with an empty home; afterwards the link is as it was."""
    home = tmp_path / "user"
    home.mkdir()
    lab_cli.env.update(HOME=str(home))
    lab_cli.env.pop("SSH_AUTH_SOCK", None)
    lab_cli.write("cloudddp.toml", CONFIGURATION)
    lab_cli.write("list.py", LIST)
    yield lab_cli
    control.conditions(lab, {"link": None})


def put_files(cli: CommandLine, *, small: int = 200, large: int = 4_000_000) -> None:
    for number in range(small):
        path = cli.cwd / f"package{number % 7}" / f"module{number}.py"
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(os.urandom(3000))
    (cli.cwd / "weights.bin").write_bytes(os.urandom(large))


def files_here(cli: CommandLine) -> set[str]:
    return {
        f"file {hashlib.sha256(path.read_bytes()).hexdigest()} {path.relative_to(cli.cwd)}"
        for path in cli.cwd.rglob("*")
        if path.is_file()
    }


def files_of_ranks(printed: str) -> list[set[str]]:
    """Return the files that each of two ranks has found."""
    lines = [line.partition("file ") for line in printed.splitlines() if "file " in line]
    ranks = {line[0] for line in lines}
    return [{f"file {line[2]}" for line in lines if line[0] == rank} for rank in sorted(ranks)]


def test_link_that_loses_packets(cli: CommandLine, lab: control.Simulator) -> None:
    cli.nodes(2)
    put_files(cli)
    control.conditions(lab, {"link": {"loss": 5, "latency": 0.01}})
    assert "warning" not in cli.messages("sync")
    control.conditions(lab, {"link": None})
    assert files_of_ranks(cli.ok("launch", "list.py")) == [files_here(cli)] * 2


def test_transfers_that_were_killed_or_interrupted_are_completed(
    cli: CommandLine, lab: control.Simulator
) -> None:
    cli.nodes(2)
    put_files(cli)
    cli.ok("sync")
    put_files(cli, large=12_000_000)
    control.conditions(lab, {"link": {"mbit": 20}})
    process = cli.start("launch", "list.py", cold=True)
    wait_for(lambda: has_begun(cli), "a part of the file is on a node")
    process.send_signal(signal.SIGKILL)
    process.wait()
    control.conditions(lab, {"link": None})
    assert cli.ok("jobs", "--json").strip() == "[]"
    assert files_of_ranks(cli.ok("launch", "list.py")) == [files_here(cli)] * 2
    assert not has_begun(cli)

    put_files(cli, small=0, large=13_000_000)
    control.conditions(lab, {"link": {"mbit": 20}})
    process = cli.start("sync")
    wait_for(lambda: has_begun(cli), "a part of the file is on a node")
    code, _, err = interrupt(process)
    assert code == 130, err
    assert "files that have arrived are kept; repeat the command to send the others" in err
    control.conditions(lab, {"link": None})
    assert "sending 1 file, 12.4 MiB, to 2 nodes" in cli.messages("sync")
    assert files_of_ranks(cli.ok("launch", "list.py")) == [files_here(cli)] * 2


def has_begun(cli: CommandLine) -> bool:
    """Whether a part of a file of the project is on a node: this computer sends to one of them first."""
    parts = (part for home in homes(cli) for part in (home / ".cloudddp").glob(f"begun-{PROJECT}/*"))
    with contextlib.suppress(FileNotFoundError):  # it is complete by now
        return any(part.stat().st_size > 100_000 for part in parts)
    return False
