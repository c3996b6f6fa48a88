"""The frames of a transfer -> files: what arrives, what is continued, and one corpus of streams that no
sender sends."""

from __future__ import annotations

import itertools
import random
import shutil
import socket
import stat
import struct
import tempfile
import threading
import time
from contextlib import closing, suppress
from hashlib import sha256
from pathlib import Path
from unittest.mock import Mock

import pytest
from support.streams import NOON_NS, end, frame, part, record, whole

from agent.files import project_lock, records
from agent.node import serving, store
from agent.node.link import Link, LinkError
from agent.sync.update import ProjectUpdate
from cloudddp.agent.protocol import receiving, transfer
from cloudddp.agent.protocol.codec import ProtocolError
from cloudddp.agent.protocol.manifest import FILE, Entry
from cloudddp.agent.protocol.receiving import MAX_RESTARTS, FileTarget, Receiver
from cloudddp.agent.protocol.sending import FileRequest, Sender
from cloudddp.agent.protocol.transfer import DIGEST, UNSEALED, FileHead, Frames, Listing, PartialFile, Wants
from cloudddp.agent.protocol.writing import FileWriter, Incoming

NAMES = ("small", "d/large", "other")
DATA = random.Random(46).randbytes(3_000_000)


class Folder:
    """A target: a folder with these files by index."""

    def __init__(self, path: Path) -> None:
        self.path, self.gone_ones, self.confirmed = path, list[int](), list[int]()
        self.writer = FileWriter(path, path.with_name(f"{path.name}-begun"))

    def begin(self, number: int, offset: int) -> Incoming:
        return self.writer.begin(NAMES[number], offset)

    def finish(self, record: FileHead, incoming: Incoming) -> None:
        self.writer.finish(NAMES[record.number], record, incoming, record.mode)

    def confirm(self, record: FileHead) -> bool:
        return record.number in self.confirmed

    def gone(self, record: FileHead) -> None:
        self.gone_ones.append(record.number)

    def names(self) -> dict[str, bytes]:
        found = (path for path in self.path.rglob("*") if path.is_file())
        return {str(path.relative_to(self.path)): path.read_bytes() for path in found}


@pytest.fixture
def target(tmp_path: Path) -> Folder:
    (tmp_path / "target").mkdir()
    return Folder(tmp_path / "target")


def taken(
    target: FileTarget, data: bytes, wanted: tuple[int, ...] = (0, 1, 2), *, done: bool = True
) -> Receiver:
    receiver = Receiver(dict.fromkeys(wanted, len(DATA)), target)
    for found in Frames(UNSEALED).feed(data):
        receiver.take(found)
    if done:
        receiver.done()
    return receiver


def parts(number: int, data: bytes, at: int = 0, *, last: bytes | None = None) -> bytes:
    """Return the frames of a file from a byte on."""
    found = [part(number, k, data[k : k + 900_000]) for k in range(at, len(data), 900_000)]
    return b"".join(found) + (end(number, data) if last is None else last)


@pytest.mark.parametrize(
    ("stream", "why"),
    [
        (whole(3, b"x"), "file 3 was not asked for"),
        (whole(0, b"x") + whole(0, b"x"), "file 0 was not asked for, or has come before"),
        (whole(0, b"y", b"x"), "differs from what its sender"),
        (whole(0, b"y", b"xy"), "longer than it says"),
        (part(3, 0, b"x"), "file 3 was not asked for"),
        (part(1, 0, b""), "a part without contents"),
        (part(1, 0, b"x") + part(1, 2, b"x"), "a part of file 1 is missing"),
        (part(1, 5, b"x"), "a part of 'd/large' is missing"),
        (part(1, 0, b"x") + part(2, 0, b"x"), "file 1 has no end"),
        (part(1, 0, b"x") + whole(0, b"x"), "file 1 has no end"),
        (part(1, 0, b"x") * (MAX_RESTARTS + 2), "begins again and again"),
        (parts(1, DATA, last=end(1, DATA, size=5)), "a part of file 1 is missing"),
        (parts(1, DATA, last=end(1, DATA, digest=bytes(16))), "differs from what"),
        (end(1, DATA), "a part of 'd/large' is missing"),
        (end(3, b"x"), "file 3 was not asked for"),
        (parts(1, DATA, last=b""), "file 1 has no end"),
        (whole(0, b"x"), "2 files were not sent"),
        (frame(transfer.LISTING), "does not belong here"),
        (frame(transfer.DONE), "does not belong here"),
        (struct.pack(">BIQ", transfer.PART, 0xFFFFFFFF, 0) + bytes(16), "not a frame"),
        (struct.pack(">BIQ", transfer.LISTING, 0, 1 << 32) + bytes(16), "a frame is too long"),
    ],
    ids=itertools.count(),
)
def test_stream_that_no_sender_sends_is_refused(target: Folder, stream: bytes, why: str) -> None:
    with pytest.raises(ProtocolError, match=why):
        taken(target, stream)
    assert {*target.names()} <= {"small"}


