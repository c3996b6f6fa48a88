"""`pull` from a node that a rank controls: only what was requested is written.

The command runs in its own process. test_pull_streams.py has the streams that take no memory.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from support import streams
from support.streams import FINISH, TRUNCATED, Corpus, file, listed, stream, tree
from support.victim import Victim

from cloudddp.agent.protocol import file_steps

pytestmark = pytest.mark.xdist_group("victim")

MEMORY = 200 << 20


@pytest.mark.parametrize("attack", (*streams.LARGE, "dot-dot", "no-end"))
def test_pull_of_a_hostile_stream_names_the_node_and_exits_1(victim: Victim, attack: str) -> None:
    victim.answers("pack", Corpus(victim.laptop / "elsewhere", "../../../elsewhere").attacks()[attack])
    before = tree(victim.laptop)
    done = victim("pull", "runs")
    assert done.code == 1, done.err
    assert "node 0" in done.err
    assert "bug" not in done.err
    if attack in TRUNCATED:
        assert "what had arrived is kept" in done.err
        shutil.rmtree(victim.cli.cwd / "results")
    assert tree(victim.laptop) == before
    assert done.out == ""
    assert done.memory < MEMORY


def test_node_that_chooses_the_names_replaces_no_files_of_the_project_or_the_home(
    victim: Victim, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without paths and without configured outputs, every name counts as requested."""
    monkeypatch.setitem(victim.cli.env, "HOME", str(tmp_path))
    victim.answers("pack", stream(file("train.py"), file(".bashrc"), FINISH))
    before = tree(victim.laptop)
    for to in (".", str(tmp_path)):
        done = victim("pull", "--to", to)
        assert done.code == 2, done.err
        assert "the nodes choose" in done.err
    assert tree(victim.laptop) == before
    assert [*tmp_path.iterdir()] == []


def test_names_and_notes_are_escaped(victim: Victim, tmp_path: Path) -> None:
    evil = "runs/\x1b]0;owned\x07\u202egpj.\n.exe"
    notes = r"printf 'missing \033]52;c;x\007\n' >&2"
    out_of = file_steps.left_out("\x1b[2Ka\x9b1m\r", "\x07", counts=False)
    victim.answers(
        "pack",
        stream(
            file(evil),
            file("runs/\udcff"),
            file("runs/cloudddp.toml\u202e\x1b[2J"),
            listed("runs/\x1b/cloudddp.toml"),
            out_of,
            FINISH,
        ),
        notes,
    )
    done = victim("pull", "--to", str(tmp_path / "to"))
    assert done.code == 1, done.err
    assert not {"\x1b", "\x07", "\x9b", "\u202e", "\r"} & set(done.out + done.err)
    assert "left out \\x1b[2Ka" in done.err
    assert "left out runs/\\x1b/cloudddp.toml" in done.err
    assert (tmp_path / "to" / evil).exists()
    assert (tmp_path / "to" / "runs" / "\udcff").exists()


def test_number_of_warnings_is_limited(victim: Victim, tmp_path: Path) -> None:
    """Of lines, and of a line without end."""
    flood = "yes 'missing x' | head -c 120000000 >&2; head -c 120000000 /dev/zero | tr '\\0' x >&2"
    victim.answers("pack", stream(file("runs/a"), FINISH), flood)
    done = victim("pull", "--to", str(tmp_path / "to"))
    assert done.code == 0, done.err
    assert len(done.out + done.err) < 100_000
    assert done.memory < MEMORY


def test_state_folder_is_never_written(victim: Victim, tmp_path: Path) -> None:
    home = Path(victim.cli.env["CLOUDDDP_HOME"])
    victim.answers("pack", stream(file("runs/a"), FINISH))
    before = (home / "sim" / "sim.json").read_bytes()
    done = victim("pull", "--to", str(home / "new"))
    assert done.code == 2, done.err
    assert "CLOUDDDP_HOME" in done.err
    victim.answers("pack", stream(file(f"{home.name}/sim/sim.json"), file(f"{home.name}/planted"), FINISH))
    done = victim("pull", "--to", str(home.parent), home.name)
    assert "left out" in done.err, done.err
    assert (home / "sim" / "sim.json").read_bytes() == before
    assert not (home / "planted").exists()
