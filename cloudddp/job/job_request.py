"""A job that is to be started: what `launch`, `run` and `resume` ask for. The records of launches need it,
too, which `status` reads: so it imports nothing that takes long."""

from __future__ import annotations

import secrets
import shlex
import string
from dataclasses import dataclass, field
from datetime import UTC, datetime

from cloudddp.text import one_line

LONGEST_SCRIPT = 1000  # characters of a script and its arguments in a list of jobs
KEEP = 30.0  # minutes that nodes stay for a pull, unless --keep is given
_DIGITS = string.digits + string.ascii_lowercase  # in ASCII order


def _new_id() -> str:
    """Return a new job's id. Ids sort by time, to 1/1296 s: the first two of the last digits. The other two
    are random; launch_record.keep refuses an id that another job of the cluster, launched on this computer,
    has."""
    now = datetime.now(UTC)
    part = now.microsecond * len(_DIGITS) ** 2 // 1_000_000
    high, low = divmod(part, len(_DIGITS))
    random = secrets.choice(_DIGITS) + secrets.choice(_DIGITS)
    return f"{now:%Y%m%d-%H%M%S}-{_DIGITS[high]}{_DIGITS[low]}{random}"


_EXEC = "import os, sys; os.execvp(sys.argv[1], sys.argv[1:])"


@dataclass(frozen=True, slots=True)
class Script:
    """What every rank runs: a file of the project, or with `module` a module as for `python -m`. `program`:
    the words that start it, where it is not written in Python."""

    target: str
    args: tuple[str, ...] = ()
    module: bool = False
    program: tuple[str, ...] = ()

    @property
    def argv(self) -> list[str]:
        """Return the arguments of Python. A program is started through Python, too, so that it gets the same
        environment."""
        return ["-ISc", _EXEC, *self.program, *self.args] if self.program else self._words

    @property
    def _words(self) -> list[str]:
        return (["-m"] if self.module else []) + [self.target, *self.args]

    @property
    def shown(self) -> str:
        """The script and its arguments as lists of jobs show them."""
        return one_line(shlex.join(self._words), LONGEST_SCRIPT)


@dataclass(frozen=True, slots=True)
class NewJob:
    """`poweroff`: minutes after the end of the job at which the nodes power off; None: they do not. `keep`:
    likewise after a stall, with on_stall = "down". `resumed_from`: the id of the job that this one continues,
    or ''."""

    script: Script
    poweroff: float | None = None
    resumed_from: str = ""
    keep: float = KEEP
    id: str = field(default_factory=_new_id)
