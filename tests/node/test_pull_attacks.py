"""`pull` from a node that a rank controls: only what was requested is written.

The node is the simulator's, and the command runs in its own process. The attack replaces the node's
`python3`, as any program of the login user can, by one that replies to `pack` with a stream of the corpus.
"""

from __future__ import annotations

import json
import os
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
    NOON_NS,
    TRUNCATED,
    Corpus,
    end,
    file,
    folder,
    link,
    listed,
    missing,
    part,
    stream,
    tree,
)

from cloudddp.agent.client import Runner
from cloudddp.agent.protocol import file_steps
from cloudddp.cli import session
from cloudddp.cli.console import Console
from cloudddp.cli.node_connections import connected
from cloudddp.config.command_line import GlobalOptions
from cloudddp.errors import NodeError
from cloudddp.job.results import pull, receive
from cloudddp.job.results.receive import Transfer
from cloudddp.job.results.unpack import FOLDER

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


def corpus(node: CompromisedNode) -> Corpus:
    return Corpus(node.outside, "../../../elsewhere")


@pytest.fixture(scope="module")
def runner(node: CompromisedNode) -> Iterator[Runner]:
    """An open connection to that node: a process for each stream of the corpus would take minutes."""
    with pytest.MonkeyPatch.context() as patch:
        for name in set(os.environ) - set(node.cli.env):
            patch.delenv(name)
        for name, value in node.cli.env.items():
            patch.setenv(name, value)
        patch.chdir(node.cli.cwd)
        with connected(session.start(Console(), GlobalOptions())) as (_, found):
            yield found


ATTACKS = sorted(Corpus(Path("/elsewhere"), "../../../elsewhere").attacks())
AT_THE_COMMAND_LINE = [
    attack
    for attack in ATTACKS
    if "4-GiB" in attack
    or attack
    in (
        "dot-dot",
        "absolute",
        "not-requested",
        "link-out",
        "link-chain-CVE-2025-4517",
        "no-end",
        "kind-unknown",
        "file-of-an-exbibyte",
        "zeros-without-end",
        "noise",
        "listing-that-inflates",
        "listing-of-many-objects",
        "longer-than-announced",
        "offset-of-a-file-that-is-not-here",
    )
]


@pytest.mark.parametrize("attack", [attack for attack in ATTACKS if attack not in AT_THE_COMMAND_LINE])
def test_hostile_stream_writes_nothing(node: CompromisedNode, runner: Runner, attack: str) -> None:
    node.set_stream(corpus(node).attacks()[attack])
    before = tree(node.outside.parent)
    with pytest.raises(NodeError, match="node 0") as refused:
        pull.pull(runner, ["runs"], node=0, to=node.cli.cwd / "results" / "job")
    assert refused.value.hint
    if attack in (*TRUNCATED, "empty"):
        (kept,) = (node.cli.cwd / "results" / "job").iterdir()
        assert "kept" in str(refused.value)
        assert kept.name.startswith(".cloudddp-incoming-")
        shutil.rmtree(node.cli.cwd / "results")
    assert tree(node.outside.parent) == before


@pytest.mark.parametrize("attack", AT_THE_COMMAND_LINE)
def test_pull_of_a_hostile_stream_names_the_node_and_exits_1(node: CompromisedNode, attack: str) -> None:
    node.set_stream(corpus(node).attacks()[attack])
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


@pytest.mark.parametrize("attack", ["not-requested", "not-requested-git-hook", "link-out", "dot-dot-first"])
def test_hostile_stream_writes_nothing_into_the_project(node: CompromisedNode, attack: str) -> None:
    node.set_stream(Corpus(node.outside, "../elsewhere").attacks()[attack])
    before = tree(node.outside.parent)
    code, _, err, _ = node.pull("--to", ".", "runs")
    assert code == 1
    assert "node 0" in err
    assert tree(node.outside.parent) == before


