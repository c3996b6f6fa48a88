"""Several steps over one channel: what goes before each request, what follows its output, and the refusal of
a step because the store belongs to an agent of another version."""

from __future__ import annotations

import re
import struct
from collections.abc import Iterable
from dataclasses import dataclass

from cloudddp.agent.protocol.codec import ProtocolError, check_job_id, check_length, check_range
from cloudddp.agent.protocol.phases import MAX_RUNNING


@dataclass(frozen=True)
class VersionConflict:
    """A step was refused: `jobs` run under the agent version `store`, and the step's agent has version
    `agent`."""

    store: int
    agent: int
    jobs: tuple[str, ...]

    def __post_init__(self) -> None:
        check_range("store", self.store, 0, 1 << 31)
        check_range("agent", self.agent, 0, 1 << 31)
        check_length("jobs", self.jobs, MAX_RUNNING)
        for job in self.jobs:
            check_job_id("jobs", job)


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