def test_file_does_not_grow_beyond_any_limit(target: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a log does that is read while its rank writes."""
    monkeypatch.setattr(receiving, "MAX_GROWTH", 900_000)
    taken(target, parts(1, DATA + bytes(800_000)), (1,))
    with pytest.raises(ProtocolError, match="much longer than it was when it was listed"):
        taken(target, parts(0, DATA + bytes(2_000_000)), (0,))


def test_files_arrive_with_their_attributes(target: Folder) -> None:
    empty = part(2, 0, b"it becomes empty") + end(2, b"")
    receiver = taken(target, whole(0, b"x") + parts(1, DATA) + empty)
    assert target.names() == {"small": b"x", "d/large": DATA, "other": b""}
    info = (target.path / "d/large").stat()
    assert (info.st_mtime_ns, stat.S_IMODE(info.st_mode)) == (NOON_NS, 0o644)
    assert receiver.received == len(DATA) + 17
    target.writer.close(complete=True)
    assert [path.name for path in target.path.parent.iterdir()] == ["target"]


@pytest.mark.parametrize("changed", [False, True])
def test_file_that_was_begun_is_continued_if_its_beginning_is_the_same(target: Folder, changed: bool) -> None:
    taken(target, part(1, 0, DATA[:1_000_000]), done=False).close()
    assert target.names() == {}
    known = target.writer.known("d/large")
    assert known == PartialFile(1_000_000, sha256(DATA[:1_000_000]).hexdigest()[: 2 * DIGEST])
    data = b"changed" + DATA if changed else DATA
    source = target.path.parent / "source"
    source.mkdir()
    (source / "file").write_bytes(data)
    sent = b"".join(Sender(str(source), UNSEALED).frames([FileRequest(1, "file", known)]))
    assert len(sent) < len(data) - 900_000 or changed
    taken(target, sent, (1,))
    assert target.names() == {"d/large": data}


def test_part_of_another_node_is_continued_and_not_the_former_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where results are put back. The file here has the size of the wanted one, and the sender is lost after
    a part. What an earlier transfer has begun of other files goes; and nothing that came waits to be pulled,
    even if the end never comes."""
    monkeypatch.setattr(store, "ROOT", tmp_path / "store")
    store.create_root()
    project = tmp_path / "project"
    project.mkdir()
    (project / "large").write_bytes(bytes(len(DATA)))
    FileWriter(project, store.ROOT / "begun-project").begin("other", 0).close()
    with project_lock.held(project) as lock:
        update = ProjectUpdate(project, Listing({"large": Entry(FILE, 0o644, len(DATA), 5, "")}), lock, None)
        wants = update.wants((0,))
        assert wants.known[0].size == len(DATA)
        monkeypatch.setattr(shutil, "disk_usage", lambda _: Mock(free=0))
        update.check_space(wants)  # the file that is here may be the same
        assert not [*(store.ROOT / "begun-project").iterdir()]
        update.start()
        taken(update, part(0, 0, DATA[:1_000_000]), (0,), done=False).close()
        assert update.wants((0,)).known[0].size == 1_000_000
        rest = part(0, 1_000_000, DATA[1_000_000:2_000_000])
        last = transfer.end(UNSEALED, record(0, DATA, mtime_ns=5), DATA[2_000_000:])
        taken(update, rest + last, (0,))
        assert records.results(project).origin("large", (project / "large").lstat()) == records.PUT_BACK
        update.complete()
    assert (project / "large").read_bytes() == DATA


def test_sync_that_only_deletes_makes_nothing_on_a_full_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store, "ROOT", tmp_path / "store")
    store.create_root()
    with project_lock.held(tmp_path) as lock:
        update = ProjectUpdate(tmp_path, Listing({}), lock, None)
        update.check_space(update.wants(()))
    assert not [*store.ROOT.glob("begun-*")]


