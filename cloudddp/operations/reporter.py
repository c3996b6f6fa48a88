"""To whom a long operation reports: the console of the command line, or a callback of the Python API."""

from __future__ import annotations

import time
from contextlib import AbstractContextManager
from typing import Protocol, TypeVar

from cloudddp.errors import StepUpdate

LINE_SECONDS = 5.0  # between two lines about the same step


class StepLines:
    """Chooses, where no text takes the place of another, those that are shown."""

    def __init__(self) -> None:
        self._last = ""
        self._at = time.monotonic()

    def has_next(self, text: str) -> bool:
        now = time.monotonic()
        if text == self._last or (isinstance(text, StepUpdate) and now < self._at + LINE_SECONDS):
            return False
        self._last, self._at = text, now
        return True


class Steps(AbstractContextManager["Steps"], Protocol):
    """Call it with the text of each step of a long operation."""

    def __call__(self, text: str) -> None: ...

    def stop(self) -> None: ...


class Reporter(Protocol):
    """Takes messages, and asks questions where somebody can answer."""

    def log(self, text: str) -> None: ...

    def suggest(self, text: str) -> None: ...  # a text of ours that names commands (`Message`)

    def warn(self, text: str) -> None: ...

    def progress(self) -> Steps: ...

    def ask_secret(self, question: str) -> str | None:
        """Return the answer, or None where nobody can be asked."""

    def agree(self, question: str) -> bool | None:
        """Return the answer to a question of yes or no, or None where nobody can be asked."""


ReporterT = TypeVar("ReporterT", bound=Reporter)
ReporterT_co = TypeVar("ReporterT_co", bound=Reporter, covariant=True)
