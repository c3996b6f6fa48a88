"""A snapshot that comes from another node is written once it is whole and what was announced."""

from __future__ import annotations

import os
import socket
import stat
import threading
from collections.abc import Iterator
from contextlib import closing, suppress
from dataclasses import replace
from hashlib import sha256
from pathlib import Path

import pytest

from agent.node.link import Link
from agent.share import snapshot
from cloudddp.agent.protocol import transfer
from cloudddp.agent.protocol.codec import ProtocolError
from cloudddp.agent.protocol.snapshots import Snapshot

SECRET = "s" * 64
LARGE = 3_000_000


@pytest.fixture
def there(tmp_path: Path) -> Path:
    folder = tmp_path / "there"
    (folder / "runs").mkdir(parents=True)
    return folder


@pytest.fixture
def links() -> Iterator[tuple[Link, Link]]:
    """The two ends of a connection."""
    one, other = socket.socketpair()
    with closing(Link(one, SECRET, "test")) as first, closing(Link(other, SECRET, "test")) as second:
        yield first, second


def saved(folder: Path, size: int) -> Snapshot:
    path = folder / "runs" / "a.bin"
    path.write_bytes(os.urandom(size))
    os.utime(path, (1e9, 1e9))
    digest = sha256(path.read_bytes()).hexdigest()
    return Snapshot("runs/a.bin", path.stat().st_mtime_ns, size, digest, mode=0o640)


def sent(links: tuple[Link, Link], there: Path, here: Path, wanted: Snapshot) -> bool:
    """Send a file from one folder to the other; return whether it was there."""

    def send() -> None:
        with suppress(OSError):  # the receiver has ended the connection
            snapshot.send(links[0], SECRET, there, wanted.path)

    sender = threading.Thread(target=send)
    sender.start()
    try:
        return snapshot.receive(links[1], SECRET, here, wanted)
    finally:
        links[1].end()
        sender.join()


def names(folder: Path) -> list[str]:
    return [path.name for path in folder.rglob("*") if path.is_file()]


@pytest.mark.parametrize("size", [0, LARGE])
def test_contents_time_and_permissions_arrive(
    there: Path, here: Path, links: tuple[Link, Link], size: int
) -> None:
    wanted = saved(there, size)
    assert sent(links, there, here, wanted)
    info = (here / wanted.path).stat()
    assert (here / wanted.path).read_bytes() == (there / wanted.path).read_bytes()
    assert (info.st_mtime_ns, stat.S_IMODE(info.st_mode)) == (wanted.mtime_ns, 0o640)
    assert names(here) == ["a.bin"]


@pytest.mark.parametrize("size", [9, LARGE])
@pytest.mark.parametrize("change", [{"digest": "0" * 64}, {"mtime_ns": 5}, {"size": 8}], ids=str)
def test_other_file_than_announced_is_refused(
    there: Path, here: Path, links: tuple[Link, Link], size: int, change: dict[str, int]
) -> None:
    wanted = replace(saved(there, size), **change)  # type: ignore[arg-type]
    with pytest.raises(SystemExit, match=r"'runs/a.bin' was damaged on its way"):
        sent(links, there, here, wanted)
    assert names(here) == []


def test_file_that_has_gone_is_not_there(there: Path, here: Path, links: tuple[Link, Link]) -> None:
    wanted = saved(there, 9)
    (there / wanted.path).unlink()
    assert not sent(links, there, here, wanted)
    assert names(here) == []


def test_stream_that_ends_early_leaves_nothing(there: Path, here: Path, links: tuple[Link, Link]) -> None:
    wanted = saved(there, LARGE)
    links[0].write_all(transfer.part(SECRET.encode(), 0, 0, bytes(1000)))
    links[0].end()
    with pytest.raises(SystemExit, match=f"ended {LARGE - 1000} bytes too early"):
        snapshot.receive(links[1], SECRET, here, wanted)
    assert names(here) == []


def test_frame_without_the_seal_of_the_job_is_refused(
    there: Path, here: Path, links: tuple[Link, Link]
) -> None:
    wanted = saved(there, LARGE)
    links[0].write_all(transfer.part(b"another", 0, 0, bytes(1000)))
    with pytest.raises(ProtocolError, match="no valid seal"):
        snapshot.receive(links[1], SECRET, here, wanted)
    assert names(here) == []


def test_folder_in_the_way_is_an_error_and_kept(there: Path, here: Path, links: tuple[Link, Link]) -> None:
    wanted = saved(there, 9)
    (here / wanted.path / "inner").mkdir(parents=True)
    with pytest.raises(IsADirectoryError):
        sent(links, there, here, wanted)
    assert (here / wanted.path / "inner").is_dir()
    assert names(here) == []


def test_link_on_the_way_is_replaced(
    there: Path, here: Path, links: tuple[Link, Link], tmp_path: Path
) -> None:
    (tmp_path / "outside").mkdir()
    (here / "runs").symlink_to(tmp_path / "outside")
    assert sent(links, there, here, saved(there, 9))
    assert names(tmp_path / "outside") == []
    assert names(here) == ["a.bin"]