def test_file_that_is_here_is_confirmed_by_its_end(target: Folder) -> None:
    target.confirmed = [1]
    taken(target, end(1, DATA), (1,))
    assert target.names() == {}


def test_file_that_goes_or_changes_while_it_is_sent(target: Folder) -> None:
    gone = end(1, b"", deleted=True) + end(2, b"", missing=True)
    restarted = part(0, 0, DATA[:9]) + parts(0, DATA)
    taken(target, restarted + part(1, 0, b"x") + gone)
    assert target.gone_ones == [1, 2]
    assert target.names() == {"small": DATA}


def test_nothing_is_written_through_a_link_and_a_folder_in_the_way_is_kept(target: Folder) -> None:
    outside = target.path.parent / "outside"
    outside.mkdir()
    (target.path / "d").symlink_to(outside)
    (target.path / "small/inner").mkdir(parents=True)
    taken(target, parts(1, DATA), (1,))
    assert list(outside.iterdir()) == []
    assert target.names() == {"d/large": DATA}
    with pytest.raises(IsADirectoryError):
        taken(target, whole(0, b"x"), (0,))
    assert (target.path / "small/inner").is_dir()


def test_disk_that_is_mounted_in_the_folder(target: Folder) -> None:
    """`begun` is on another file system then."""
    memory = Path("/dev/shm")
    if memory.stat().st_dev == target.path.stat().st_dev:
        pytest.skip("needs a second file system")
    with tempfile.TemporaryDirectory(dir=memory) as name:
        folder = Path(name)
        other = FileWriter(folder, target.path.parent / "begun")
        incoming = other.begin("d/large", 0)
        incoming.write(memoryview(DATA))
        other.finish("d/large", record(1, DATA), incoming, 0o640)
        other.link("link", "d/large")
        other.close(complete=True)
        info = (folder / "link").stat()
        assert (folder / "link").read_bytes() == DATA
        assert (info.st_mtime_ns, stat.S_IMODE(info.st_mode)) == (NOON_NS, 0o640)
        assert sorted(path.name for path in folder.rglob("*")) == ["d", "large", "link"]


@pytest.mark.parametrize(("asked", "why"), [((2,), "no such file"), ((0, 0), "a file twice")])
def test_node_asks_for_what_is_not_offered(asked: tuple[int, ...], why: str) -> None:
    with pytest.raises(ProtocolError, match=why):
        Wants(asked).of([("a", Entry(FILE, 0o644, 5, 5, "")), ("b", Entry(FILE, 0o644, 1, 5, ""))])


def test_node_that_only_says_that_it_is_alive_is_given_up(
    target: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(serving, "STUCK", 0.3)
    own, other = (Link(one, "s", "test") for one in socket.socketpair())

    def live() -> None:
        with closing(other), suppress(OSError):
            while True:
                other.write_all(transfer.frame(b"s", transfer.ALIVE))
                time.sleep(0.05)

    alive = threading.Thread(target=live)
    alive.start()
    with closing(own), pytest.raises(LinkError, match="sent nothing"):
        serving.fetch(own, "s", Wants((0,)), Receiver({0: 5}, target))
    alive.join()
