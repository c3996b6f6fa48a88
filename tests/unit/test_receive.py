"""What the laptop asks a node for, and what it does with it: by what is here already, in the results and of a
transfer that broke."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import pytest
from support.streams import (
    FINISH,
    NOON_NS,
    Item,
    StreamRunner,
    end,
    file,
    listed,
    missing,
    part,
    runs,
    stream,
)

from cloudddp.agent.protocol import transfer
from cloudddp.agent.protocol.sending import Sender, Wanted, as_missing
from cloudddp.agent.protocol.transfer import UNSEALED
from cloudddp.agent.protocol.writing import begun_name
from cloudddp.errors import CloudDDPError, NodeError, UsageError
from cloudddp.files import Folder
from cloudddp.job.results import placing
from cloudddp.job.results.placing import Pulled
from cloudddp.job.results.pull import pull
from cloudddp.job.results.receive import Transfer

WHOLE = NOON_NS // 10**9 * 10**9  # a time that does not identify the contents
LARGE = 3 << 20  # bytes: more than two parts
DATA = b"12345"


@dataclass
class Laptop:
    """A folder of results, and a node whose files are in another one."""

    to: Path
    node: Path
    runner: StreamRunner = field(default_factory=lambda: StreamRunner([]))
    seen: list[tuple[int, int]] = field(default_factory=list)  # total and received, as shown

    def write(self, path: Path, data: bytes, mtime_ns: int = WHOLE) -> Path:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
        os.utime(path, ns=(mtime_ns, mtime_ns))
        return path

    def feed(self, pieces: Iterable[bytes], *, breaks: bool = False) -> Pulled:
        def progress(now: Transfer) -> None:
            self.seen.append((now.total, now.received))

        self.runner = StreamRunner(pieces, breaks=breaks)
        return pull(self.runner, runs(), node=0, to=self.to, progress=progress)

    def receive(self, *pieces: Item | bytes) -> Pulled:
        return self.feed(stream(*pieces, FINISH))

    def broken(self, *pieces: Item | bytes) -> None:
        with pytest.raises(NodeError, match="what had arrived is kept"):
            self.feed(stream(*pieces), breaks=True)

    def pull(self, change: Callable[[int], object] = lambda _: None) -> Pulled:
        """Pull what the node has. `change` is called before each frame of contents, with its number."""
        paths = sorted(str(path.relative_to(self.node)) for path in self.node.rglob("*") if path.is_file())
        infos = [(self.node / path).stat() for path in paths]
        items = [
            listed(path, size=info.st_size, mtime_ns=info.st_mtime_ns)
            for path, info in zip(paths, infos, strict=True)
        ]

        def pieces() -> Iterator[bytes]:
            yield from stream(*items)
            known = self.runner.wants.known
            wanted = [
                Wanted(number, paths[number], known.get(number, transfer.NOTHING))
                for number in self.runner.wants.files
            ]
            sender = Sender(str(self.node), UNSEALED, on_lost=as_missing, tries=1)
            for number, frame in enumerate(sender.frames(wanted)):
                change(number)
                yield frame
            yield FINISH

        return self.feed(pieces())

    @property
    def tree(self) -> dict[str, bytes]:
        return {str(p.relative_to(self.to)): p.read_bytes() for p in self.to.rglob("*") if p.is_file()}


@pytest.fixture
def laptop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Laptop:
    monkeypatch.setenv("CLOUDDDP_HOME", str(tmp_path / "state"))
    (tmp_path / "to").mkdir()
    return Laptop(tmp_path / "to", tmp_path / "node")


class Case(NamedTuple):
    """What is here of a file: in the results; `arrived`: of it, as a whole or not, before the last transfer
    broke. `there`: the node's. `known`: how many bytes the node has to compare, None if it is not asked."""

    here: tuple[bytes, int] | None
    arrived: tuple[bytes, int, bool] | None
    there: tuple[bytes, int]
    known: int | None
    unchanged: int = 0


