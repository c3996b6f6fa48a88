"""What a node says that it lacks of a listing, and takes, where files are there already."""

from __future__ import annotations

import os
from hashlib import sha256
from pathlib import Path

import pytest

from agent.files import project_lock
from agent.node import store
from agent.sync.update import ProjectUpdate
from cloudddp.agent.protocol import transfer
from cloudddp.agent.protocol.manifest import FILE, Entry
from cloudddp.agent.protocol.receiving import Receiver
from cloudddp.agent.protocol.transfer import DIGEST, Frames, Listing, Record


def test_part_of_another_node_is_continued_and_not_the_former_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file here has the size of the one that is wanted; the node that sends it is lost after a part."""
    monkeypatch.setattr(store, "ROOT", tmp_path / "store")
    store.create_root()
    project, data = tmp_path / "project", os.urandom(3_000_000)
    project.mkdir()
    (project / "large").write_bytes(bytes(len(data)))
    listing = Listing({"large": Entry(FILE, 0o644, len(data), 5, "")})
    with project_lock.held(project) as lock:
        update = ProjectUpdate(project, listing, lock, None)
        receiver = Receiver(update.wanted, update)
        assert update.wants(receiver.missing).known[0].size == len(data)
        update.start()
        for frame in Frames(b"k").feed(transfer.part(b"k", 0, 0, data[:1_000_000])):
            receiver.take(frame)
        receiver.close()
        assert update.wants(receiver.missing).known[0].size == 1_000_000
        record = Record(0, len(data), 5, False, sha256(data).digest()[:DIGEST])
        rest = transfer.part(b"k", 0, 1_000_000, data[1_000_000:2_000_000])
        for frame in Frames(b"k").feed(rest + transfer.end(b"k", record, data[2_000_000:])):
            receiver.take(frame)
        receiver.done()
        update.complete(())
    assert (project / "large").read_bytes() == data
