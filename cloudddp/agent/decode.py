"""The laptop's decoder: what a node sent -> a message of the protocol, or ProtocolError.

Any rank runs as the login user and can replace the agent, so a reply may contain anything. msgspec
builds no objects for unknown fields, so unexpected data takes no memory beyond its own size: `json.loads` would take
25 times that. It reads the type hints and runs the checks of the same dataclasses as protocol/codec.py.
"""

from __future__ import annotations

from typing import TypeVar

from cloudddp.agent.protocol.codec import MAX_REPLY, ProtocolError
from cloudddp.text import one_line

T = TypeVar("T")


def decode(data: bytes, kind: type[T], *, limit: int = MAX_REPLY) -> T:
    """Return the message that `data`, JSON in UTF-8, describes. Raises ProtocolError for anything else."""
    import msgspec  # 10 ms, which `--help` need not take

    if len(data) > limit:
        raise ProtocolError(f"it is {len(data)} bytes long, more than {limit}")
    try:
        return msgspec.json.decode(data, type=kind)
    except (ValueError, RecursionError) as error:  # msgspec's own errors are ValueErrors
        raise ProtocolError(one_line(str(error), 200)) from None
