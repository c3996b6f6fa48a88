"""Streams of a node that a rank controls, received in this process: only what was requested is written."""

from __future__ import annotations

import itertools
import os
import shutil
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest
from support import streams
from support.localsync import LocalRunner
from support.streams import FINISH, NOON_NS, TRUNCATED, Corpus, end, file, listed, missing, part, stream, tree

from cloudddp.agent.protocol import transfer
from cloudddp.errors import CloudDDPError, NodeError, UsageError
from cloudddp.job.results import pull, receive
from cloudddp.job.results.pull import Pulled
from cloudddp.job.results.receive import Transfer
from cloudddp.job.results.unpack import FOLDER
from cloudddp.ssh.running import CommandSpec, Result


class StreamRunner(LocalRunner):
    """A node whose `pack` sends these pieces, over a connection that this process plays."""

    def __init__(self, stdout: Iterable[bytes], stderr: Iterable[bytes] = ()) -> None:
        super().__init__({})
        self._stdout, self._stderr = stdout, stderr

    def run(self, _node: int, spec: CommandSpec) -> Result:
        assert spec.on_stdout is not None
        assert spec.on_stderr is not None
        for piece in self._stdout:
            spec.on_stdout(piece)
        for piece in self._stderr:
            spec.on_stderr(piece)
        return Result(0, b"", b"")

    def host_key(self, _node: int) -> str:
        return "ssh-ed25519 AAAA"


