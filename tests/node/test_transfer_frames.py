"""The frames of a transfer, and the listing of a project: what no project has is refused."""

from __future__ import annotations

import contextlib
import io
import itertools
import json
import zlib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.badanswers import PROBE

from cloudddp.agent.protocol import codec, transfer
from cloudddp.agent.protocol.codec import MAX_PATH, ProtocolError
from cloudddp.agent.protocol.machine import ProbeReply
from cloudddp.agent.protocol.manifest import (
    FILE,
    LINK,
    Entry,
    folder_digests,
    manifest_digest,
    manifest_to_wire,
    nested,
    path_from_wire,
)
from cloudddp.agent.protocol.transfer import (
    BATCH,
    ZLIB,
    Listing,
    Record,
    batch,
    read_batch,
    read_frame,
    read_listing,
)
from cloudddp.agent.protocol.transfer import Frame as TransferFrame
from cloudddp.agent.protocol.transfer import frame as transfer_frame
from cloudddp.agent.replies import decode


@given(
    st.dictionaries(
        st.binary(min_size=1, max_size=20).filter(
            lambda name: b"\0" not in name and b"/" not in name and name not in (b".", b"..")
        ),
        st.integers(0, 1 << 40),
    )
)
def test_paths_that_are_not_utf8_survive_both_decoders(names: dict[bytes, int]) -> None:
    manifest = {
        name.decode("utf-8", "surrogateescape"): Entry(FILE, 0o644, size, 0, "")
        for name, size in names.items()
    }
    wire = manifest_to_wire(manifest)
    listing = Listing(nested(wire))
    frame = read_frame(io.BytesIO(listing.frame(b"k")).read, b"k")
    found = read_listing(frame)
    assert {
        path_from_wire(path): entry._replace(target=path_from_wire(entry.target))
        for path, entry in found.entries()
    } == manifest
    digests = folder_digests(nested(wire))
    reply = decode(json.dumps({**PROBE, "folders": digests}).encode(), ProbeReply)
    assert reply.folders == digests == folder_digests(found.folders)
    assert manifest_digest(reply.folders) == manifest_digest(digests)


@pytest.mark.parametrize("at", [0, 5, 14, 29, 40, -1])
def test_frame_that_was_changed_is_refused(at: int) -> None:
    raw = bytearray(Listing({"": {"a": Entry(FILE, 0o644, 1, 0, "")}}).frame(b"k"))
    raw[at] ^= 0x40
    with pytest.raises((codec.ProtocolError, EOFError)):
        read_listing(read_frame(io.BytesIO(raw).read, b"k"))


def test_compressed_contents_are_bounded_by_what_they_name() -> None:
    bomb = batch(
        b"k",
        [Record(0, 5, 0, False, b"x" * 16)],
        b"\0" * (1 << 20),
        lambda data: (ZLIB, zlib.compress(data, 1)),
    )
    small = bytearray(bomb)
    opening = len(bomb) - len(read_frame(io.BytesIO(bomb).read, b"k").body)
    head = (ZLIB).to_bytes(1, "big") + (5).to_bytes(4, "big") + bomb[29 + 5 : opening]
    lying = transfer_frame(b"k", BATCH, head, bytes(small[opening:]))
    with pytest.raises(codec.ProtocolError, match="longer than it says"):
        read_batch(read_frame(io.BytesIO(lying).read, b"k"))


@given(st.binary(max_size=200))
def test_any_bytes_are_no_frame(data: bytes) -> None:
    with pytest.raises((codec.ProtocolError, EOFError)):
        read_frame(io.BytesIO(data).read, b"k")


def test_unknown_codec_is_refused() -> None:
    raw = batch(b"k", [Record(0, 3, 0, False, b"x" * 16)], b"new", lambda data: (9, data))
    with pytest.raises(codec.ProtocolError, match="unknown codec"):
        read_batch(read_frame(io.BytesIO(raw).read, b"k"))


@pytest.mark.parametrize("name", ["\u0100", "/a", "a//b", "a/", "./a", "a/.", "a/../b", "..", "a\0b"])
def test_path_that_no_manifest_has_is_refused(name: str) -> None:
    with pytest.raises(ProtocolError):
        decode(json.dumps({**PROBE, "folders": {name: "0" * 16}}).encode(), ProbeReply)
    entry = Entry(FILE, 0o644, 1, 1, "")
    for folders in ({name: {"f": entry}}, {"d": {name: entry}}, {"d": {"l": Entry(LINK, 0, 0, 0, "\u0100")}}):
        with pytest.raises(ProtocolError):
            Listing(folders)


@pytest.mark.parametrize(
    "name", ["..", "", "a/b", "b/", "/a", "a\0", ".", MAX_PATH * "x"], ids=itertools.count()
)
def test_no_name_of_a_folder_hides_behind_another_one(name: str) -> None:
    entry = Entry(FILE, 0o644, 1, 1, "")
    for names in (["a", name], [name, "a"]):
        with pytest.raises(ProtocolError):
            Listing({"d": dict.fromkeys(names, entry)})


def test_entry_of_a_listing_has_no_value_that_a_file_cannot_have() -> None:
    for changed in ({"mode": 0o10000}, {"size": -1}, {"mtime_ns": 1 << 63}, {"kind": "d"}, {"target": "x"}):
        with pytest.raises(ProtocolError):
            Listing({"d": {"f": Entry(FILE, 0o644, 1, 1, "")._replace(**changed)}})


@settings(max_examples=300)
@given(kind=st.integers(1, 8), head=st.binary(max_size=80), body=st.binary(max_size=80))
def test_frame_of_any_contents_is_decoded_or_refused(kind: int, head: bytes, body: bytes) -> None:
    found = TransferFrame(kind, head, body, b"")
    for decode_frame in (
        read_batch,
        transfer.indexes,
        transfer.read_part,
        transfer.read_end,
        read_listing,
        transfer.read_wants,
    ):
        with contextlib.suppress(ProtocolError):
            decode_frame(found)
