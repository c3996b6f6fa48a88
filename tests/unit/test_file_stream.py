"""The parser of the stream of `pack`: it reads what the agent writes, refuses the rest, and buffers
little."""

from __future__ import annotations

import hashlib
import tracemalloc
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from support.streams import FINISH, Corpus, file, header, link, same

from cloudddp.agent.protocol import files
from cloudddp.agent.protocol.codec import MAX_SIZE
from cloudddp.agent.protocol.files import MAGIC, End, Entry, Total
from cloudddp.job.results import safe_names
from cloudddp.job.results.file_stream import Reader, Refused


class Entries:
    """Collects entries with their contents."""

    def __init__(self) -> None:
        self.entries: list[tuple[Entry, bytes]] = []
        self._entry: Entry | None = None
        self._data = bytearray()

    def same(self, numbers: tuple[int, ...]) -> None:
        assert self._entry is None
        assert all(0 <= number < 1 << 32 for number in numbers)

    def total(self, total: Total) -> None:
        assert self._entry is None
        assert total.files <= MAX_SIZE

    def begin(self, entry: Entry) -> None:
        assert self._entry is None
        if entry.kind == files.FILE:
            self._entry, self._data = entry, bytearray()
        else:
            self.entries.append((entry, b""))

    def data(self, piece: memoryview) -> None:
        assert self._entry is not None
        self._data += piece

    def end(self, end: End) -> None:
        assert self._entry is not None
        assert end.state == files.GIVEN_UP or len(self._data) == self._entry.size - self._entry.offset
        self.entries.append((self._entry, bytes(self._data)))
        self._entry = None


def read(data: bytes, pieces: list[int] | None = None) -> list[tuple[Entry, bytes]]:
    """Read a stream in pieces of the given sizes, over and over."""
    received = Entries()
    reader = Reader(received)
    at = 0
    sizes = pieces or [len(data) or 1]
    for turn in range(len(data) + 1):
        if at >= len(data):
            break
        size = sizes[turn % len(sizes)]
        reader.feed(data[at : at + size])
        at += size
    reader.close()
    return received.entries


names = st.text(st.characters(exclude_characters="\0"), min_size=1, max_size=150).filter(
    lambda name: (
        name.encode("utf-8", "surrogateescape").decode("utf-8", "surrogateescape") == name
        if all(not "\ud800" <= c <= "\udfff" or "\udc80" <= c <= "\udcff" for c in name)
        else False
    )
)
mtimes = st.integers(-(1 << 63), (1 << 63) - 1)
modes = st.integers(0, 0o7777)
entries = st.one_of(
    st.builds(Entry, names, st.just(files.FILE), st.just(0), modes, mtimes, st.just("")),
    st.builds(Entry, names, st.just(files.FOLDER), st.just(0), modes, mtimes, st.just("")),
    st.builds(Entry, names, st.just(files.LINK), st.just(0), modes, mtimes, names),
).map(lambda entry: entry._replace(offset=0))


def written(entry: Entry, data: bytes) -> bytes:
    """Return what the agent writes for an entry."""
    pieces = [files.encode_entry(entry)]
    if entry.kind == files.FILE:
        cut = len(data) // 2
        pieces += [files.frame(files.DATA, piece) for piece in (data[:cut], data[cut:])]
        pieces.append(files.encode_end(End(files.SETTLED, hashlib.sha256(data).digest())))
    return b"".join(pieces)


@given(
    st.lists(st.tuples(entries, st.binary(max_size=3000)), max_size=8),
    st.lists(st.integers(1, 2000), min_size=1, max_size=5),
)
def test_reads_what_the_agent_writes_in_any_pieces(given_entries: Any, pieces: list[int]) -> None:
    sent = []
    for entry, data in given_entries:
        size = len(data) if entry.kind == files.FILE else 0
        whole = Entry(entry.name, entry.kind, size, entry.mode, entry.mtime_ns, entry.target)
        sent.append((whole, data if size else b""))
    data = b"".join(written(entry, data) for entry, data in sent)
    assert read(MAGIC + data + FINISH, pieces) == sent


@given(st.binary(max_size=4000))
@example(b"")
@example(bytes(512))
@example(file("a", b"x" * 100))
def test_arbitrary_bytes_are_read_or_refused(data: bytes) -> None:
    for begin in (b"", MAGIC):
        try:
            read(begin + data, [700])
        except Refused as error:
            assert str(error)


@given(st.integers(0, 60), st.binary(min_size=1, max_size=12), st.integers(0, 3))
def test_changed_frame_is_read_or_refused(at: int, change: bytes, which: int) -> None:
    data = bytearray([file("a/b"), link("a/c", "b"), same(1, 2, 3), header("d", kind=files.FOLDER)][which])
    data[at : at + len(change)] = change
    try:
        read(MAGIC + bytes(data) + FINISH)
    except Refused as error:
        assert str(error)


@pytest.mark.parametrize("size", [MAX_SIZE + 1, (1 << 64) - 1])
def test_size_out_of_range_is_refused(size: int) -> None:
    with pytest.raises(Refused):
        read(MAGIC + header("a", size=size) + FINISH)


@pytest.mark.parametrize("attack", ["entry-of-4-GiB", "same-of-4-GiB", "contents-of-4-GiB"])
def test_announced_size_takes_no_memory(attack: str, tmp_path: Any) -> None:
    stream = Corpus(tmp_path, "..").attacks()[attack]
    reader = Reader(Entries())
    tracemalloc.start()
    try:
        with pytest.raises(Refused):
            for piece in stream:
                reader.feed(piece)
        assert tracemalloc.get_traced_memory()[1] < 8 << 20
    finally:
        tracemalloc.stop()


# -- names -------------------------------------------------------------------------------------------------


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
    with pytest.raises(ValueError) as refused:
        safe_names.requested(["runs", name])
    assert refused.value.args == (name,)


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
        ("runs/l", "/etc", None),
        ("runs/l", "", None),
        ("l", "..", None),
        ("l", "x", "x"),
    ],
)
def test_link_end(at: str, target: str, end: str | None) -> None:
    found = safe_names.link_end(tuple(at.split("/")), target)
    assert found == (None if end is None else tuple(end.split("/")) if end else ())


@given(st.text(max_size=12))
def test_git_folder_is_guarded_in_any_spelling(noise: str) -> None:
    ignored = "".join(c for c in noise if safe_names.unicodedata.category(c) in ("Cf", "Cc", "Mn"))
    assert safe_names.guarded(".g" + ignored + "iT. ")
    assert safe_names.guarded(".cloudddp" + noise)
