"""The processor time of each test, on any machine: `TEST_COSTS=FILE make test` appends to FILE.

One line per test: its id, seconds of all processes, of the test process alone, and of the clock. Simulators,
nodes and orphans count, because each test process is in a control group of its own, which root may create.
Elsewhere only the test process counts, with the children that it has waited for.
`python tests/support/costs.py FILE` prints the sums per file, the largest first.
"""

from __future__ import annotations

import contextlib
import functools
import os
import resource
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

GROUPS = Path("/sys/fs/cgroup")


class Costs:
    """The plugin of one test process."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._all = _usage_of_own_group() or _usage_of_this_process
        self._before = 0.0, 0.0, 0.0
        self._write("start", self._now())

    def _now(self) -> tuple[float, float, float]:
        return self._all(), _seconds(resource.RUSAGE_SELF), time.monotonic()

    def _write(self, name: str, figures: tuple[float, ...]) -> None:
        line = "\t".join([name, *(f"{figure:.3f}" for figure in figures)]) + "\n"
        with self._file.open("a", encoding="utf-8") as file:
            file.write(line)

    def _step(self, name: str) -> None:
        now = self._now()
        self._write(name, tuple(after - before for after, before in zip(now, self._before, strict=True)))
        self._before = self._now()

    def pytest_collection_finish(self) -> None:
        self._step("collection")

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        self._before = self._now()
        try:
            return (yield)
        finally:
            self._step(item.nodeid)

    @pytest.hookimpl(wrapper=True)
    def pytest_sessionfinish(self) -> Iterator[None]:
        self._before = self._now()
        try:
            return (yield)
        finally:
            self._step("end")


def _seconds(who: int) -> float:
    usage = resource.getrusage(who)
    return usage.ru_utime + usage.ru_stime


def _usage_of_this_process() -> float:
    return _seconds(resource.RUSAGE_SELF) + _seconds(resource.RUSAGE_CHILDREN)


def _usage_of_own_group() -> Callable[[], float] | None:
    """Move this process to a new control group; return what reads its seconds, None if not permitted."""
    for controller, file, unit in (("cpuacct", "cpuacct.usage", 1e9), ("", "cpu.stat", 1e6)):
        for earlier in (GROUPS / controller).glob("tests-*"):
            with contextlib.suppress(OSError):  # one that is in use
                earlier.rmdir()
        group = GROUPS / controller / f"tests-{os.getpid()}"
        with contextlib.suppress(OSError):
            group.mkdir()
            (group / "cgroup.procs").write_text(str(os.getpid()))
            return functools.partial(_first_number, group / file, unit)
    return None


def _first_number(path: Path, unit: float) -> float:
    """Read `usage_usec 123` or `123`."""
    return int(path.read_text().split("\n")[0].split()[-1]) / unit


def by_file(lines: list[str]) -> list[tuple[str, int, float, float]]:
    """Return (file, tests, seconds of all processes, of the test process), the most expensive first."""
    sums: dict[str, list[float]] = defaultdict(lambda: [0, 0.0, 0.0])
    for line in lines:
        name, everything, own, _ = line.split("\t")
        found = sums[name.partition("::")[0]]
        found[0] += 1
        found[1] += float(everything)
        found[2] += float(own)
    rows = [(name, int(tests), everything, own) for name, (tests, everything, own) in sums.items()]
    return sorted(rows, key=lambda row: -row[2])


if __name__ == "__main__":
    found = by_file(Path(sys.argv[1]).read_text(encoding="utf-8").splitlines())
    for name, tests, everything, own in found:
        print(f"{everything:9.2f} {own:9.2f} {tests:5d}  {name}")
    print(f"{sum(row[2] for row in found):9.2f} {sum(row[3] for row in found):9.2f}        all")
