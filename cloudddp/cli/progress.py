"""The steps of a long operation: a spinner and times on a terminal, one line per step elsewhere."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from typing import Any

from cloudddp.cli import streams
from cloudddp.errors import Text
from cloudddp.text import one_line, visible_in_colour

_SHOWN_SECONDS = 1.0  # a step that took less has no time


class Progress:
    """Call it with the text of each step. On a terminal the current step has a spinner, and then its time."""

    def __init__(self, log: Callable[[str], None], render: Callable[[Text], str]) -> None:
        """`log` writes a line that stays; `render` writes the commands in a text as this user has to type
        them."""
        self._log = log
        self._render = render
        self._live = sys.stderr.isatty() and os.environ.get("TERM") != "dumb"
        self._console: Any = None
        if self._live:  # not at the first step, which a signal handler may report
            # rich takes 50 ms to import, and only a terminal needs it.
            from rich.console import Console

            self._console = Console(file=streams.terminal(), highlight=False, markup=False)
        self._status: Any = None
        self._step = ""
        self._warning = ""
        self._since = time.monotonic()

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def __call__(self, text: Text) -> None:
        """Report the next step. It never fails, and may be called by a signal handler."""
        try:
            self._report(text)
        except Exception:  # the terminal is closed, or a signal handler interrupted: the work must continue
            self._live, self._status = False, None

    @property
    def live(self) -> bool:
        """Whether the steps are shown on a terminal."""
        return self._live

    def above(self, text: str) -> bool:
        """Write lines above the spinner, which would be left in front of them; return whether there is
        one."""
        if self._status is None:
            return False
        # Imported where a terminal needs it, as above.
        from rich.text import Text as RichText

        self._console.print(RichText.from_ansi(visible_in_colour(text)), soft_wrap=True)
        return True

    def update(self, text: str) -> None:
        """Report how far the current step is: on a terminal in its place, elsewhere on a line. It never
        fails."""
        if self._live and self._status is not None:
            self._step = one_line(text)
        else:
            self(text)

    def _report(self, message: Text) -> None:
        text = one_line(self._render(message))  # rich writes to the terminal directly
        if text == self._step:
            return  # a poll that found nothing new
        if text.startswith("warning"):  # the current step goes on
            if text != self._warning:
                self._warning = text
                self._log(text)
            return
        if not self._live:
            self._step = text
            self._log(text)
            return
        self._finish_step()
        self._step, self._since = text, time.monotonic()
        if self._status is None:
            self._status = self._console.status(self)
            self._status.start()

    def __rich__(self) -> Any:
        """Return the current step for the spinner, which asks several times a second."""
        # Imported where a terminal needs it, as above.
        from rich.text import Text as RichText

        seconds = int(time.monotonic() - self._since)
        return RichText(f"{self._step}  ({seconds} s)" if seconds else self._step)

    def _finish_step(self) -> None:
        """Print the step on a line of its own above the spinner, which would otherwise overwrite it."""
        if self._step and self._console is not None:
            seconds = time.monotonic() - self._since
            took = f"  ({seconds:.1f} s)" if seconds >= _SHOWN_SECONDS else ""
            self._console.print(f"{self._step}{took}", style="dim")

    def stop(self) -> None:
        """End the last step; the next output starts on a new line."""
        try:
            if self._status is not None:
                self._status.stop()
                self._finish_step()
        except (OSError, ValueError):
            pass
        self._status, self._step = None, ""
