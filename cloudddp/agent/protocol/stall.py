"""A stall that is left alone, because the job's `on_stall` is `leave`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Optional

from cloudddp.agent.protocol.codec import MAX_TEXT, MAX_TIME, check_length, check_range


@dataclass(frozen=True)
class LeftStall:
    """`detail` says for how long no rank did anything, and where each one was. `since` is when that was
    noticed, in seconds since the epoch; `until`: when a rank did something again, None while none has."""

    since: float
    detail: str
    until: Optional[float] = None

    def __post_init__(self) -> None:
        check_range("since", self.since, 0, MAX_TIME)
        check_range("until", self.until, 0, MAX_TIME)
        check_length("detail", self.detail, MAX_TEXT)