@pytest.fixture
def laptop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a project, and with another one, into which nothing may be written."""
    monkeypatch.setenv("CLOUDDDP_HOME", str(tmp_path / "state"))
    place = tmp_path / "laptop"
    (place / "project" / ".git" / "hooks").mkdir(parents=True)
    (place / "elsewhere").mkdir()
    (place / "elsewhere" / "bait").write_text("unharmed\n")
    return place


ATTACKS = sorted({*Corpus(Path("/elsewhere"), "../../../elsewhere").attacks()} - {*streams.LARGE})


@pytest.mark.parametrize("attack", ATTACKS)
def test_hostile_stream_writes_nothing(laptop: Path, attack: str) -> None:
    runner = StreamRunner(Corpus(laptop / "elsewhere", "../../../elsewhere").attacks()[attack])
    to, before = laptop / "project" / "results" / "job", tree(laptop)
    with pytest.raises(NodeError, match="node 0") as refused:
        pull.Pull(runner, ["runs"], node=0, to=to).run()
    assert refused.value.hint
    if attack in (*TRUNCATED, "empty"):
        (kept,) = to.iterdir()
        assert "kept" in str(refused.value)
        assert kept.name.startswith(".cloudddp-incoming-")
        shutil.rmtree(to.parent)
    assert tree(laptop) == before


@pytest.mark.parametrize("attack", ["not-requested", "not-requested-git-hook", "link-out", "dot-dot-first"])
def test_hostile_stream_writes_nothing_into_the_project(laptop: Path, attack: str) -> None:
    runner, before = (
        StreamRunner(Corpus(laptop / "elsewhere", "../elsewhere").attacks()[attack]),
        tree(laptop),
    )
    with pytest.raises(NodeError, match="node 0"):
        pull.Pull(runner, ["runs"], node=0, to=laptop / "project").run()
    assert tree(laptop) == before


def test_repository_folder_is_refused_as_target(laptop: Path) -> None:
    with pytest.raises(UsageError, match="git's or cloudddp's own folder"):
        pull.Pull(StreamRunner([]), ["runs"], node=0, to=laptop / "project" / ".git" / "hooks").run()


def pulled(to: Path, *items: streams.Item) -> Pulled:
    """Pull these files without errors."""
    return pull.Pull(StreamRunner(stream(*items, FINISH)), ["."], node=0, to=to).run()


def test_files_of_git_and_cloudddp_are_left_out_with_a_warning(laptop: Path) -> None:
    to = laptop / "to"
    found = pulled(to, *(listed(name, size=1) for name in streams.GUARDED), *map(file, streams.WELCOME))
    assert {str(p.relative_to(to)) for p in to.rglob("*") if p.is_file()} == set(streams.WELCOME)
    assert len([note for note in found.notes if "left out" in note]) == len(streams.GUARDED)


def test_notes_about_files_that_are_left_out_are_limited(laptop: Path) -> None:
    left_out = (listed(f"runs/.cloudddp-{number}") for number in range(5000))
    notes = pulled(laptop / "to", file("runs/a"), *left_out).notes
    assert (len(notes) < 200, notes[-1]) == (True, "and 4950 more")


@pytest.mark.parametrize("case", sorted(streams.COLLISIONS))
def test_first_of_two_members_with_one_path_is_kept(laptop: Path, case: str) -> None:
    found = pulled(laptop / "to", *streams.COLLISIONS[case])
    assert any("left out runs/a" in note for note in found.notes)
    contents = [path.read_bytes() for path in (laptop / "to").rglob("*") if path.is_file()]
    assert b"second" not in contents


def test_modes_and_times_are_restricted(laptop: Path) -> None:
    pulled(
        laptop / "to",
        file("runs/set-user-id", mode=0o6777),
        file("runs/unreadable", mode=0),
        file("runs/unreadable-and-large", bytes(2 << 20), mode=0),
        file("runs/late", mtime_ns=(1 << 60) - 1),
        file("runs/early", mtime_ns=-(1 << 60)),
        listed("runs/closed", kind=FOLDER, mode=0),
        file("runs/closed/x"),
    )
    modes = {path.name: path.stat().st_mode & 0o7777 for path in (laptop / "to" / "runs").iterdir()}
    assert modes["set-user-id"] & 0o7022 == 0
    assert modes["unreadable"] == modes["unreadable-and-large"] == 0o600
    assert modes["closed"] == 0o700


def test_link_in_the_target_is_not_followed(laptop: Path) -> None:
    """A link to a file is replaced, and a link to a folder is an error; nothing is written to their
    targets."""
    to, away = laptop / "to", laptop / "away"
    for folder in (to / "runs", away):
        folder.mkdir(parents=True)
    (away / "kept").write_text("kept")
    (to / "runs" / "a").symlink_to(away / "kept")
    pulled(to, file("runs/a", b"new"))
    assert (to / "runs" / "a").read_text() == "new"
    assert not (to / "runs" / "a").is_symlink()
    (to / "runs" / "sub").symlink_to(away)
    with pytest.raises(CloudDDPError, match="link"):
        pulled(to, streams.folder("runs/sub"), file("runs/sub/b"))
    assert (away / "kept").read_text() == "kept"
    assert [path.name for path in away.iterdir()] == ["kept"]
    assert [path.name for path in to.iterdir()] == ["runs"]


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
def test_false_claim_about_a_file_of_this_computer_changes_nothing(laptop: Path, claim: str) -> None:
    runs = laptop / "runs"
    runs.mkdir(parents=True)
    for name, mtime_ns in (("hashed", NOON_NS // 10**9 * 10**9), ("timed", NOON_NS)):
        (runs / name).write_bytes(KNOWN)
        os.utime(runs / name, ns=(mtime_ns, mtime_ns))
    before = tree(laptop)
    runner = StreamRunner(stream(file("runs/good"), *CLAIMS[claim], FINISH))
    with pytest.raises(NodeError, match="node 0 sent results that cloudddp refuses"):
        pull.Pull(runner, ["runs"], node=0, to=laptop).run()
    assert tree(laptop) == before


def test_file_that_the_node_gives_up_is_not_written(laptop: Path) -> None:
    given_up = (listed("runs/large", size=8 << 20), listed("runs/small", size=5), part(0, 0, bytes(1 << 20)))
    runner = StreamRunner(stream(*given_up, missing(0), missing(1), file("runs/b"), FINISH))
    assert pull.Pull(runner, ["runs"], node=0, to=laptop / "to").run().files == 1
    assert [path.name for path in (laptop / "to").rglob("*")] == ["runs", "b"]


def drip(*pieces: bytes) -> Iterator[bytes]:
    """Yield the pieces again and again."""
    for piece in itertools.cycle(pieces):
        time.sleep(0.02)
        yield piece


BEGUN = [*stream(file("runs/a"), listed("runs/b", size=1 << 20))]
DRIPS = {
    "waits": [transfer.frame(transfer.UNSEALED, transfer.ALIVE)],
}


@pytest.mark.parametrize("name", [*DRIPS, "notes", "notes after the end"])
def test_results_without_progress_end(laptop: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setattr(pull, "STALLED", 0.5)
    whole, notes = [*stream(file("runs/a"), FINISH)], drip(b"missing x\n")
    runner = StreamRunner(BEGUN if name == "notes" else whole, notes)
    if name in DRIPS:
        runner = StreamRunner(itertools.chain(BEGUN, drip(*DRIPS[name])))
    heard: list[Transfer] = []
    with pytest.raises(NodeError, match="node 0: it made no progress while it sent results"):
        pull.Pull(runner, ["runs"], node=0, to=laptop / "to", progress=heard.append).run()
    assert len(heard) > (1 if "notes" in name else 10)  # all the time, so it is not silent


def test_number_of_files_is_limited(laptop: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(receive, "MAX_ENTRIES", 100)
    runner = StreamRunner(stream(*(file(f"runs/{k}", b"") for k in range(101)), FINISH))
    with pytest.raises(NodeError, match="more than 100 files"):
        pull.Pull(runner, ["runs"], node=0, to=laptop / "to").run()
    assert not (laptop / "to").exists()
