"""`pull` from a node that a rank controls: only what was requested is written.

The node is the simulator's, and the command runs in its own process. The attack replaces the node's
`python3`, as any program of the login user can, by one that replies to `pack` with a stream of the corpus.
test_pull_streams.py has the streams that take no memory.
"""

from __future__ import annotations

import json
import shlex
import shutil
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from support import streams
from support.harness import CommandLine, clean_environment
from support.streams import (
    FINISH,
    TRUNCATED,
    Corpus,
    file,
    listed,
    stream,
    tree,
)

from cloudddp.agent.protocol import files

MEMORY = 200 << 20
SHIM = """#!/bin/sh
case " $* " in
*" pack "*) exec {python} -I {program} {stream} ;;
esac
exec {python} "$@"
"""
SEND = """
import os, shutil, sys
with open(sys.argv[1], "rb") as stream:
    shutil.copyfileobj(stream, sys.stdout.buffer, 1 << 20)
"""


@dataclass
class CompromisedNode:
    """A node on which an attacker controls the replies to `pack`, and the command line of the cluster's
    owner."""

    cli: CommandLine
    bin: Path
    scratch: Path
    outside: Path

    def set_stream(self, pieces: Iterable[bytes], program: str = SEND) -> None:
        sent = self.scratch / "stream"
        with sent.open("wb") as out:
            for piece in pieces:
                out.write(piece)
        (self.scratch / "program.py").write_text(program)
        words = {"python": sys.executable, "program": self.scratch / "program.py", "stream": sent}
        shim = self.bin / "python3"
        shim.unlink(missing_ok=True)
        shim.write_text(SHIM.format(**{key: shlex.quote(str(word)) for key, word in words.items()}))
        shim.chmod(0o755)

    def pull(self, *words: str) -> tuple[int, str, str, int]:
        """Run `cloudddp pull`; return exit code, stdout, stderr and the most memory that it took, in
        bytes."""
        done = self.cli.to_files(self.scratch, "pull", *words)
        assert done.returncode is not None
        assert done.peak_memory is not None
        out, err = ((self.scratch / name).read_text() for name in ("out.txt", "err.txt"))
        return done.returncode, out, err, done.peak_memory


