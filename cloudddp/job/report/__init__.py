"""The report of a job: one HTML page, from what is on this computer."""

from __future__ import annotations

import contextlib
from pathlib import Path

REPORT = "report.html"  # in the folder of a job's results
MARK = b"<!doctype html><!-- a report of cloudddp -->"  # how it begins


def is_report(path: Path) -> bool:
    """Return whether a file is one of ours: a job may write a report.html, too."""
    with contextlib.suppress(OSError):
        return path.name == REPORT and path.read_bytes()[: len(MARK)] == MARK
    return False
