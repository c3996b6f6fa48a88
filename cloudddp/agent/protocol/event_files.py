"""The scalars in TensorBoard's event files, read without TensorBoard.

A file is a sequence of records: 8 bytes of length, 4 of its checksum, the data, 4 of its checksum (TFRecord).
Each is a message of protobuf: Event has wall_time = 1, step = 2 and summary = 5, which has a value = 1 for
each tag = 1, with the number as simple_value = 2, or session_log = 7, whose status = 1 is START = 1 where
SummaryWriter got a purge_step (tensorflow/core: event.proto, summary.proto). That is how PyTorch's
SummaryWriter writes scalars; TensorFlow's, in tensors, are not read.
"""

from __future__ import annotations

import contextlib
import io
import itertools
import math
import re
import struct
from collections.abc import Iterator
from typing import Any, BinaryIO, NamedTuple

MAX_RECORD = 1 << 16  # bytes; longer ones are images or graphs
MAX_TAG = 200  # bytes
_NOT_AN_EVENT = (ValueError, TypeError, LookupError, AttributeError, struct.error)

_PLACEHOLDER = "hp_metric"  # Lightning writes -1 where a script has no metric for its hyperparameters
STEP = "step"
EVENTS = "tfevents"  # in the names of such files


class ScalarRow(NamedTuple):
    """Values by name at a step, or at another `x`. `at`: when they were written, in seconds since the epoch;
    inf: unknown. `restarts`: earlier values of this step and of later ones are superseded."""

    step: Any
    values: dict[str, Any]
    at: float = math.inf
    restarts: bool = False
    x: str = STEP


def rows(file: BinaryIO, most: int) -> Iterator[ScalarRow]:
    """Yield the scalars and restarts in the first `most` bytes of a file, up to where it is truncated or not
    an event file. A record that cannot be read is skipped."""
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
            row = _event(data[:length])
            if row.values or row.restarts:
                yield row


# The head of a record, and the beginning of its message: wall_time, then the step, or the summary of step 0.
_RECORD = re.compile(rb"(?s)..\0{6}.{4}\x09.{8}[\x10\x2a]")


def last_rows(file: BinaryIO, most: int) -> list[ScalarRow]:
    """Return the rows in the last `most` bytes of a file, from the first record that begins there."""
    size = file.seek(0, io.SEEK_END)
    file.seek(max(size - most, 0))
    data = file.read(most)
    starts = (found.start() for found in _RECORD.finditer(data)) if size > most else [0]
    for start in itertools.islice(starts, 8):
        if found := list(rows(io.BytesIO(data[start:]), most)):
            return found
    return []


def _event(data: bytes) -> ScalarRow:
    event, values = _message(data), {}
    step = event.get(2, [0])[0]
    for summary in event.get(5, ()):
        for one in map(_message, _message(summary).get(1, ())):
            if 2 in one:
                name = one[1][0][:MAX_TAG].decode(errors="replace")
                if name != _PLACEHOLDER:
                    values[name] = float(struct.unpack("<f", one[2][0])[0])
    at = struct.unpack("<d", event[1][0])[0] if 1 in event else math.inf
    restarts = any(_message(log).get(1) == [1] for log in event.get(7, ()))
    return ScalarRow(step - (step >> 63 << 64), values, at, restarts)


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