A = DATA * (LARGE // 5)
CASES = {
    "nothing": Case(None, None, (DATA, NOON_NS), 0),
    "the same": Case((DATA, NOON_NS), None, (DATA, NOON_NS), None, 1),
    "the same, empty": Case((b"", WHOLE), None, (b"", WHOLE), None, 1),
    "another size": Case((DATA[:3], NOON_NS), None, (DATA, NOON_NS), 0),
    "another time": Case((DATA, NOON_NS + 1), None, (DATA, NOON_NS), 0),
    "the same, at a whole second": Case((DATA, WHOLE), None, (DATA, WHOLE), 5, 1),
    "other contents, at a whole second": Case((b"54321", WHOLE), None, (DATA, WHOLE), 5),
    "the same contents with another time": Case((A, WHOLE), None, (A, NOON_NS), len(A), 1),
    "its beginning": Case((A[:999], WHOLE), None, (A, NOON_NS), 999),
    "another beginning": Case((b"x" * 999, WHOLE), None, (A, NOON_NS), 999),
    "more than it": Case((A + b"6", WHOLE), None, (A, NOON_NS), 0),
    "arrived": Case(None, (DATA, NOON_NS, True), (DATA, NOON_NS), None),
    "arrived, at a whole second": Case(None, (DATA, WHOLE, True), (DATA, WHOLE), 5),
    "arrived, and has grown": Case(None, (DATA, NOON_NS, True), (A, NOON_NS + 1), 5),
    "arrived in part": Case(None, (A[: 2 << 20], NOON_NS, False), (A, NOON_NS), 2 << 20),
    "arrived in part, of another": Case(None, (b"x" * (2 << 20), NOON_NS, False), (A, NOON_NS), 2 << 20),
    "arrived in part, and has shrunk": Case(None, (A[: 2 << 20], NOON_NS, False), (DATA, NOON_NS), 0),
    "an older one, and arrived in part": Case((b"x", NOON_NS), (A[:999], NOON_NS, False), (A, WHOLE), 999),
    "it, and arrived in part": Case((A, WHOLE), (A[:999], NOON_NS, False), (A, WHOLE), 999),
}


@pytest.mark.parametrize("case", CASES)
def test_what_is_here_of_a_file_is_not_sent_again(laptop: Laptop, case: str) -> None:
    here, arrived, there, known, unchanged = CASES[case]
    if here is not None:
        laptop.write(laptop.to / "runs/d/a", *here)
    if arrived is not None:
        data, mtime_ns, is_whole = arrived
        item = listed("runs/d/a", size=len(data) + (not is_whole), mtime_ns=mtime_ns)
        parts = [part(0, at, data[at : at + (1 << 20)]) for at in range(0, len(data), 1 << 20)]
        laptop.broken(item, *parts, *([end(0, data, mtime_ns=mtime_ns)] if is_whole else []))
    laptop.write(laptop.node / "runs/d/a", *there)
    found = laptop.pull()
    assert laptop.runner.wants.files == (() if known is None else (0,))
    assert [one.size for one in laptop.runner.wants.known.values()] == ([known] if known else [])
    assert laptop.tree == {"runs/d/a": there[0]}
    assert (found.files, found.unchanged) == (1 - unchanged, unchanged)
    assert (laptop.to / "runs/d/a").stat().st_mtime_ns == (here[1] if here and unchanged else there[1])
    is_beginning = known and there[0].startswith((arrived or here or (b"",))[0])
    assert laptop.seen[-1][1] == (0 if known is None else len(there[0]) - (known if is_beginning else 0))
    assert [path.name for path in laptop.to.iterdir()] == ["runs"]


def test_hash_of_a_hidden_file_of_the_user_goes_to_no_node(laptop: Laptop) -> None:
    laptop.broken(listed("runs/.cache", size=5), part(0, 0, b"123"))
    laptop.write(laptop.to / "runs/.env", b"123")
    laptop.write(laptop.to / "runs/.d/x", b"123")
    names = ("runs/.env", "runs/.d/x", "runs/.cache")
    with pytest.raises(NodeError, match="a file that is not here"):
        laptop.receive(*(listed(name, size=3) for name in names), end(0, b"123"))
    assert [*laptop.runner.wants.known] == [2]


@pytest.mark.parametrize("change", ["a folder", "gone"])
def test_what_the_node_no_longer_has_is_not_taken_from_a_broken_transfer(laptop: Laptop, change: str) -> None:
    laptop.broken(file("runs/a", b"a"), file("runs/b", b"b"), listed("runs/c", size=5), part(2, 0, b"c"))
    laptop.write(laptop.node / ("runs/a/x" if change == "a folder" else "runs/x"), b"x")
    laptop.pull()
    assert laptop.tree == {"runs/a/x" if change == "a folder" else "runs/x": b"x"}


def test_permissions_are_those_of_the_node_and_the_umask(laptop: Laptop) -> None:
    laptop.write(laptop.to / "runs/a", b"123").chmod(0o600)
    laptop.receive(listed("runs/a", size=5, mode=0o777), part(0, 3, b"45"), end(0, DATA))
    assert (laptop.to / "runs/a").stat().st_mode & 0o777 == 0o755


# -- files that change while they are read -------------------------------------------------------------------


def test_file_that_changes_is_named_and_sent_again(laptop: Laptop) -> None:
    path = laptop.write(laptop.node / "runs/a", A, NOON_NS)
    found = laptop.pull(lambda number: number or laptop.write(path, b"x" + A[1:], NOON_NS + 1))
    assert found.notes == ("changed while it was copied: runs/a; pull it again when nothing writes to it",)
    assert (laptop.to / "runs/a").stat().st_mtime_ns % 10**9 == 0
    assert laptop.pull().notes == ()
    assert laptop.tree == {"runs/a": b"x" + A[1:]}


@pytest.mark.parametrize("size", [0, 100])
def test_file_that_becomes_shorter_is_not_kept(laptop: Laptop, size: int) -> None:
    path = laptop.write(laptop.node / "runs/a", A)
    laptop.write(laptop.node / "runs/b", b"b")
    laptop.pull(lambda number: number or os.truncate(path, size))
    assert laptop.tree == {"runs/b": b"b"}


def test_file_that_the_node_gives_up_is_not_written(laptop: Laptop) -> None:
    given_up = (listed("runs/large", size=LARGE), listed("runs/small", size=5), part(0, 0, DATA))
    assert laptop.receive(*given_up, missing(0), missing(1), file("runs/b", b"b")).files == 1
    assert laptop.tree == {"runs/b": b"b"}


# -- what no agent sends -------------------------------------------------------------------------------------

KNOWN = b"here before"  # in the results
HASHED = listed("runs/hashed", size=len(KNOWN) + 4, mtime_ns=5)
CLAIMS: dict[str, tuple[str, list[Item | bytes]]] = {
    "continues with a wrong hash": (
        "differs",
        [HASHED, part(1, len(KNOWN), b"evil"), end(1, KNOWN + b"good")],
    ),
    "continues elsewhere": ("that is not here", [HASHED, part(1, 5, bytes(9))]),
    "continues what was not hashed": (
        "that is not here",
        [listed("runs/timed", size=99), part(1, len(KNOWN), bytes(88))],
    ),
    "is the same with a wrong hash": ("differs", [HASHED, end(1, b"other bytes")]),
    "sends what was not asked for": ("was not asked for", [file("runs/timed", b"-" * len(KNOWN))]),
}


@pytest.mark.parametrize("claim", CLAIMS)
def test_false_claim_about_a_file_of_this_computer_changes_nothing(laptop: Laptop, claim: str) -> None:
    laptop.write(laptop.to / "runs/hashed", KNOWN)
    laptop.write(laptop.to / "runs/timed", KNOWN, NOON_NS)
    message, pieces = CLAIMS[claim]
    with pytest.raises(NodeError, match=f"node 0 sent results that cloudddp refuses: .*{message}"):
        laptop.receive(file("runs/good"), *pieces)
    assert laptop.tree == {"runs/hashed": KNOWN, "runs/timed": KNOWN}


def test_progress_is_shown_while_a_file_arrives(laptop: Laptop) -> None:
    laptop.receive(listed("runs/a", size=4), part(0, 0, b"12"), part(0, 2, b"34"), end(0, b"1234"))
    assert laptop.seen == sorted(laptop.seen)
    assert {(4, 0), (4, 2), (4, 4)} <= set(laptop.seen)


# -- the folders ---------------------------------------------------------------------------------------------


def test_folder_of_a_transfer_that_is_not_private_is_not_used(laptop: Laptop, tmp_path: Path) -> None:
    """It is open to others, or a link."""
    laptop.broken(listed("runs/a", size=5), part(0, 0, b"123"))
    (kept,) = laptop.to.iterdir()
    assert kept.stat().st_mode & 0o777 == 0o700
    for mode in (0o777, 0o700):
        kept.chmod(mode)
        if mode == 0o700:
            kept.rename(tmp_path / "away")
            kept.symlink_to(tmp_path / "away")
        with pytest.raises(CloudDDPError, match="so no results are written there") as refused:
            laptop.receive(file("runs/b"))
        assert "remove it" in str(refused.value.hint)
        assert [*laptop.to.iterdir()] == [kept]


def test_two_pulls_from_one_node_do_not_mix(laptop: Laptop) -> None:
    def pieces() -> Iterator[bytes]:
        with pytest.raises(CloudDDPError, match="another pull from this node is writing to"):
            pull(StreamRunner([]), runs(), node=0, to=laptop.to)
        yield from stream(file("runs/a", b"a"), FINISH)

    laptop.feed(pieces())
    assert laptop.tree == {"runs/a": b"a"}


def test_repository_folder_is_refused_as_target(tmp_path: Path) -> None:
    (tmp_path / ".git" / "hooks").mkdir(parents=True)
    with pytest.raises(UsageError, match="git's or cloudddp's own folder"):
        pull(StreamRunner([]), runs(), node=0, to=tmp_path / ".git" / "hooks")


def test_name_that_this_computer_takes_for_another_one_is_left_out(tmp_path: Path) -> None:
    """A hard link plays the file system that ignores case: there both names are the same file."""
    for name in ("arrived", "to"):
        (tmp_path / name).mkdir()
    for name in ("Model", "model"):
        (tmp_path / "arrived" / begun_name(name)).write_text(name)
    with Folder.at(tmp_path / "to") as to, Folder.at(tmp_path / "arrived") as arrived:
        writer = placing._Writer(to, arrived, set())
        writer.put("Model", placing._Item("Model", ""))
        (tmp_path / "to" / "model").hardlink_to(tmp_path / "to" / "Model")
        with pytest.raises(placing._Left, match="another entry of these results has the same path"):
            writer.put("model", placing._Item("model", ""))
    assert (tmp_path / "to" / "model").read_text() == "Model"
