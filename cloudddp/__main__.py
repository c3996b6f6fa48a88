"""The edge: runs the command line and turns every error into a sentence, a next step and an exit code."""

from __future__ import annotations

import errno
import io
import os
import sys
from typing import NoReturn

from cloudddp.errors import EXIT_FAILED, EXIT_INTERRUPTED, EXIT_USAGE, CloudDDPError


def run() -> int:
    """Run the command line and return the exit code."""
    import click

    from cloudddp import interrupts
    from cloudddp.cli import main as group

    for stream in (sys.stdout, sys.stderr):  # a rank may print what this terminal cannot show
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")
    interrupts.arm()
    try:
        return group.main(prog_name="cloudddp", standalone_mode=False) or 0
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
        if _is_of_our_folder(error):
            _tell(
                f"the state folder cannot be used: {error}",
                "set CLOUDDDP_HOME to a folder that you can write",
            )
            return EXIT_USAGE
        return _bug(error)
    except Exception as error:
        return _bug(error)


def _tell(message: str, hint: str = "") -> None:
    import click

    from cloudddp.cli.say import in_words_typed

    try:
        click.secho(f"cloudddp: {message}", fg="red", err=True)
        if hint:
            click.secho(f"  -> {in_words_typed(hint)}", err=True)
    except OSError:
        pass  # the terminal has gone away; the exit code still tells


def _is_of_our_folder(error: OSError) -> bool:
    from pathlib import Path

    from cloudddp import state

    home = state.home()
    where = Path(os.fsdecode(error.filename or ""))
    return where.is_absolute() and (where.is_relative_to(home) or home.is_relative_to(where))


def _bug(error: Exception) -> int:
    """Keep the traceback in a file: it is for us, not for the user."""
    import traceback

    from cloudddp import state

    path = state.home() / "debug.log"
    try:
        state.write_atomic(path, f"{' '.join(sys.argv)}\n{traceback.format_exc()}")
        where = f"the details are in {path}"
    except OSError:
        where = "".join(traceback.format_exception_only(error)).strip()
    _tell(f"a bug in cloudddp: {type(error).__name__}: {error}", f"{where}; `cloudddp down` still works")
    return EXIT_FAILED


def main() -> NoReturn:
    sys.exit(run())


if __name__ == "__main__":
    main()
