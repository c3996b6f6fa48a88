"""What the laptop asks a node for, by what is here already, and what it does with the stream of `pack`: it
takes what the agent sends in pieces of any size, refuses the rest, and buffers little. Only what was
requested is written."""

from __future__ import annotations

import contextlib
import os
import tempfile
import tracemalloc
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support import streams
from support.streams import (
    FINISH,
    FOLDER,
    HERE,
    NOON_NS,
    Item,
    StreamRunner,
    end,
    file,
    folder,
    link,
    listed,
    part,
    runs,
    stream,
    tree,
)

from cloudddp.agent.protocol import transfer
from cloudddp.agent.protocol.manifest import Entry, link_end
from cloudddp.agent.protocol.sending import FileRequest, Sender, as_missing
from cloudddp.agent.protocol.transfer import UNSEALED
from cloudddp.agent.protocol.writing import begun_name
from cloudddp.errors import CloudDDPError, NodeError, UsageError
from cloudddp.files import Folder
from cloudddp.job.results import placing, receive, safe_names
from cloudddp.job.results.placing import Pulled
from cloudddp.job.results.pull import pull
from cloudddp.ssh.running import CommandSpec, Result

WHOLE = NOON_NS // 10**9 * 10**9  # a time that does not identify the contents
FILE = Entry("f", 0o644, 5, NOON_NS, "")
LARGE = 3 << 20  # bytes: more than two parts
DATA = b"12345"


@dataclass
class Laptop:
    """The folder of a job's results, in a project, and a node whose files are in another one. Beside them is
    a folder `elsewhere`, into which nothing may be written."""

    to: Path
    node: Path
    runner: StreamRunner = field(default_factory=lambda: StreamRunner([]))
    seen: list[tuple[int, int]] = field(default_factory=list)  # total and received, as shown

    def write(self, path: Path, data: bytes, mtime_ns: int = WHOLE) -> Path:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
        os.utime(path, ns=(mtime_ns, mtime_ns))
        return path

    def feed(self, pieces: Iterable[bytes], *names: str, breaks: bool = False) -> Pulled:
        def progress(received: int, total: int) -> None:
            self.seen.append((total, received))

        self.runner = StreamRunner(pieces, breaks=breaks)
        return pull(self.runner, runs(*names), node=0, to=self.to, progress=progress)

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
                FileRequest(number, paths[number], known.get(number, transfer.NOTHING))
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
    found = Laptop(tmp_path / "project" / "results" / "job", tmp_path / "node")
    found.write(tmp_path / "elsewhere" / "bait", b"unharmed")
    found.to.mkdir(parents=True)
    return found


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
    "another time": Case((DATA, NOON_NS), None, (DATA, NOON_NS + 1), 0),
    "the same contents with a later time": Case((DATA, NOON_NS + 1), None, (DATA, NOON_NS), 5, 1),
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
    "an older one, and arrived in part": Case((b"x", WHOLE - 1), (A[:999], NOON_NS, False), (A, WHOLE), 999),
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


def test_pull_continues_after_the_end_of_the_nodes_agent(laptop: Laptop) -> None:
    """As of one that was killed: it has said nothing."""

    class Killed(StreamRunner):
        def run(self, node: int, spec: CommandSpec) -> Result:
            super().run(node, spec)
            return Result(255, b"", b"")

    begun = stream(listed("runs/a", size=5), part(0, 0, DATA[:3]))
    with pytest.raises(NodeError, match="node 0: exit code 255") as error:
        pull(Killed(begun), runs(), node=0, to=laptop.to)
    assert error.value.hint == "repeat `cloudddp pull`, which continues"
    assert laptop.receive(listed("runs/a", size=5), part(0, 3, DATA[3:]), end(0, DATA)).files == 1
    assert laptop.tree == {"runs/a": DATA}


@pytest.mark.parametrize("size", [0, 100])
def test_file_that_becomes_shorter_is_not_kept(laptop: Laptop, size: int) -> None:
    path = laptop.write(laptop.node / "runs/a", A)
    laptop.write(laptop.node / "runs/b", b"b")
    laptop.pull(lambda number: number or os.truncate(path, size))
    assert laptop.tree == {"runs/b": b"b"}


def test_newer_file_on_this_computer_is_replaced_with_a_word(laptop: Laptop) -> None:
    """A node's file is what its job has there now, whatever its time; one with the same contents stays."""
    for name in ("mine", "same"):
        laptop.write(laptop.to / "runs" / name, DATA if name == "same" else b"mine!", NOON_NS + 1)
        laptop.write(laptop.node / "runs" / name, DATA, NOON_NS)
    found = laptop.pull()
    assert laptop.tree == {"runs/mine": DATA, "runs/same": DATA}
    assert (found.files, found.unchanged, found.left) == (1, 1, ())
    assert found.notes == ("replaced runs/mine, which was newer on this computer",)


