"""The tests that a run on a new machine leaves to another one with everything that tests need (.ci/run).

`TEST_SKIPS=FILE make test` writes to FILE which tests were skipped; `TEST_REST=FILE make test-all` runs those
and the slow ones, and nothing else.
"""

from __future__ import annotations

from pathlib import Path

import pytest


class Skips:
    """The plugin that writes them."""

    def __init__(self, file: Path) -> None:
        self._file = file
        file.write_text("", encoding="utf-8")

    def _write(self, report: pytest.TestReport | pytest.CollectReport) -> None:
        if report.skipped:
            with self._file.open("a", encoding="utf-8") as file:
                file.write(without_group(report.nodeid) + "\n")

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._write(report)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:  # a file that is skipped as a whole
        self._write(report)


def without_group(nodeid: str) -> str:
    """Return the id of a test without the name of its group, which pytest-xdist appends."""
    at = nodeid.rfind("@")
    return nodeid[:at] if at > nodeid.rfind("]") else nodeid


def deselect_others(config: pytest.Config, items: list[pytest.Item], file: Path) -> None:
    """Keep the slow tests, and those that were skipped by the list in `file`."""
    skipped = set(file.read_text(encoding="utf-8").splitlines())

    def is_kept(item: pytest.Item) -> bool:
        names = item.nodeid, item.nodeid.partition("::")[0]
        return item.get_closest_marker("slow") is not None or not skipped.isdisjoint(names)

    config.hook.pytest_deselected(items=[item for item in items if not is_kept(item)])
    items[:] = [item for item in items if is_kept(item)]
