"""The entry point: runs the command line and turns every error into a message, a hint and an exit code."""

from __future__ import annotations

import errno
import os
import re
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path

import click

from cloudddp import signals
from cloudddp.cli.console import Console, colour, flush_streams, guard_streams
from cloudddp.cli.main import main
from cloudddp.errors import EXIT_FAILED, EXIT_INTERRUPTED, EXIT_USAGE, CloudDDPError, Interrupted, UsageError
from cloudddp.files import state_home, write_atomic
from cloudddp.ssh import login_shell

# Errors of writing to stdout: no space, a quota, a limit of the file's size.
_UNWRITABLE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
# Errors caused by how files and folders are set up on this computer, not by cloudddp.
_FILE_ERRNOS = (errno.ELOOP, errno.ENAMETOOLONG, errno.EROFS, errno.ETXTBSY, *_UNWRITABLE)
_FILE_ERRORS = (PermissionError, NotADirectoryError, IsADirectoryError)


def run(arguments: Sequence[str]) -> int:
    """Run a command line, without the program's name, and return the exit code."""
    guard_streams()
    console = Console()
    try:
        return _run(console, arguments)
    finally:
        if noise := login_shell.warning():
            console.warn(noise)
        console.print_timings()
        # Until the process has ended: Python resets its own handlers when the interpreter exits.
        signals.ignore()
        flush_streams()  # now: a stream that cannot be written when the interpreter exits means exit code 120


def _run(console: Console, arguments: Sequence[str]) -> int:
    try:
        # The report of an error is not interrupted: it may name nodes that are still running.
        with signals.interruptible():
            code = main.main(
                list(arguments), prog_name="cloudddp", standalone_mode=False, color=colour(), obj=console
            )
            sys.stdout.flush()  # now, while an error can still be reported
        return int(code or 0)
    except click.exceptions.Exit as exit_:
        return int(exit_.exit_code)
    except click.ClickException as error:
        error.show()
        return EXIT_USAGE if isinstance(error, click.UsageError) else EXIT_FAILED
    except (KeyboardInterrupt, click.Abort):
        console.error(Interrupted("interrupted"))
        return EXIT_INTERRUPTED
    except CloudDDPError as error:
        console.error(error)
        return error.exit_code
    except BrokenPipeError:  # `cloudddp ls | head`
        return EXIT_FAILED
    except OSError as error:
        return _os_error(console, error, arguments)
    except Exception as error:
        return _bug(console, error, arguments)


def _os_error(console: Console, error: OSError, arguments: Sequence[str]) -> int:
    if error.errno == errno.EIO:  # the terminal is closed
        return EXIT_FAILED
    if (found := _user_error(error)) is None:
        return _bug(console, error, arguments)
    console.error(found)
    return found.exit_code


def _user_error(error: OSError) -> CloudDDPError | None:
    """Return what an error of the operating system means to the user; None where it is a bug of cloudddp."""
    if error.filename is None and error.errno in _UNWRITABLE:
        hint = "the command itself may have succeeded; check before you repeat it"
        return CloudDDPError(f"cannot write the output: {error.strerror}", hint=hint)
    try:
        os.getcwd()  # noqa: PTH109
    except OSError:  # it was deleted, so that no relative path can be resolved
        return UsageError("the current folder no longer exists", hint="cd to your project")
    if _is_in_state_folder(error):
        hint = "set CLOUDDDP_HOME to a folder that you can write to"
        return UsageError(f"cannot use the state folder: {error}", hint=hint)
    if error.filename is not None and (isinstance(error, _FILE_ERRORS) or error.errno in _FILE_ERRNOS):
        name = os.fsdecode(error.filename)
        return CloudDDPError(f"{name}: {error.strerror}", hint="change its permissions, or choose another")
    return None


def _is_in_state_folder(error: OSError) -> bool:
    try:
        home = state_home()
    except CloudDDPError:  # there is none
        return False
    path = Path(str(error.filename or ""))
    return path.is_absolute() and (path.is_relative_to(home) or home.is_relative_to(path))


def _bug(console: Console, error: Exception, arguments: Sequence[str]) -> int:
    """Keep the traceback in a file: it is for the developers, not for the user."""
    try:
        path = state_home() / "debug.log"
        line = " ".join(["cloudddp", *_without_values(arguments)])
        text = f"{line}\n{''.join(traceback.format_exception(error))}"
        write_atomic(path, text.encode(errors="backslashreplace"))
        details = f"the details are in {path}"
    except (OSError, CloudDDPError):
        details = "".join(traceback.format_exception_only(error)).strip()
    message = f"a bug in cloudddp: {type(error).__name__}: {error}"
    console.error(CloudDDPError(message, hint=f"{details}; `cloudddp down` still works"))
    return EXIT_FAILED


def _without_values(arguments: Sequence[str]) -> list[str]:
    """Return a command line without the values of --env and -e (also `-de K=V`), which may be secret."""
    shown, follows = [], False
    for word in arguments:
        given = re.fullmatch(r"(--env=|-[a-z]*e|)([A-Za-z_]\w*)=.*", word, re.DOTALL)
        shown.append(f"{given[1]}{given[2]}=****" if given and (given[1] or follows) else word)
        follows = word == "--env" or re.fullmatch("-[a-z]*e", word) is not None
    return shown
