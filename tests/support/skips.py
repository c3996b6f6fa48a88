"""CI runs the fast tests without optional packages first, and those that were skipped afterwards with them
(.ci/run).

`TEST_SKIPS=FILE make test` writes which tests were skipped to FILE; `TEST_SKIPPED=FILE make test-all` runs
those and the slow ones, and nothing else. Every run prints a failure when it happens.
"""

from __future__ import annotations

from pathlib import Path

import pytest


class Skips:
    """Pytest plugin: writes the ids of skipped tests and files to a file."""

    def __init__(self, file: Path) -> None:
        self._file = file
        file.write_text("", encoding="utf-8")

    def _write(self, report: pytest.TestReport | pytest.CollectReport) -> None:
        if report.skipped:
            with self._file.open("a", encoding="utf-8") as file:
                file.write(without_group(report.nodeid) + "\n")

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._write(report)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        self._write(report)


class Failures:
    """Pytest plugin: prints a failure when it happens, so that a run that is ended has said what failed."""

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            print(f"\nFAILED ({report.when}) {report.nodeid}\n{report.longreprtext[-4000:]}", flush=True)


def without_group(nodeid: str) -> str:
    """Return the id of a test without the name of its group, which pytest-xdist appends."""
    at = nodeid.rfind("@")
    return nodeid[:at] if at > nodeid.rfind("]") else nodeid


def select_slow_and_skipped(config: pytest.Config, items: list[pytest.Item], file: Path) -> None:
    """Keep the slow tests, and those that were skipped by the list in `file`."""
    skipped = set(file.read_text(encoding="utf-8").splitlines())
    kept, others = [], []
    for item in items:
        is_kept = item.get_closest_marker("slow") or skipped & {item.nodeid, item.nodeid.partition("::")[0]}
        (kept if is_kept else others).append(item)
    config.hook.pytest_deselected(items=others)
    items[:] = kept
