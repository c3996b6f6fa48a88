"""Sessions of the command line, which report to the console."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace

from cloudddp.cli.console import Console
from cloudddp.config.command_line import variable_flags
from cloudddp.operations import session as sessions

Session = sessions.Session[Console]

__all__ = ["Session", "start_session"]


def start_session(
    console: Console,
    *,
    variables: Sequence[str] | None = None,
    dry_run: bool = False,
    tolerant_verb: str = "",
) -> Session:
    """Return the session; unless `variables` is None, these and --env-file are settings of the job."""
    options = console.options
    if variables is not None:
        more = variable_flags(variables, options.env_files, os.environ)
        options = replace(options, flags=(*options.flags, *more))
    return sessions.start(console, options, dry_run=dry_run, tolerant_verb=tolerant_verb)
