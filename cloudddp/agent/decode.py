"""The laptop's decoder: what a node sent -> a message of the protocol, or ProtocolError.

Any rank runs as the login user and can replace the agent, so a reply may contain anything. msgspec
builds no objects for unknown fields, so unexpected data takes no memory beyond its own size: `json.loads`
would take 25 times that. Expected data takes up to 20 times its size, so its lists and objects are counted
before. msgspec reads the type hints and runs the checks of the same dataclasses as protocol/codec.py.
"""

from __future__ import annotations

import re
import threading
from typing import Any, TypeVar

from cloudddp.agent.protocol.codec import MAX_REPLY, ProtocolError
from cloudddp.agent.protocol.manifest import MAX_FILES
from cloudddp.text import one_line

T = TypeVar("T")

MAX_CONTAINERS = MAX_FILES + 10_000  # lists and objects in one reply; the longest list of jobs has 100,000
# A text, also one without an end, or the beginning of a list or an object. Possessive: without backtracking.
_TOKEN = re.compile(rb'"(?:[^"\\]++|\\.)*+"?|([\[{])', re.DOTALL)

_decoders: dict[type[Any], Any] = {}  # msgspec's decoder of each type of message
_lock = threading.Lock()


def decode(data: bytes, kind: type[T], *, limit: int = MAX_REPLY) -> T:
    """Return the message that `data`, JSON in UTF-8, describes. Raises ProtocolError for anything else."""
    if len(data) > limit:
        raise ProtocolError(f"it is {len(data)} bytes long, more than {limit}")
    if _has_more_containers(data, MAX_CONTAINERS):
        raise ProtocolError(f"it has more than {MAX_CONTAINERS} lists and objects")
    try:
        found: T = _decoder(kind).decode(data)
    except (ValueError, RecursionError) as error:  # msgspec's own errors are ValueErrors
        raise ProtocolError(one_line(str(error), 200)) from None
    return found


def _decoder(kind: type[Any]) -> Any:
    """Return the decoder of a type. One thread at a time makes a new one.

    msgspec 0.22 stores its description of a dataclass on the class before the fields are filled in. A second
    thread that needs the same class meanwhile reads null pointers, and the process ends with SIGSEGV.
    """
    import msgspec  # 10 ms, which `--help` need not take

    with _lock:
        if kind not in _decoders:
            _decoders[kind] = msgspec.json.Decoder(kind)
        return _decoders[kind]


def _has_more_containers(data: bytes, limit: int) -> bool:
    if data.count(b"[") + data.count(b"{") <= limit:
        return False
    return sum(token.lastindex == 1 for token in _TOKEN.finditer(data)) > limit  # not those in texts
