"""The frames of a transfer, and of a project's listing: what no node sends is refused."""

from __future__ import annotations

import contextlib
import io
import itertools
import zlib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cloudddp.agent.protocol import codec, transfer
from cloudddp.agent.protocol.codec import MAX_PATH, ProtocolError
from cloudddp.agent.protocol.manifest import (
    FILE,
    LINK,
    Entry,
    manifest_digest,
    manifest_to_wire,
)
from cloudddp.agent.protocol.transfer import (
    ZLIB,
    Listing,
    read_frame,
    read_listing,
)
from cloudddp.agent.protocol.transfer import Frame as TransferFrame


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
    listing = Listing(wire)
    frame = read_frame(io.BytesIO(listing.frame(b"k")).read, b"k")
    found = read_listing(frame)
    assert dict(found.entries()) == manifest
    assert manifest_digest(found.files) == manifest_digest(wire)


@pytest.mark.parametrize("at", [0, 5, 14, 29, 40, -1])
def test_frame_that_was_changed_is_refused(at: int) -> None:
    raw = bytearray(Listing({"a": Entry(FILE, 0o644, 1, 0, "")}).frame(b"k"))
    raw[at] ^= 0x40
    with pytest.raises((codec.ProtocolError, EOFError)):
        read_listing(read_frame(io.BytesIO(raw).read, b"k"))


@pytest.mark.parametrize(
    ("codec", "size", "why"),
    [
        (ZLIB, 5, "longer than it says"),
        (ZLIB, 2 << 20, "the length that it names"),
        (9, 1 << 20, "unknown codec"),
    ],
)
def test_contents_are_bounded_by_what_they_name(codec: int, size: int, why: str) -> None:
    raw = transfer.part(b"k", 0, 0, b"\0" * (1 << 20), lambda data: (ZLIB, zlib.compress(data, 1)))
    found = read_frame(io.BytesIO(raw).read, b"k")
    head = found.head[:12] + codec.to_bytes(1, "big") + size.to_bytes(4, "big")
    with pytest.raises(ProtocolError, match=why):
        transfer.read_part(found._replace(head=head))


@given(st.binary(max_size=200))
def test_any_bytes_are_no_frame(data: bytes) -> None:
    with pytest.raises((codec.ProtocolError, EOFError)):
        read_frame(io.BytesIO(data).read, b"k")


@pytest.mark.parametrize(
    "name",
    ["\u0100", "/a", "a//b", "a/", "./a", "a/.", "a/../b", "..", "", ".", "b/", "a\0b", (MAX_PATH + 1) * "x"],
    ids=itertools.count(),
)
def test_path_that_no_manifest_has_is_refused(name: str) -> None:
    """Nor does one hide behind another one."""
    entry = Entry(FILE, 0o644, 1, 1, "")
    for names in ([name], ["a", name], [name, "a"]):
        with pytest.raises(ProtocolError):
            Listing(dict.fromkeys(names, entry))


def test_entry_of_a_listing_has_no_value_that_a_file_cannot_have() -> None:
    file, link = Entry(FILE, 0o644, 1, 1, ""), Entry(LINK, 0, 0, 0, "\u0100")
    changes = [{"mode": 0o10000}, {"size": -1}, {"size": 1 << 64}]
    for changed in (*changes, {"mtime_ns": 1 << 63}, {"kind": "d"}, {"target": "x"}):
        with pytest.raises(ProtocolError):
            Listing({"f": file._replace(**changed)})
    with pytest.raises(ProtocolError):
        Listing({"l": link})


@settings(max_examples=300)
@given(kind=st.integers(1, 8), head=st.binary(max_size=80), body=st.binary(max_size=80))
def test_frame_of_any_contents_is_decoded_or_refused(kind: int, head: bytes, body: bytes) -> None:
    found = TransferFrame(kind, head, body)
    for decode_frame in (
        transfer.read_part,
        transfer.read_end,
        read_listing,
        transfer.read_wants,
    ):
        with contextlib.suppress(ProtocolError):
            decode_frame(found)
