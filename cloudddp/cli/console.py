"""The console: everything that cloudddp prints goes through here. Data on stdout, messages and progress on
stderr.

It writes the commands in messages as this user has to type them. It does not depend on clusters, settings or
AWS.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import sys
from collections.abc import Sequence
from typing import Any

import click

from cloudddp import timings
from cloudddp.cli.progress import Progress
from cloudddp.cli.terminal_text import wrapped
from cloudddp.config.global_options import GlobalOptions
from cloudddp.errors import CloudDDPError, Text, parts, render
from cloudddp.text import without_colours

_NOT_UTF8 = re.compile("([\udc80-\udcff]+)")


def colour() -> bool | None:
    """Return False where the user wants no colour (https://no-color.org), else None: click looks at the
    terminal."""
    return False if os.environ.get("NO_COLOR") else None


class Console:
    """`options` are set when the command line has been parsed; until then commands are shown without any."""

    def __init__(self, options: GlobalOptions | None = None) -> None:
        self.options = options or GlobalOptions()
        self._progress: Progress | None = None

    def render(self, text: Text) -> str:
        """Return a message as a string, its commands with the global options of this run."""
        return render(text, self.options.command_line)

    def log(self, *texts: Text) -> None:
        """Write a progress message to stderr.

        It never fails: after the terminal is closed every write is an error, and a teardown must not stop for
        that. It may be called by a signal handler, in the middle of another write (RuntimeError).
        """
        try:
            text = tuple(part for one in texts for part in parts(one))
            dim = sys.stderr.isatty() and colour() is not False
            self._write_error(click.style(wrapped(self.render(text), sys.stderr), dim=dim or None))
        except (OSError, ValueError, RuntimeError):
            pass

    def warn(self, *texts: Text) -> None:
        self.log("warning: ", *texts)

    def fail(self, message: str) -> None:
        """Write what went wrong to stderr."""
        text = wrapped(f"cloudddp: {message}", sys.stderr)
        click.secho(text, fg="red", err=True, color=colour())

    def error(self, error: CloudDDPError) -> None:
        """Write an error and its hint to stderr. It never fails, as `log`."""
        try:
            self.fail(error.message)
            if error.hint:
                hint = wrapped(f"  -> {self.render(error.hint)}", sys.stderr)
                click.secho(hint, err=True, color=colour())
        except (OSError, ValueError, RuntimeError):
            pass  # the terminal is closed; the exit code still reports the error

    def print(self, text: str, *, err: bool = False) -> None:
        """Write data to stdout (or, with `err`, what belongs to a question or an error to stderr)."""
        if err:
            self._write_error(text)
        else:
            click.echo(text)

    def print_raw(self, text: str) -> None:
        """Write a line of a command's output to stdout: bytes that are not UTF-8 (lone surrogates) as they
        are, but on a terminal escaped. Colours are removed."""
        parts = _NOT_UTF8.split(text)
        if len(parts) == 1 or sys.stdout.isatty():
            click.echo(without_colours(text))
        else:
            shown = "".join(part if at % 2 else without_colours(part) for at, part in enumerate(parts))
            click.echo(shown.encode("utf-8", "surrogateescape"))

    def _write_error(self, text: str) -> None:
        if self._progress is None or not self._progress.above(text):
            click.echo(text, err=True)

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
        """Ask on the terminal for something that is not shown. Return None if there is no terminal.

        Neither the question nor the answer is on stdout or stderr, which may be files.
        """
        if self._progress is not None:
            self._progress.stop()  # its spinner would overwrite the question
        try:
            with open("/dev/tty", "r+b", buffering=0):  # noqa: PTH123  or getpass reads stdin
                pass
            # `--help` loads this module and needs no getpass.
            import getpass

            return getpass.getpass(question).strip()
        except (OSError, EOFError, UnicodeDecodeError):
            return None

    def confirm(self, question: str, *, default: bool | None = False) -> bool:
        """Ask on the terminal. Raises click.Abort at the end of the input."""
        return click.confirm(question, default=default, err=True)

    def choose(self, question: str, letters: Sequence[str]) -> str:
        """Ask on the terminal for one of these letters, or a word that begins with it; the first one is the
        default. Raises click.Abort at the end of the input."""
        shown = "/".join([letters[0].upper(), *letters[1:]])
        while True:
            answer = click.prompt(f"{question} [{shown}]", default="", show_default=False, err=True)
            letter = answer.strip()[:1].lower() or letters[0]
            if letter in letters:
                return letter

    def must_confirm(self, question: str, *, yes: bool) -> None:
        """Ask, except with -y, or with --sim, where nothing costs money.

        Raises CloudDDPError if the answer is no, UsageError if there is no terminal to ask on.
        """
        if yes or self.options.sim:
            return
        if not sys.stdin.isatty():
            raise click.UsageError("there is no terminal to ask on; add -y")
        if not self.confirm(question):
            raise CloudDDPError("not confirmed; nothing was changed")
