"""The cluster's deadline for a job: as its launch was given it, or where `extend` has moved it since."""

from __future__ import annotations

import contextlib
import math
import time
from datetime import datetime, timezone
from typing import Optional

from agent.node import store
from cloudddp.agent.protocol.start import Deadline

# Seconds since the epoch by this node's clock, written by infra/node/move-deadline.sh.
MOVED = store.ROOT / "deadline"


def current(given: Optional[Deadline], began: float) -> tuple[float, str]:
    """Return when this node ends, by the monotonic clock, and as text; infinity and '' where nothing ends it.
    `given`: to a job that began at `began`, by that clock."""
    with contextlib.suppress(OSError, ValueError, OverflowError):
        moved = float(store.read_bytes(MOVED, 64))
        text = f"{datetime.fromtimestamp(moved, timezone.utc):%Y-%m-%d %H:%M} UTC"
        return time.monotonic() + moved - time.time(), text
    return (math.inf, "") if given is None else (began + given.left, given.at)
