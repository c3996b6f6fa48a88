"""The parser of tar streams: it reads what tarfile writes, refuses the rest, and buffers little."""

from __future__ import annotations

import io
import tarfile
import tracemalloc
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from support.tarcorpus import END, Corpus, base256, file, header, link, long_file

from cloudddp.job.results import safe_names
from cloudddp.job.results.untar import Member, Reader, Refused


class Members:
    """Collects members with their contents."""

    def __init__(self) -> None:
        self.members: list[tuple[Member, bytes]] = []
        self._member: Member | None = None
        self._data = bytearray()

    def begin(self, member: Member) -> None:
        assert self._member is None
        self._member, self._data = member, bytearray()

    def data(self, piece: memoryview) -> None:
        self._data += piece

    def end(self) -> None:
        assert self._member is not None
        assert len(self._data) == self._member.size
        self.members.append((self._member, bytes(self._data)))
        self._member = None


def read(data: bytes, pieces: list[int] | None = None) -> list[tuple[Member, bytes]]:
    """Read a stream in pieces of the given sizes, over and over."""
    received = Members()
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
    return received.members


names = st.text(
    st.characters(exclude_characters="\0", exclude_categories=["Cs"]), min_size=1, max_size=150
).filter(lambda name: name.strip("/") == name and len(name.encode()) < 300)
members = st.one_of(
    st.tuples(st.just("file"), names, st.binary(max_size=3000)),
    st.tuples(st.just("folder"), names, st.just(b"")),
    st.tuples(st.just("link"), names, names.map(str.encode)),
)


def written(entries: list[tuple[str, str, bytes]]) -> bytes:
    """Return the stream that Python's tarfile writes, in the format that the agent uses."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w|", format=tarfile.GNU_FORMAT, encoding="utf-8") as archive:
        for kind, name, data in entries:
            member = tarfile.TarInfo(name)
            if kind == "file":
                member.size = len(data)
            elif kind == "folder":
                member.type = tarfile.DIRTYPE
            else:
                member.type, member.linkname = tarfile.SYMTYPE, data.decode()
            archive.addfile(member, io.BytesIO(data))
    return out.getvalue()


@given(st.lists(members, max_size=8), st.lists(st.integers(1, 2000), min_size=1, max_size=5))
def test_reads_what_tarfile_writes_in_any_pieces(entries: Any, pieces: list[int]) -> None:
    found = read(written(entries), pieces)
    assert [
        (member.kind, member.name, member.target.encode() if member.kind == "link" else data)
        for member, data in found
    ] == entries


@given(st.binary(max_size=4000))
@example(b"")
@example(bytes(512))
@example(bytes(1024 * 21))
@example(file("a", b"x" * 100))
def test_arbitrary_bytes_are_read_or_refused(data: bytes) -> None:
    try:
        read(data, [700])
    except Refused as error:
        assert str(error)


@given(st.integers(0, 511), st.binary(min_size=1, max_size=12), st.integers(0, 3))
def test_changed_header_is_read_or_refused(at: int, change: bytes, which: int) -> None:
    """The checksum is corrected, so that the other fields are what is tested."""
    data = bytearray(
        [file("a/b"), link("a/c", "b"), long_file("a/" + "n" * 200), header("d", kind=b"5")][which]
    )
    data[at : at + len(change)] = change
    block = data[:512]
    block[148:156] = b" " * 8
    data[148:156] = b"%06o\0 " % sum(block)
    try:
        read(bytes(data) + END)
    except Refused as error:
        assert str(error)


@pytest.mark.parametrize("field", ["size", "mtime"])
@pytest.mark.parametrize("value", [-1, -(1 << 80), 1 << 62, (1 << 87) - 1])
def test_numbers_of_any_size(field: str, value: int) -> None:
    stream = header("a", **{field: base256(value)})
    if field == "mtime":
        ((found, _),) = read(stream + END)
        assert found.mtime == value
    else:
        with pytest.raises(Refused):
            read(stream + END)


@pytest.mark.parametrize("attack", ["pax-of-8-GiB", "long-name-of-8-GiB", "long-link-of-8-GiB"])
def test_announced_size_takes_no_memory(attack: str, tmp_path: Any) -> None:
    stream = Corpus(tmp_path, "..").attacks()[attack]
    reader = Reader(Members())
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
