"""The edge: runs the command line and turns every error into a sentence, a next step and an exit code."""

from __future__ import annotations

import errno
import os
import re
import sys
from typing import NoReturn

from cloudddp.errors import EXIT_FAILED, EXIT_INTERRUPTED, EXIT_USAGE, CloudDDPError

# Of writing to stdout: no space, a quota, a limit of the file's size.
_UNWRITABLE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
# Of files and folders that are as the user, or somebody else on this computer, has them.
_OF_FILES = (
    errno.EACCES, errno.EPERM, errno.ELOOP, errno.ENAMETOOLONG, errno.ENOTDIR, errno.EISDIR, errno.EROFS, errno.ETXTBSY,
    *_UNWRITABLE,
)  # fmt: skip


def run() -> int:
    """Run the command line and return the exit code."""
    import click

    from cloudddp import interrupts, streams
    from cloudddp.cli import main as group
    from cloudddp.cli.say import colour

    streams.guard()
    interrupts.arm()
    try:
        code = group.main(prog_name="cloudddp", standalone_mode=False, color=colour()) or 0
        if sys.stdout is not None:  # now: when the interpreter ends, a full disk would be an exit code of 120
            sys.stdout.flush()
        return code
    except click.exceptions.Exit as exit_:
        return int(exit_.exit_code)
    except click.ClickException as error:
        error.show()
        return EXIT_USAGE if isinstance(error, click.UsageError) else EXIT_FAILED
    except (KeyboardInterrupt, click.Abort):
        _tell("interrupted")
        return EXIT_INTERRUPTED
    except CloudDDPError as error:
        _tell(error.message, error.hint)
        return error.exit_code
    except BrokenPipeError:  # `cloudddp ls | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_FAILED
    except OSError as error:
        if error.errno == errno.EIO:  # the terminal has gone away
            return EXIT_FAILED
        if error.filename is None and error.errno in _UNWRITABLE:
            return _unwritable(error)
        if _is_nowhere():
            _tell("the current folder no longer exists", "cd to your project")
            return EXIT_USAGE
        if _is_of_our_folder(error):
            _tell(
                f"the state folder cannot be used: {error}",
                "set CLOUDDDP_HOME to a folder that you can write",
            )
            return EXIT_USAGE
        if error.filename is not None and error.errno in _OF_FILES:
            _tell(
                f"{os.fsdecode(error.filename)}: {error.strerror}", "change its permissions, or name another"
            )
            return EXIT_FAILED
        return _bug(error)
    except Exception as error:
        return _bug(error)


def _tell(message: str, hint: str = "") -> None:
    import click

    from cloudddp.cli.say import colour, in_words_typed

    try:
        click.secho(f"cloudddp: {message}", fg="red", err=True, color=colour())
        if hint:
            click.secho(f"  -> {in_words_typed(hint)}", err=True, color=colour())
    except OSError:
        pass  # the terminal has gone away; the exit code still tells


def _unwritable(error: OSError) -> int:
    """stdout is a file on a full disk, for one. Nothing more is written to it when the interpreter ends."""
    _tell(
        f"the output cannot be written: {error.strerror}", "the command itself may have succeeded: look again"
    )
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    return EXIT_FAILED


def _is_nowhere() -> bool:
    """Whether the folder that this process is in has been deleted, so that no relative path can be resolved."""
    try:
        os.getcwd()  # noqa: PTH109
    except OSError:
        return True
    return False


def _is_of_our_folder(error: OSError) -> bool:
    from pathlib import Path

    from cloudddp import state

    try:
        home = state.home()
    except CloudDDPError:  # there is none
        return False
    where = Path(str(error.filename or ""))
    return where.is_absolute() and (where.is_relative_to(home) or home.is_relative_to(where))


def _bug(error: Exception) -> int:
    """Keep the traceback in a file: it is for us, not for the user."""
    import traceback

    from cloudddp import state

    try:
        path = state.home() / "debug.log"
        told = f"{' '.join(_without_values(sys.argv))}\n{traceback.format_exc()}"
        state.write_atomic(path, told.encode(errors="backslashreplace"))
        where = f"the details are in {path}"
    except (OSError, CloudDDPError):
        where = "".join(traceback.format_exception_only(error)).strip()
    _tell(f"a bug in cloudddp: {type(error).__name__}: {error}", f"{where}; `cloudddp down` still works")
    return EXIT_FAILED


def _without_values(words: list[str]) -> list[str]:
    """Return a command line without the values of -e and --env: the file is for sending to us."""
    shown = []
    follows = False
    for word in words:
        given = re.fullmatch(r"(--env=|-e|)([A-Za-z_]\w*)=.*", word, re.DOTALL)
        shown.append(f"{given[1]}{given[2]}=****" if given and (given[1] or follows) else word)
        follows = word in ("-e", "--env")
    return shown


def main() -> NoReturn:
    try:
        sys.exit(run())
    except KeyboardInterrupt:  # while the modules are imported
        sys.stderr.write("cloudddp: interrupted\n")
        sys.exit(EXIT_INTERRUPTED)


if __name__ == "__main__":
    main()