def test_node_that_chooses_the_names_replaces_no_files_of_the_project_or_the_home(
    node: CompromisedNode, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without paths and without configured outputs, every name counts as requested."""
    monkeypatch.setitem(node.cli.env, "HOME", str(tmp_path))
    node.set_stream(stream(file("train.py"), file(".bashrc"), FINISH))
    before = tree(node.outside.parent)
    for to in (".", "..", str(tmp_path)):
        code, _, err, _ = node.pull("--to", to)
        assert code == 2, err
        assert "the nodes choose" in err
    assert tree(node.outside.parent) == before
    assert [*tmp_path.iterdir()] == []


def test_files_of_git_and_cloudddp_are_left_out_with_a_warning(node: CompromisedNode, tmp_path: Path) -> None:
    node.set_stream(
        stream(*(listed(name, size=1) for name in streams.GUARDED), *map(file, streams.WELCOME), FINISH)
    )
    code, _, err, _ = node.pull("--to", str(tmp_path / "to"))
    assert code == 1, err
    written = {str(p.relative_to(tmp_path / "to")) for p in (tmp_path / "to").rglob("*") if p.is_file()}
    assert written == set(streams.WELCOME)
    assert err.count("left out") == len(streams.GUARDED)


@pytest.mark.parametrize("case", sorted(streams.COLLISIONS))
def test_first_of_two_members_with_one_path_is_kept(node: CompromisedNode, tmp_path: Path, case: str) -> None:
    node.set_stream(stream(*streams.COLLISIONS[case], FINISH))
    code, _, err, _ = node.pull("--to", str(tmp_path / "to"))
    assert code == 1, err
    assert "left out runs/a" in err
    contents = [path.read_bytes() for path in (tmp_path / "to").rglob("*") if path.is_file()]
    assert b"second" not in contents


def test_names_and_notes_are_escaped(node: CompromisedNode, tmp_path: Path) -> None:
    evil = "runs/\x1b]0;owned\x07\u202egpj.\n.exe"
    notes = "import sys\nsys.stderr.write('missing \\x1b]52;c;x\\x07\\n')\n"
    out_of = file_steps.left_out("\x1b[2Ka\x9b1m\r", "\x07", counts=False)
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


@pytest.mark.parametrize("text", ["missing x\\n", "x"], ids=["lines", "one-line"])
def test_number_of_warnings_is_limited(node: CompromisedNode, tmp_path: Path, text: str) -> None:
    flood = f"import sys\nfor _ in range(300): sys.stderr.write('{text}' * ((1 << 20) // len('{text}')))\n"
    node.set_stream(stream(file("runs/a"), FINISH), flood + SEND)
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


def test_modes_and_times_are_restricted(node: CompromisedNode, tmp_path: Path) -> None:
    node.set_stream(
        stream(
            file("runs/set-user-id", mode=0o6777),
            file("runs/unreadable", mode=0),
            file("runs/unreadable-and-large", bytes(2 << 20), mode=0),
            file("runs/late", mtime_ns=(1 << 60) - 1),
            file("runs/early", mtime_ns=-(1 << 60)),
            listed("runs/closed", kind=FOLDER, mode=0),
            file("runs/closed/x"),
            FINISH,
        )
    )
    code, _, err, _ = node.pull("--to", str(tmp_path / "to"))
    assert code == 0, err
    modes = {path.name: path.stat().st_mode & 0o7777 for path in (tmp_path / "to" / "runs").iterdir()}
    assert modes["set-user-id"] & 0o7022 == 0
    assert modes["unreadable"] == modes["unreadable-and-large"] == 0o600
    assert modes["closed"] == 0o700


def test_link_in_the_target_is_not_followed(node: CompromisedNode, tmp_path: Path) -> None:
    """A link to a file is replaced, and a link to a folder is an error; nothing is written to their
    targets."""
    to, away = tmp_path / "to", tmp_path / "away"
    (to / "runs").mkdir(parents=True)
    away.mkdir()
    (away / "kept").write_text("kept")
    (to / "runs" / "a").symlink_to(away / "kept")
    node.set_stream(stream(file("runs/a", b"new"), FINISH))
    code, _, err, _ = node.pull("--to", str(to))
    assert code == 0, err
    assert (to / "runs" / "a").read_text() == "new"
    assert not (to / "runs" / "a").is_symlink()
    assert (away / "kept").read_text() == "kept"
    (to / "runs" / "sub").symlink_to(away)
    node.set_stream(stream(folder("runs/sub"), file("runs/sub/b"), FINISH))
    code, _, err, _ = node.pull("--to", str(to))
    assert code == 1
    assert "link" in err
    assert [path.name for path in away.iterdir()] == ["kept"]
    assert sorted(path.name for path in to.iterdir()) == ["runs"]


def test_state_folder_is_never_written(node: CompromisedNode, tmp_path: Path) -> None:
    home = Path(node.cli.env["CLOUDDDP_HOME"])
    node.set_stream(stream(file("runs/a"), FINISH))
    before = (home / "sim" / "sim.json").read_bytes()
    for inside in (home, home / "clusters", home / "new"):
        code, _, err, _ = node.pull("--to", str(inside))
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


def test_links_inside_the_results_are_kept(node: CompromisedNode, tmp_path: Path) -> None:
    node.set_stream(
        stream(
            folder("runs/a"),
            link("runs/a/up", "../b"),
            link("runs/latest", "a"),
            link("runs/deep", "./latest//up"),
            file("runs/b", b"here"),
            FINISH,
        )
    )
    code, out, err, _ = node.pull("--to", str(tmp_path / "to"))
    assert code == 0, err
    assert "left out" not in err
    assert (tmp_path / "to" / "runs" / "deep").read_bytes() == b"here"
    assert "4 files" in out


def test_path_that_is_not_utf8_is_pulled(node: CompromisedNode, tmp_path: Path) -> None:
    """The path is sent in the request, which is ASCII: not every SSH server accepts arbitrary bytes in a
    command."""
    node.set_stream(stream(file("runs/\udcff"), FINISH))
    code, _, err, _ = node.pull("--to", str(tmp_path / "to"), "runs/\udcff")
    assert code == 0, err
    assert (tmp_path / "to" / "runs" / "\udcff").exists()


KNOWN = b"here before"  # in the target, when these streams arrive
CLAIMS: dict[str, list[streams.Item | bytes]] = {
    "continues-with-a-wrong-hash": [
        listed("runs/hashed", size=len(KNOWN) + 4, mtime_ns=5),
        part(1, len(KNOWN), b"evil"),
        end(1, KNOWN + b"good"),
    ],
    "continues-elsewhere": [listed("runs/hashed", size=99, mtime_ns=5), part(1, 5, bytes(94))],
    "continues-a-file-without-a-hash": [listed("runs/timed", size=99), part(1, len(KNOWN), bytes(88))],
    "is-the-same-twice": [listed("runs/hashed", size=len(KNOWN), mtime_ns=5), end(1, KNOWN), end(1, KNOWN)],
    "is-the-same-with-a-wrong-hash": [
        listed("runs/hashed", size=len(KNOWN), mtime_ns=5),
        end(1, b"other bytes"),
    ],
    "sends-what-was-not-asked-for": [file("runs/timed", b"-" * len(KNOWN))],
}


@pytest.mark.parametrize("claim", CLAIMS)
def test_false_claim_about_a_file_of_this_computer_changes_nothing(
    node: CompromisedNode, runner: Runner, tmp_path: Path, claim: str
) -> None:
    runs = tmp_path / "to" / "runs"
    runs.mkdir(parents=True)
    for name, mtime_ns in (("hashed", NOON_NS // 10**9 * 10**9), ("timed", NOON_NS)):
        (runs / name).write_bytes(KNOWN)
        os.utime(runs / name, ns=(mtime_ns, mtime_ns))
    before = tree(tmp_path)
    node.set_stream(stream(file("runs/good"), *CLAIMS[claim], FINISH))
    with pytest.raises(NodeError, match="node 0 sent results that cloudddp refuses"):
        pull.pull(runner, ["runs"], node=0, to=tmp_path / "to")
    assert tree(tmp_path) == before


def test_file_that_the_node_gives_up_is_not_written(
    node: CompromisedNode, runner: Runner, tmp_path: Path
) -> None:
    node.set_stream(
        stream(
            listed("runs/large", size=8 << 20),
            listed("runs/small", size=5),
            part(0, 0, bytes(1 << 20)),
            missing(0),
            missing(1),
            file("runs/b"),
            FINISH,
        )
    )
    assert pull.pull(runner, ["runs"], node=0, to=tmp_path / "to").files == 1
    assert [path.name for path in (tmp_path / "to").rglob("*")] == ["runs", "b"]


DRIP = """
import itertools, os, sys, time
with open(sys.argv[1], "rb") as stream:
    os.write(1, stream.read())
for number in itertools.count():
    {write}
    time.sleep(0.05)
"""
WAITS = file_steps.working(file_steps.Work(0, 0))
COMPARES = file_steps.working(file_steps.Work(0, 1 << 40))
ONE_BYTE = [part(1, at, b"x") for at in range(1000)]
DRIPS = {
    "waits": f"os.write(1, {WAITS!r})",
    "waits that claim to compare": f"os.write(1, {COMPARES!r})",
    "contents byte by byte": f"os.write(1, {ONE_BYTE!r}[number])",
    "notes": "os.write(2, b'missing x\\n')",
}


@pytest.mark.parametrize("drip", DRIPS)
def test_results_without_progress_end(
    node: CompromisedNode, runner: Runner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, drip: str
) -> None:
    monkeypatch.setattr(pull, "STALLED", 2.0)
    begun = [file("runs/a"), listed("runs/b", size=1 << 20)]
    node.set_stream(stream(*begun), DRIP.format(write=DRIPS[drip]))
    heard: list[Transfer] = []
    with pytest.raises(NodeError, match="node 0: it made no progress while it sent results"):
        pull.pull(runner, ["runs"], node=0, to=tmp_path / "to", progress=heard.append)
    assert len(heard) > 10  # all the time, so it is not silent


def test_notes_after_the_end_of_the_results_do_not_make_it_wait(
    node: CompromisedNode, runner: Runner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pull, "STALLED", 2.0)
    node.set_stream(stream(file("runs/a"), FINISH), DRIP.format(write=DRIPS["notes"]))
    with pytest.raises(NodeError, match="node 0: it made no progress"):
        pull.pull(runner, ["runs"], node=0, to=tmp_path / "to")


def test_number_of_files_is_limited(
    node: CompromisedNode, runner: Runner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(receive, "MAX_ENTRIES", 100)
    node.set_stream(stream(*(file(f"runs/{k}", b"") for k in range(101)), FINISH))
    with pytest.raises(NodeError, match="more than 100 files"):
        pull.pull(runner, ["runs"], node=0, to=tmp_path / "to")
    assert not (tmp_path / "to").exists()
