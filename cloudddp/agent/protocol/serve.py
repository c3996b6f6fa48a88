"""Several steps over one channel: what goes before each request, and what follows its output."""

from __future__ import annotations

import re
import struct
from collections.abc import Iterable

from cloudddp.agent.protocol.codec import ProtocolError

# Bytes of the steps' names and of the request, bytes of the names alone, whether it is the last step.
HEAD = struct.Struct(">II?")
STDERR_END = b"\0"  # no step writes this byte to stderr, nor to stdout, but for the last one
_STDOUT_END = re.compile(rb"\0(\d{1,3})\n")


def ask(step: str, request: bytes, *, is_last: bool = False, then: Iterable[str] = ()) -> bytes:
    """Return what asks for a step. Its body, if any, follows. `then`: steps that are likely to follow, whose
    modules are imported meanwhile."""
    names = " ".join((step, *then)).encode()
    return HEAD.pack(len(names) + len(request), len(names), is_last) + names + request


def stdout_end(code: int) -> bytes:
    return b"\0%d\n" % code


def read_stdout_end(data: bytes) -> int:
    """Return the exit code of a step. Raises ProtocolError."""
    found = _STDOUT_END.fullmatch(data)
    if found is None:
        raise ProtocolError("its output does not end as that of a step")
    return int(found[1])