@pytest.fixture(scope="module")
def node(simulator: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[CompromisedNode]:
    from cloudddp.sim import control

    place = tmp_path_factory.mktemp("laptop")
    project, outside = place / "project", place / "elsewhere"
    for path in (project, outside):
        path.mkdir(parents=True)
    (outside / "bait").write_text("unharmed\n")
    env = clean_environment(
        CLOUDDDP_HOME=str(simulator.home),
        CLOUDDDP_CLUSTER="captured",
        CLOUDDDP_YES="1",
        CLOUDDDP_RENDEZVOUS="direct",
        CLOUDDDP_NPROC_PER_NODE="1",
        **control.environment(simulator),
    )
    cli = CommandLine(project, "captured", env)
    try:
        cli.write("train.py", "")
        cli.ok("up", "-n", "1")
        cli.ok("launch", "train.py")
        (project / ".git" / "hooks").mkdir(parents=True)
        (instance,) = json.loads(cli.ok("status", "--json"))[0]["nodes"]
        (found,) = [n for n in control.nodes(simulator) if n["instance_id"] == instance["instance_id"]]
        yield CompromisedNode(
            cli, Path(found["home"]).parent / "bin", tmp_path_factory.mktemp("attacker"), outside
        )
    finally:
        cli.end()
        cli("down", "-y")


@pytest.mark.parametrize("attack", (*streams.LARGE, "dot-dot", "no-end"))
def test_pull_of_a_hostile_stream_names_the_node_and_exits_1(node: CompromisedNode, attack: str) -> None:
    node.set_stream(Corpus(node.outside, "../../../elsewhere").attacks()[attack])
    before = tree(node.outside.parent)
    code, out, err, memory = node.pull("runs")
    assert code == 1, (out, err)
    assert "node 0" in err
    assert "bug" not in err
    if attack in TRUNCATED:
        assert "what had arrived is kept" in err
        shutil.rmtree(node.cli.cwd / "results")
    assert tree(node.outside.parent) == before
    assert out == ""
    assert memory < MEMORY


def test_node_that_chooses_the_names_replaces_no_files_of_the_project_or_the_home(
    node: CompromisedNode, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without paths and without configured outputs, every name counts as requested."""
    monkeypatch.setitem(node.cli.env, "HOME", str(tmp_path))
    node.set_stream(stream(file("train.py"), file(".bashrc"), FINISH))
    before = tree(node.outside.parent)
    for to in (".", str(tmp_path)):
        code, _, err, _ = node.pull("--to", to)
        assert code == 2, err
        assert "the nodes choose" in err
    assert tree(node.outside.parent) == before
    assert [*tmp_path.iterdir()] == []


def test_names_and_notes_are_escaped(node: CompromisedNode, tmp_path: Path) -> None:
    evil = "runs/\x1b]0;owned\x07\u202egpj.\n.exe"
    notes = "import sys\nsys.stderr.write('missing \\x1b]52;c;x\\x07\\n')\n"
    out_of = files.left_out("\x1b[2Ka\x9b1m\r", "\x07", counts=False)
    node.set_stream(
        stream(
            file(evil),
            file("runs/\udcff"),
            file("runs/cloudddp.toml\u202e\x1b[2J"),
            listed("runs/\x1b/cloudddp.toml"),
            out_of,
            FINISH,
        ),
        notes + SEND,
    )
    code, out, err, _ = node.pull("--to", str(tmp_path / "to"))
    assert code == 1, err
    assert not {"\x1b", "\x07", "\x9b", "\u202e", "\r"} & set(out + err)
    assert "left out \\x1b[2Ka" in err
    assert "left out runs/\\x1b/cloudddp.toml" in err
    assert (tmp_path / "to" / evil).exists()
    assert (tmp_path / "to" / "runs" / "\udcff").exists()


def test_number_of_warnings_is_limited(node: CompromisedNode, tmp_path: Path) -> None:
    """Of lines, and of a line without end."""
    flood = "import sys\nfor text in ('missing x\\n', 'x'):\n    for _ in range(200): "
    node.set_stream(
        stream(file("runs/a"), FINISH), f"{flood}sys.stderr.write(text * ((1 << 20) // len(text)))\n{SEND}"
    )
    code, out, err, memory = node.pull("--to", str(tmp_path / "to"))
    assert code == 0, err
    assert len(out + err) < 100_000
    assert memory < MEMORY


def test_many_left_out_members_are_counted(node: CompromisedNode, tmp_path: Path) -> None:
    node.set_stream(stream(file("runs/a"), *(listed(f"runs/.cloudddp-{k}") for k in range(5000)), FINISH))
    code, _, err, _ = node.pull("--to", str(tmp_path / "to"))
    assert code == 1, err
    assert len(err.splitlines()) < 200
    assert "and 4950 more" in err


def test_state_folder_is_never_written(node: CompromisedNode, tmp_path: Path) -> None:
    home = Path(node.cli.env["CLOUDDDP_HOME"])
    node.set_stream(stream(file("runs/a"), FINISH))
    before = (home / "sim" / "sim.json").read_bytes()
    code, _, err, _ = node.pull("--to", str(home / "new"))
    assert code == 2, err
    assert "CLOUDDDP_HOME" in err
    node.set_stream(stream(file(f"{home.name}/sim/sim.json"), file(f"{home.name}/planted"), FINISH))
    code, _, err, _ = node.pull("--to", str(home.parent), home.name)
    assert "left out" in err, (code, err)
    assert (home / "sim" / "sim.json").read_bytes() == before
    assert not (home / "planted").exists()


def test_repository_folder_is_refused_as_target(node: CompromisedNode, tmp_path: Path) -> None:
    node.set_stream(stream(file("runs/a"), FINISH))
    (tmp_path / ".git" / "hooks").mkdir(parents=True)
    code, _, err, _ = node.pull("--to", str(tmp_path / ".git" / "hooks"))
    assert code == 2, err
    assert not any((tmp_path / ".git" / "hooks").iterdir())
