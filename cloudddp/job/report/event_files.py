"""The scalars in TensorBoard's event files, read without TensorBoard.

A file is a sequence of records: 8 bytes of length, 4 of its checksum, the data, 4 of its checksum (TFRecord).
Each is a message of protobuf: Event has step = 2 and summary = 5, which has a value = 1 for each tag = 1,
with the number as simple_value = 2 (tensorflow/core: event.proto, summary.proto). That is how PyTorch's
SummaryWriter writes scalars; TensorFlow's, in tensors, are not read.
"""

from __future__ import annotations

import contextlib
import struct
from collections.abc import Iterator
from typing import Any, BinaryIO

MAX_RECORD = 1 << 16  # bytes; longer ones are images or graphs
MAX_TAG = 200  # bytes
_NOT_AN_EVENT = (ValueError, TypeError, LookupError, AttributeError, struct.error)

Scalar = tuple[str, int, float]  # tag, step, value


def scalars(file: BinaryIO, most: int) -> Iterator[Scalar]:
    """Yield the scalars in the first `most` bytes of a file, up to where it is truncated or not an event
    file. A record that cannot be read is skipped."""
    read = 0
    while read < most and len(head := file.read(12)) == 12:
        length = int.from_bytes(head[:8], "little")
        read += length + 16
        if length > MAX_RECORD:
            file.seek(min(length + 4, most), 1)
            continue
        data = file.read(length + 4)
        if len(data) < length + 4:
            return
        with contextlib.suppress(*_NOT_AN_EVENT):
            yield from list(_event(data[:length]))


def _event(data: bytes) -> Iterator[Scalar]:
    event = _message(data)
    step = event.get(2, [0])[0]
    for summary in event.get(5, ()):
        for one in map(_message, _message(summary).get(1, ())):
            if 2 in one:
                name = one[1][0][:MAX_TAG].decode(errors="replace")
                yield name, step - (step >> 63 << 64), float(struct.unpack("<f", one[2][0])[0])


def _message(data: bytes) -> dict[int, list[Any]]:
    """Return the values of each field of a message: a varint as an int, anything else as bytes."""
    found: dict[int, list[Any]] = {}
    at = 0
    while at < len(data):
        key, at = _varint(data, at)
        number, at = _varint(data, at) if key & 7 in (0, 2) else ({1: 8, 5: 4}[key & 7], at)
        found.setdefault(key >> 3, []).append(data[at : at + number] if key & 7 else number)
        at += number if key & 7 else 0
    return found


def _varint(data: bytes, at: int) -> tuple[int, int]:
    """Return a number of up to 64 bits, and where it ends."""
    number = 0
    for shift in range(0, 64, 7):
        byte, at = data[at], at + 1
        number |= (byte & 127) << shift
        if byte < 128:
            return number & (1 << 64) - 1, at
    raise ValueError("a number is too long")
