"""Sessions of the command line, which report to the console."""

from __future__ import annotations

from cloudddp.cli.console import Console
from cloudddp.operations import session as sessions
from cloudddp.operations.session import is_elsewhere
from cloudddp.operations.session import start as start_session

Session = sessions.Session[Console]

__all__ = ["Session", "is_elsewhere", "start_session"]