def test_node_that_only_says_that_it_works_is_given_up(
    laptop: Laptop, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(receive, "STUCK", 0.0)
    alive = transfer.frame(UNSEALED, transfer.ALIVE)
    with pytest.raises(NodeError, match="node 0: it made no progress for 0 s"):
        laptop.feed([alive, alive])


def test_file_that_the_node_gives_up_is_not_written(laptop: Laptop) -> None:
    given_up = (listed("runs/large", size=LARGE), listed("runs/small", size=5), part(0, 0, DATA))
    gone = end(0, missing=True), end(1, missing=True)
    found = laptop.receive(*given_up, *gone, file("runs/b", b"b"))
    assert (found.files, found.notes) == (1, ("deleted on the node before they were copied: 2 files",))
    assert laptop.tree == {"runs/b": b"b"}


@pytest.mark.parametrize("name", [*streams.ATTACKS, *streams.STREAMS])
def test_hostile_stream_is_refused_and_nothing_is_kept(laptop: Laptop, tmp_path: Path, name: str) -> None:
    for path, mtime_ns in ((streams.HASHED, WHOLE), (streams.TIMED, NOON_NS)):
        laptop.write(laptop.to / path, HERE, mtime_ns)
    before = tree(tmp_path)
    tracemalloc.start()
    try:
        with pytest.raises(CloudDDPError, match=(streams.STREAMS | streams.ATTACKS)[name][0]) as refused:
            laptop.feed(streams.attack(name))
        assert tracemalloc.get_traced_memory()[1] < 150 << 20
    finally:
        tracemalloc.stop()
    assert "nothing was kept" in str(refused.value)
    assert refused.value.hint
    assert tree(tmp_path) == before


ANY = [
    folder("runs/a"),
    link("runs/a/l", "../b"),
    file("runs/b", b"x" * 5000),
    listed("runs/large", size=3000),
    part(2, 0, b"y" * 2000),
    part(2, 2000, b"z" * 1000),
    end(2, b"y" * 2000 + b"z" * 1000),
    FINISH,
]
slow = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def cut(data: bytes, sizes: list[int]) -> Iterator[bytes]:
    at = turn = 0
    while at < len(data):
        size = sizes[turn % len(sizes)]
        yield data[at : at + size]
        at, turn = at + size, turn + 1


@slow
@given(st.lists(st.integers(1, 2000), min_size=1, max_size=5))
def test_reads_what_the_agent_sends_in_any_pieces(laptop: Laptop, sizes: list[int]) -> None:
    laptop.to = Path(tempfile.mkdtemp(dir=laptop.node.parent))
    laptop.feed(cut(b"".join(stream(*ANY)), sizes))
    assert (laptop.to / "runs/a/l").readlink() == Path("../b")
    assert laptop.tree == {
        **dict.fromkeys(("runs/b", "runs/a/l"), b"x" * 5000),
        "runs/large": b"y" * 2000 + b"z" * 1000,
    }


@slow
@given(st.data())
def test_changed_stream_is_read_or_refused(laptop: Laptop, tmp_path: Path, data: st.DataObject) -> None:
    whole = bytearray(b"".join(stream(*ANY)))
    at = data.draw(st.integers(0, len(whole) - 1))
    change = data.draw(st.binary(min_size=1, max_size=12))
    whole[at : at + len(change)] = change
    with contextlib.suppress(CloudDDPError):
        laptop.feed([bytes(whole)])
    assert (tmp_path / "elsewhere" / "bait").read_text() == "unharmed"


def test_number_of_files_is_limited(laptop: Laptop, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(receive, "MAX_ENTRIES", 100)
    with pytest.raises(NodeError, match=r"node 0 sent results that cloudddp refuses: .*more than 100 files"):
        laptop.receive(*(file(f"runs/{k}", b"") for k in range(101)))


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
        writer.put("Model", placing._Item("Model", "", FILE))
        (tmp_path / "to" / "model").hardlink_to(tmp_path / "to" / "Model")
        with pytest.raises(placing._Left, match="another entry of these results has the same path"):
            writer.put("model", placing._Item("model", "", FILE))
    assert (tmp_path / "to" / "model").read_text() == "Model"


# -- what an agent may send, and this computer does not take ------------------------------------------------


def test_files_of_git_and_cloudddp_are_left_out_with_a_warning(laptop: Laptop) -> None:
    items = [*(listed(name, size=1) for name in streams.GUARDED), *map(file, streams.WELCOME), FINISH]
    found = laptop.feed(stream(*items), ".")
    assert laptop.tree.keys() == set(streams.WELCOME)
    assert len(found.notes) == len(set(streams.GUARDED)) - 1  # two of them are in one folder


def test_notes_about_files_that_are_left_out_are_limited(laptop: Laptop) -> None:
    found = laptop.receive(file("runs/a"), *(listed(f"runs/.cloudddp-{number}") for number in range(5000)))
    assert (len(found.notes), found.notes[-1], found.left) == (51, "and 4950 more", None)


@pytest.mark.parametrize("case", sorted(streams.COLLISIONS))
def test_first_of_two_members_with_one_path_is_kept(laptop: Laptop, case: str) -> None:
    items = streams.COLLISIONS[case]

    def pieces() -> Iterator[bytes]:
        yield from stream(*(replace(item, contents=None) for item in items))
        sent = [item for item in items if item.kind != FOLDER]
        for number in laptop.runner.wants.files:
            yield from sent[number].frames(number)
        yield FINISH

    assert any("left out runs/a" in note for note in laptop.feed(pieces()).notes)
    assert b"second" not in laptop.tree.values()


def test_modes_and_times_are_restricted(laptop: Laptop) -> None:
    laptop.receive(
        file("runs/set-user-id", mode=0o6777),
        file("runs/unreadable", mode=0),
        file("runs/unreadable-and-large", bytes(2 << 20), mode=0),
        file("runs/late", mtime_ns=(1 << 60) - 1),
        file("runs/early", mtime_ns=-(1 << 60)),
        listed("runs/closed", kind=FOLDER, mode=0),
        file("runs/closed/x"),
    )
    modes = {path.name: path.stat().st_mode & 0o7777 for path in (laptop.to / "runs").iterdir()}
    assert modes["set-user-id"] == 0o755
    assert modes["unreadable"] == modes["unreadable-and-large"] == 0o600
    assert (modes["closed"], (laptop.to / "runs/early").stat().st_mtime_ns) == (0o700, 0)


def test_link_in_the_target_is_not_followed(laptop: Laptop, tmp_path: Path) -> None:
    """A link to a file is replaced, and a link to a folder is left out; nothing is written to their
    targets."""
    to, away = laptop.to, tmp_path / "elsewhere"
    (to / "runs").mkdir()
    (to / "runs" / "a").symlink_to(away / "bait")
    laptop.receive(file("runs/a", b"new"))
    assert (to / "runs" / "a").read_text() == "new"
    assert not (to / "runs" / "a").is_symlink()
    (to / "runs" / "sub").symlink_to(away)
    found = laptop.receive(folder("runs/sub"), file("runs/sub/b"))
    assert f"{to}/runs/sub is a link or a file here and a folder in the results; remove it" in found.notes[1]
    assert [one.name for one in found.left or ()] == ["runs/sub", "runs/sub/b"]
    assert (away / "bait").read_text() == "unharmed"
    assert [path.name for path in away.iterdir()] == ["bait"]
    assert [path.name for path in to.iterdir()] == ["runs"]


# -- names: which were requested, where a link ends, and what git or cloudddp would act on -------------------


@pytest.mark.parametrize(
    ("names", "paths"),
    [
        (["runs"], (("runs",),)),
        (["runs/", "./runs", "runs/a"], (("runs",),)),
        (["runs/a", "runs/b", "runs-2"], (("runs-2",), ("runs", "a"), ("runs", "b"))),
        (["."], ((),)),
        (["runs", "."], ((),)),
        (["-x", "a b"], (("-x",), ("a b",))),
    ],
)
def test_requested_names(names: list[str], paths: Any) -> None:
    assert set(safe_names.requested(names)) == set(paths)


@pytest.mark.parametrize("name", ["", "/etc", "~/x", "..", "runs/../../x", "runs/../x", "a\0b"])
def test_names_outside_the_project_are_refused(name: str) -> None:
    with pytest.raises(UsageError, match="is not a path inside the project") as refused:
        safe_names.requested(["runs", name])
    assert refused.value.message.startswith(repr(name))


@pytest.mark.parametrize(
    ("at", "target", "end"),
    [
        ("runs/l", "a", "runs/a"),
        ("runs/l", "./a//b/", "runs/a/b"),
        ("runs/x/l", "../a", "runs/a"),
        ("runs/x/l", "..", "runs"),
        ("runs/x/l", "../..", ""),
        ("runs/x/l", "../../..", None),
        ("runs/l", "a/../b", None),
        ("runs/l", "a/..", None),
        ("runs/l", "a/b/up/../../elsewhere", None),  # as in CVE-2025-4517
        ("runs/l", "/etc", None),
        ("runs/l", "", None),
        ("l", "..", None),
        ("l", "x", "x"),
    ],
)
def test_link_end(at: str, target: str, end: str | None) -> None:
    found = link_end(tuple(at.split("/")), target)
    assert found == (None if end is None else tuple(end.split("/")) if end else ())


@given(st.text(max_size=12))
def test_git_folder_is_guarded_in_any_spelling(noise: str) -> None:
    ignored = "".join(c for c in noise if safe_names.unicodedata.category(c) in ("Cf", "Cc", "Mn"))
    assert safe_names.guarded(".g" + ignored + "iT. ")
    assert safe_names.guarded(".cloudddp" + noise)
    assert safe_names.guarded("cloudddp-" + ignored + "LOGS")
