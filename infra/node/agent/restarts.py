"""Whether a job that has failed is started again, in place. Pure but for the clock."""

from __future__ import annotations

import re
import time
from typing import Optional

from cloudddp.agent.protocol.verdict import Cause, Verdict

HOUR = 3600.0
SAME = 3  # failures that are the same, at the same step: a further attempt would fail like them
# Of these no further attempt can be made by the agents alone, or it would fail again.
FINAL = (
    Cause.START, Cause.AGENT, Cause.SILENT, Cause.UNREACHABLE, Cause.PREFLIGHT, Cause.DISK, Cause.NOTICE,
)  # fmt: skip
# The beginnings of a last line of Python that only a change of the code or of the installation helps against.
USERS_OWN = (
    "SyntaxError:", "IndentationError:", "TabError:", "ModuleNotFoundError:", "ImportError:", "NameError:",
)  # fmt: skip
USAGE = 2  # the exit code of argparse
# Times, process ids and addresses in a last line are others each time.
NUMBER = re.compile(r"0x[0-9a-f]+|[0-9]+")


class Budget:
    """The restarts that are left: `retries` in an hour."""

    def __init__(self, retries: int, *, stalls: bool = False) -> None:
        """`stalls`: a job that has stalled is started again, too."""
        self._stalls = stalls
        self._retries = retries
        self._times: list[float] = []
        self._failures: list[tuple[object, ...]] = []

    def refusal(self, verdict: Verdict, step: Optional[int]) -> Optional[str]:
        """Return why a failed job is not started again; '' without words if nobody asked for it; None if it is."""
        first = verdict.first
        if not self._retries:
            return ""
        if first is None:
            return "no rank has failed by itself"
        if first.cause in FINAL or (first.cause is Cause.STALL and not self._stalls):
            return ""
        last = verdict.last_lines[-1] if verdict.last_lines else ""
        if last.startswith(USERS_OWN) or (
            first.exit_code == USAGE and any(line.startswith("usage:") for line in verdict.last_lines)
        ):
            return "the script itself is wrong"
        # Without steps, a number may be how far it got. The rank that is the first may be another one each time.
        error = last if step is None else NUMBER.sub("#", last)
        key = (first.cause, first.exit_code, first.signal, error, step)
        self._failures.append(key)
        if self._failures.count(key) >= SAME:
            where = f" at step {step}" if step is not None else ""
            return f"the same failure has occurred {SAME} times{where}"
        now = time.monotonic()
        self._times = [one for one in self._times if now - one < HOUR]
        if len(self._times) >= self._retries:
            return f"it has been started again {self._retries} times within an hour"
        self._times.append(now)
        return None
