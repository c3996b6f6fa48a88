"""Whether a job that has failed is started again, in place. Pure."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
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


@dataclass(frozen=True)
class Budget:
    """The restarts that are left: `retries` in an hour. `stalls`: a job that has stalled is started again, too."""

    retries: int
    stalls: bool = False
    times: tuple[float, ...] = ()  # of the restarts of the last hour, by the monotonic clock
    failures: tuple[tuple[object, ...], ...] = ()  # so far

    def spend(self, verdict: Verdict, step: Optional[int], now: float) -> tuple[Budget, Optional[str]]:
        """Return what is left after a failure at this step, and why the job is not started again; '' without words if nobody
        asked for it; None if it is."""
        first = verdict.first
        if not self.retries:
            return self, ""
        if first is None:
            return self, "no rank has failed by itself"
        if first.cause in FINAL or (first.cause is Cause.STALL and not self.stalls):
            return self, ""
        last = verdict.last_lines[-1] if verdict.last_lines else ""
        if last.startswith(USERS_OWN) or (
            first.exit_code == USAGE and any(line.startswith("usage:") for line in verdict.last_lines)
        ):
            return self, "the script itself is wrong"
        # Without steps, a number may be how far it got. The rank that is the first may be another one each time.
        error = last if step is None else NUMBER.sub("#", last)
        key = (first.cause, first.exit_code, first.signal, error, step)
        left = replace(self, failures=(*self.failures, key))
        if left.failures.count(key) >= SAME:
            where = f" at step {step}" if step is not None else ""
            return left, f"the same failure has occurred {SAME} times{where}"
        recent = tuple(one for one in self.times if now - one < HOUR)
        if len(recent) >= self.retries:
            return left, f"it has been started again {self.retries} times within an hour"
        return replace(left, times=(*recent, now)), None
