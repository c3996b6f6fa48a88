"""The scalars in TensorBoard's event files, read without TensorBoard.

A file is a sequence of records: 8 bytes of length, 4 of its checksum, the data, 4 of its checksum (TFRecord).
Each is a message of protobuf: Event has step = 2 and summary = 5, which has a value = 1 for each tag = 1,
with the number as simple_value = 2 or in tensor = 8 (tensorflow/core: event.proto, summary.proto).
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator
from typing import BinaryIO

MAX_RECORD = 1 << 16  # bytes; longer ones are images or graphs
MAX_TAG = 200  # bytes
# How a tensor has its number: by field, and in tensor_content by dtype (float, double, int32, int64).
_VALUES = {5: "<f", 6: "<d"}
_CONTENT = {1: "<f", 2: "<d", 3: "<i", 9: "<q"}

Scalar = tuple[str, int, float]  # tag, step, value
Field = tuple[int, int | bytes]  # number; a varint as an int, anything else as bytes


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
        try:
            yield from list(_event(data[:length]))
        except (ValueError, IndexError, struct.error):
            continue


def _event(data: bytes) -> Iterator[Scalar]:
    fields = list(_fields(data))
    step = next((value for number, value in fields if number == 2 and isinstance(value, int)), 0)
    for one in (one for summary in _messages(fields, 5) for one in _messages(_fields(summary), 1)):
        parts = dict(_fields(one))
        tag, simple, tensor = parts.get(1), parts.get(2), parts.get(8)
        found = _tensor(tensor) if isinstance(tensor, bytes) else _unpacked("<f", simple)
        if isinstance(tag, bytes) and found is not None:
            yield tag[:MAX_TAG].decode(errors="replace"), step - (step >> 63 << 64), found


def _messages(fields: Iterable[Field], wanted: int) -> list[bytes]:
    return [value for number, value in fields if number == wanted and isinstance(value, bytes)]


def _tensor(data: bytes) -> float | None:
    """Return the number in a tensor that has one, else None."""
    parts = dict(_fields(data))
    packed = {**_VALUES, 4: _CONTENT.get(kind) if isinstance(kind := parts.get(1), int) else None}
    return next(
        (_unpacked(form, parts[field]) for field, form in packed.items() if form and field in parts), None
    )


def _unpacked(form: str, data: object) -> float | None:
    is_one = isinstance(data, bytes) and len(data) == struct.calcsize(form)
    return float(struct.unpack(form, data)[0]) if is_one else None  # type: ignore[arg-type]


def _fields(data: bytes) -> Iterator[Field]:
    """Yield the fields of a message. Raises ValueError, IndexError."""
    at = 0
    while at < len(data):
        key, at = _varint(data, at)
        number, at = _varint(data, at) if key & 7 in (0, 2) else ({1: 8, 5: 4}.get(key & 7, len(data)), at)
        if key & 7 == 0:
            yield key >> 3, number
            continue
        if number > len(data) - at:
            raise ValueError("a field is longer than its message")
        yield key >> 3, data[at : at + number]
        at += number


def _varint(data: bytes, at: int) -> tuple[int, int]:
    """Return a number of up to 64 bits, and where it ends."""
    number = shift = 0
    while shift < 64:
        byte, at = data[at], at + 1
        number |= (byte & 127) << shift
        if byte < 128:
            return number & (1 << 64) - 1, at
        shift += 7
    raise ValueError("a number is too long")
