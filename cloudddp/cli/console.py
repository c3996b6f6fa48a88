"""The console: everything that cloudddp prints. Data goes to stdout, messages and progress to stderr, with
the commands in messages as this user has to type them. It does not depend on clusters, settings or AWS.

stdout and stderr show control characters as text, on a terminal, in a pipe and in a file. Messages contain
values from nodes, tags and files. If each print had to escape them, one would be forgotten; so every write
goes through the guarded streams. Colours are kept: they are ours, or text.with_colours has allowed them.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import select
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import click

from cloudddp import timings
from cloudddp.config.command_line import GlobalOptions
from cloudddp.errors import CloudDDPError, Message, NotConfirmed, StepUpdate, StepWarning, render
from cloudddp.formats import wrapped
from cloudddp.operations.reporter import StepLines
from cloudddp.text import one_line, visible_in_colour, without_colours

_guarded: dict[str, io.TextIOWrapper] = {}  # the streams as they were


class _Guarded(io.TextIOWrapper):
    """Writes text as `text.visible_in_colour` makes it, and `?` for characters that the encoding lacks."""

    def write(self, written: str) -> int:
        super().write(visible_in_colour(written))
        return len(written)


def guard_streams() -> None:
    """Wrap sys.stdout and sys.stderr, if they are files. A closed stream (`>&-`) leads to /dev/null."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):  # as they are numbered
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode))  # noqa: PTH123, SIM115
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if isinstance(stream, io.TextIOWrapper) and not isinstance(stream, _Guarded):
            stream.flush()
            _guarded[name] = stream
            guarded = _Guarded(
                stream.buffer, stream.encoding, "replace", line_buffering=stream.line_buffering
            )
            setattr(sys, name, guarded)


