"""A file goes from one node to another as it was offered, or not at all."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable
from contextlib import closing, suppress
from hashlib import sha256
from pathlib import Path

import pytest

from agent.node import store
from agent.node.link import REFUSED, Link, LinkError
from agent.share.copying import Exchange
from cloudddp.agent.protocol import transfer
from cloudddp.agent.protocol.sharing import Offered
from cloudddp.agent.protocol.transfer import DIGEST, FileHead

SECRET = "s" * 64
NAME = "runs/a.bin"
LARGE = 3_000_000


class Pair:
    """Two nodes: `there` is a file, as it is offered; `here` gets it."""

    def __init__(self, folder: Path) -> None:
        self.there, self.here = folder / "there", folder / "here"
        (self.there / "runs").mkdir(parents=True)
        self.here.mkdir()

    def offer(self, size: int, name: str = NAME) -> Offered:
        path = self.there / name
        path.write_bytes(os.urandom(size))
        os.utime(path, (1e9, 1e9))
        return Offered(name, path.stat().st_mtime_ns, size, mode=0o640)

    def get(self, file: Offered, stream: bytes | None = None) -> set[str]:
        """Return what came: from the other node, or of a hostile stream."""
        one, other = (Link(end, SECRET, "test") for end in socket.socketpair())

        def serve() -> None:
            with closing(one), suppress(*REFUSED, EOFError):
                if stream is None:
                    Exchange(SECRET, self.there, "", durable=False).give(one, [file])
                else:
                    transfer.read_frame(one.read_all, SECRET.encode())
                    one.write_all(stream)

        sender, taken = threading.Thread(target=serve), set[str]()
        sender.start()
        try:
            exchange = Exchange(SECRET, self.here, "begun-test", durable=True)
            exchange.get(other, [file], {file.path}, taken)
        finally:
            other.close()
            sender.join()
        return taken

    @property
    def files(self) -> list[str]:
        return [path.name for path in self.here.rglob("*") if path.is_file()]


@pytest.fixture
def pair(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Pair:
    monkeypatch.setattr(store, "ROOT", tmp_path)
    return Pair(tmp_path)


@pytest.mark.parametrize("size", [0, 9, LARGE])
@pytest.mark.parametrize("change", [None, os.unlink, os.utime, lambda path: os.truncate(path, 8)])
def test_file_arrives_as_it_was_offered_or_not_at_all(
    pair: Pair, tmp_path: Path, size: int, change: Callable[[Path], None] | None
) -> None:
    file = pair.offer(size)
    if change is not None:
        change(pair.there / NAME)
        assert pair.get(file) == set()
        assert pair.files == []
        return
    assert pair.get(file) == {NAME}
    copy = pair.here / NAME
    assert copy.read_bytes() == (pair.there / NAME).read_bytes()
    assert (copy.stat().st_mtime_ns, copy.stat().st_mode & 0o777) == (file.mtime_ns, 0o640)
    assert not list((tmp_path / "begun-test").iterdir())


def test_copy_that_was_cut_continues(pair: Pair, tmp_path: Path) -> None:
    file, secret = pair.offer(LARGE), SECRET.encode()
    data = (pair.there / NAME).read_bytes()
    with pytest.raises(LinkError, match=f"^{NAME}: the stream ended"):
        pair.get(file, transfer.part(secret, 0, 0, data[:2_000_000]))
    assert pair.files == []
    assert pair.get(pair.offer(9, "runs/b.bin")) == {"runs/b.bin"}  # which ends nothing of the other one
    info = (pair.there / NAME).stat()
    record = FileHead(0, LARGE, info.st_mtime_ns, False, sha256(data).digest()[:DIGEST])
    rest = transfer.part(secret, 0, 2_000_000, data[2_000_000:]) + transfer.end(secret, record)
    assert pair.get(file, rest + transfer.frame(secret, transfer.DONE)) == {NAME}
    assert (pair.here / NAME).read_bytes() == data
    assert not list((tmp_path / "begun-test").iterdir())
