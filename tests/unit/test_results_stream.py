"""The stream of `pack` on the laptop: it takes what the agent sends in pieces of any size, refuses the rest,
and buffers little."""

from __future__ import annotations

import contextlib
import tracemalloc
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from support.streams import FINISH, Corpus, end, file, folder, link, listed, part, stream

from cloudddp.agent.protocol import transfer
from cloudddp.agent.protocol.manifest import FILE, MAX_FILES, Entry
from cloudddp.agent.protocol.transfer import Frames, Listing, Wants
from cloudddp.errors import CloudDDPError
from cloudddp.files import Folder
from cloudddp.job.results.incoming import incoming
from cloudddp.job.results.receive import Receive
from cloudddp.job.results.unpack import Notes, Refused

ROOTS = (("runs",),)
WHOLE = [
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


@contextlib.contextmanager
def receiving(to: Path) -> Iterator[Receive]:
    with (
        Folder.at(to) as target,
        incoming(target, ".x", keeps=False) as arrived,
        Receive(arrived, target, ROOTS, Notes(), node=0) as receive,
    ):
        yield receive


def received(to: Path, pieces: Iterable[bytes]) -> dict[str, str | bytes]:
    """Return what has arrived, by path: contents, or the target of a link. Raises Refused."""
    with receiving(to) as receive:
        for piece in pieces:
            receive.feed(piece)
        receive.close()
        base = to / ".x" / "files"
        return {
            str(path.relative_to(base)): str(path.readlink()) if path.is_symlink() else path.read_bytes()
            for path in base.rglob("*")
            if path.is_symlink() or path.is_file()
        }


def cut(data: bytes, sizes: list[int]) -> Iterator[bytes]:
    at = turn = 0
    while at < len(data):
        size = sizes[turn % len(sizes)]
        yield data[at : at + size]
        at, turn = at + size, turn + 1


@slow
@given(st.lists(st.integers(1, 2000), min_size=1, max_size=5))
def test_reads_what_the_agent_sends_in_any_pieces(tmp_path: Path, sizes: list[int]) -> None:
    found = received(tmp_path, cut(b"".join(stream(*WHOLE)), sizes))
    assert found == {
        "runs/a/l": "../b",
        "runs/b": b"x" * 5000,
        "runs/large": b"y" * 2000 + b"z" * 1000,
    }


@slow
@given(st.binary(max_size=4000))
@example(b"")
@example(bytes(512))
def test_arbitrary_bytes_are_refused(tmp_path: Path, data: bytes) -> None:
    with pytest.raises(Refused) as refused:
        received(tmp_path, [data])
    assert str(refused.value)


@slow
@given(st.data())
def test_changed_stream_is_read_or_refused(tmp_path: Path, data: st.DataObject) -> None:
    whole = bytearray(b"".join(stream(*WHOLE)))
    at = data.draw(st.integers(0, len(whole) - 1))
    change = data.draw(st.binary(min_size=1, max_size=12))
    whole[at : at + len(change)] = change
    with contextlib.suppress(Refused, CloudDDPError):
        received(tmp_path, [bytes(whole)])


@pytest.mark.parametrize("attack", ["frame-of-4-GiB", "listing-of-4-GiB", "head-of-4-GiB"])
def test_announced_size_takes_no_memory(attack: str, tmp_path: Path) -> None:
    pieces = Corpus(tmp_path, "..").attacks()[attack]
    with receiving(tmp_path) as receive:
        tracemalloc.start()
        try:
            with pytest.raises(Refused):
                for piece in pieces:
                    receive.feed(piece)
            assert tracemalloc.get_traced_memory()[1] < 8 << 20
        finally:
            tracemalloc.stop()


def answered(frame: bytes) -> Wants:
    return transfer.read_wants(next(Frames(transfer.UNSEALED).feed(frame)))


MORE_FILES = MAX_FILES + 200  # than a project may have


def test_more_files_than_a_project_may_have_can_be_listed(tmp_path: Path) -> None:
    entry = Entry(FILE, 0o644, 5, 1_700_000_000 * 10**9, "")
    (tmp_path / "runs").mkdir()
    with receiving(tmp_path) as receive:
        for names in (range(MAX_FILES), range(MAX_FILES, MORE_FILES)):
            listing = Listing({"runs": dict.fromkeys(map(str, names), entry)})
            receive.feed(listing.frame(transfer.UNSEALED))
        receive.feed(FINISH)
        answer = answered(next(receive.answer()))
    assert answer.of([(str(number), entry) for number in range(MORE_FILES)])[-1] == (MORE_FILES - 1, 0)


def test_answer_may_name_what_is_here_of_more_files_than_a_project_may_have() -> None:
    names = [str(number) for number in range(MORE_FILES)]
    known = Wants(True, offsets=dict.fromkeys(names, 5), digests=dict.fromkeys(names, "0" * 64))
    assert answered(known.frame(transfer.UNSEALED)) == known