def flush_streams() -> None:
    """Write what stdout and stderr still hold; what cannot be written is discarded."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def write_raw(line: str) -> None:
    """Write a line to stdout without the guard: the user wants the terminal to interpret escapes."""
    sys.stdout.flush()
    stream = _guarded.get("stdout", sys.stdout)
    stream.buffer.write((line + "\n").encode(stream.encoding, "replace"))
    stream.buffer.flush()


@contextlib.contextmanager
def live_lines() -> Iterator[Callable[[Sequence[str]], None]]:
    """Yield a function that shows lines on the terminal that stdout is, in place of those before; the last
    ones stay. They are escaped, and fit the width of the terminal."""
    # rich takes 50 ms to import, and only a terminal needs it.
    from rich.console import Console
    from rich.live import Live
    from rich.text import Text as RichText

    stream = _guarded["stdout"]
    stream.reconfigure(errors="replace")
    console = Console(file=stream, highlight=False)
    with Live(console=console, auto_refresh=False, redirect_stdout=False, redirect_stderr=False) as live:
        yield lambda lines: live.update(RichText("\n".join(lines), no_wrap=True), refresh=True)


_SHOWN_SECONDS = 1.0  # a step that took less has no time


class Progress(contextlib.AbstractContextManager["Progress"]):
    """Call it with the text of each step. On a terminal the current step has a spinner, and then its time."""

    def __init__(self, log: Callable[[str], None], render: Callable[[str], str]) -> None:
        """`log` writes a line that stays; `render` writes commands as this user has to type them."""
        self._log = log
        self._render = render
        self._live = sys.stderr.isatty() and os.environ.get("TERM") != "dumb"
        self._console: Any = None
        if self._live:  # not at the first step, which a signal handler may report
            # rich takes 50 ms to import, and only a terminal needs it.
            from rich.console import Console

            # Without the guard: it moves the cursor, and `_report` escapes the text.
            stream = _guarded.get("stderr", sys.stderr)
            self._console = Console(file=stream, highlight=False, markup=False)
        self._status: Any = None
        self._step = ""
        self._warning = ""
        self._since = time.monotonic()
        self._lines = StepLines()
        # Threads of several nodes report: rich would write a step into the row of a spinner that another one
        # starts. A signal handler may interrupt a report and make its own.
        self._lock = threading.RLock()

    def __exit__(self, *_: object) -> None:
        self.stop()

    def __call__(self, text: str) -> None:
        """Report the next step. It never fails, and may be called by a signal handler."""
        try:
            with self._lock:
                self._report(text)
        except Exception:  # the terminal is closed, or a signal handler interrupted: the work must continue
            self._live, self._status = False, None

    def above(self, text: str) -> bool:
        """Write lines above the spinner; return whether there is one."""
        if self._status is None:
            return False
        from rich.text import Text as RichText

        self._console.print(RichText.from_ansi(visible_in_colour(text)), soft_wrap=True)
        return True

    def _report(self, message: str) -> None:
        text = one_line(self._render(message))  # rich writes to the terminal directly
        if text in (self._step, self._warning):
            return  # a poll that found nothing new
        if isinstance(message, StepWarning):
            self._warning = text
            self._log(text)
        elif not self._live:
            if self._lines.has_next(message):
                self._log(text)
        elif isinstance(message, StepUpdate) and self._status is not None:
            self._step = text
        else:
            self._finish_step()
            self._step, self._since = text, time.monotonic()
            if self._status is None:
                from rich.live import Live
                from rich.spinner import Spinner

                spinner = Spinner("dots", self, style="status.spinner")
                self._status = Live(spinner, console=self._console, transient=True)
                # Now: rich's thread would write the first row while another prints.
                self._status.start(refresh=True)

    def __rich__(self) -> Any:
        """Return the current step for the spinner, which asks several times a second."""
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
        with self._lock:
            with contextlib.suppress(OSError, ValueError):
                if self._status is not None:
                    self._status.stop()
                    self._finish_step()
            self._status, self._step = None, ""


_NOT_UTF8 = re.compile("([\udc80-\udcff]+)")


def colour() -> bool | None:
    """Return False for no colour (https://no-color.org), else None: click looks at the terminal."""
    return False if os.environ.get("NO_COLOR") else None


class Console:
    """`options` are set when the command line has been parsed; until then commands are shown without any."""

    def __init__(self, options: GlobalOptions | None = None) -> None:
        self.options = options or GlobalOptions()
        self._progress: Progress | None = None

    def render(self, text: str) -> str:
        """Return a message as a string, its commands with the global options of this run."""
        return render(text, self.options.command_line)

    def log(self, text: str) -> None:
        """Write a progress message to stderr.

        It never fails: after the terminal is closed every write is an error, and a teardown must not stop for
        that. It may be called by a signal handler, in the middle of another write (RuntimeError).
        """
        with contextlib.suppress(OSError, ValueError, RuntimeError):
            dim = sys.stderr.isatty() and colour() is not False
            self.print(click.style(wrapped(self.render(text), sys.stderr), dim=dim or None), err=True)

    def suggest(self, text: str) -> None:
        """Log a text of ours (`Message`), which names commands."""
        self.log(Message(text))

    def warn(self, text: str) -> None:
        self.log(type(text)(f"warning: {text}"))

    def fail(self, message: str) -> None:
        """Write what went wrong to stderr."""
        self._write_in_colour(f"cloudddp: {message}", fg="red")

    def error(self, error: CloudDDPError) -> None:
        """Write an error and its hint to stderr. It never fails, as `log`."""
        with contextlib.suppress(OSError, ValueError, RuntimeError):  # the exit code still reports the error
            self.fail(self.render(error.message))
            if error.hint:
                self._write_in_colour(f"  -> {self.render(error.hint)}")

    @staticmethod
    def _write_in_colour(text: str, fg: str | None = None) -> None:
        click.secho(wrapped(text, sys.stderr), fg=fg, err=True, color=colour())

    def print(self, text: str, *, err: bool = False) -> None:
        """Write data to stdout; with `err`, of a question or an error, to stderr, above a spinner."""
        if not err or self._progress is None or not self._progress.above(text):
            click.echo(text, err=err)

    def print_raw(self, text: str) -> None:
        """Write a line of a command's output to stdout: bytes that are not UTF-8 (lone surrogates) as they
        are, but on a terminal escaped. Colours are removed."""
        parts = _NOT_UTF8.split(text)
        if len(parts) == 1 or sys.stdout.isatty():
            click.echo(without_colours(text))
        else:
            shown = "".join(part if at % 2 else without_colours(part) for at, part in enumerate(parts))
            click.echo(shown.encode("utf-8", "surrogateescape"))

    def print_text(self, text: str, *, err: bool = False) -> None:
        """Write sentences for people: as `print`, but on a terminal lines break at words."""
        self.print(wrapped(text, sys.stderr if err else sys.stdout), err=err)

    def print_timings(self) -> None:
        """Write where the time went to stderr, if that was recorded. It never fails, as `log`."""
        with contextlib.suppress(OSError, ValueError, RuntimeError):
            if text := timings.finish():
                self.print(text, err=True)

    def print_json(self, value: Any) -> None:
        self.print(json.dumps(value, indent=2))

    def progress(self) -> Progress:
        """Return what shows the steps of a long operation, as a context manager."""
        self._progress = Progress(self.log, self.render)
        return self._progress

    def ask_secret(self, question: str) -> str | None:
        """Ask on the terminal, not on stdout or stderr, for something that is not shown. Return None without
        a terminal."""
        self._stop_progress()
        try:
            with open("/dev/tty", "r+b", buffering=0):  # noqa: PTH123  or getpass reads stdin
                pass
            # `--help` loads this module and needs no getpass.
            import getpass

            return getpass.getpass(question).strip()
        except (OSError, EOFError, UnicodeDecodeError):
            return None

    def ask(self, question: str, *, default: str) -> str:
        """Ask on the terminal for a text. Raises click.Abort at the end of the input."""
        asked = wrapped(f"{question} [{default}]:", sys.stderr)
        answer = click.prompt(asked, default=default, show_default=False, prompt_suffix=" ", err=True)
        return str(answer).strip()

    def choose(self, question: str, letters: Sequence[str], is_over: Callable[[], bool]) -> str:
        """Ask on the terminal for one of these letters, or a word that begins with it; the first one is the
        default. Return '' if `is_over()` is true before there is an answer. It is polled, and has to wait a
        moment itself. Raises click.Abort at the end of the input."""
        shown = "/".join([letters[0].upper(), *letters[1:]])
        while True:
            click.echo(wrapped(f"{question} [{shown}]:", sys.stderr) + " ", nl=False, err=True)
            while not select.select([sys.stdin], [], [], 0)[0]:
                if is_over():
                    return ""
            answer = os.read(sys.stdin.fileno(), 1024).decode(errors="replace")  # a line
            letter = answer.strip()[:1].lower() or letters[0]
            if not answer:
                raise click.Abort
            if letter in letters:
                return letter

    def agree(self, question: str) -> bool | None:
        """Ask on the terminal, except with -y; return None without one. Raises click.Abort at its end."""
        if self.options.yes:
            return True
        if not sys.stdin.isatty():
            return None
        self._stop_progress()
        asked = wrapped(f"{question} [y/N]:", sys.stderr)
        return click.confirm(asked, show_default=False, prompt_suffix=" ", err=True)

    def _stop_progress(self) -> None:
        """End the spinner, which would overwrite a question."""
        if self._progress is not None:
            self._progress.stop()

    def must_confirm(self, question: str) -> None:
        """As `agree`; not with --sim, where nothing costs money. Raises NotConfirmed, click.UsageError."""
        if self.options.sim:
            return
        if (answer := self.agree(question)) is None:
            raise click.UsageError("there is no terminal to ask on; add -y")
        if not answer:
            raise NotConfirmed
