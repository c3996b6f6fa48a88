"""What the collection of tests imports: each test process pays for it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from support import tiers
from support.harness import ROOT, clean_environment
from support.skips import Skips, without_group

WITH_TORCH = {"train", "examples"}  # its subject is torch


def test_collection_imports_torch_only_for_tests_of_torch() -> None:
    folders = [
        str(path)
        for path in sorted(tiers.TESTS.iterdir())
        if path.name not in WITH_TORCH and any(path.rglob("test_*.py"))
    ]
    code = (
        "import sys, pytest\n"
        "code = pytest.main(['--collect-only', '-qq', '-p', 'no:cacheprovider', *sys.argv[1:]])\n"
        "assert code == 0, code\n"
        "print('imported:', sorted({'torch', 'torchvision', 'sklearn', 'tensorboard'} & sys.modules.keys()))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, *folders],
        cwd=ROOT,
        env=clean_environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout.endswith("imported: []\n"), done.stdout[-2000:] + done.stderr


def test_entry_of_the_slow_tests_that_names_nothing_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    gone = {"nowhere": "", "unit/test_ranks.py::test_none": ""}
    assert tiers.missing(["unit", "unit/test_ranks.py", *gone]) == list(gone)
    monkeypatch.setattr(tiers, "SLOW", gone)
    with pytest.raises(pytest.UsageError, match=r"does not exist: nowhere, unit/test_ranks\.py::test_none"):
        tiers.mark_slow_tests([])


def test_run_of_the_rest_has_the_slow_tests_and_those_that_were_skipped(tmp_path: Path) -> None:
    skipped = "tests/unit/test_collection.py::test_entry_of_the_slow_tests_that_names_nothing_is_an_error"
    (tmp_path / "skips").write_text(f"{skipped}\n")
    collect = "-m pytest --collect-only -q -p no:cacheprovider tests/unit/test_collection.py"
    env = clean_environment(TEST_SKIPPED=str(tmp_path / "skips"))
    done = subprocess.run(
        [sys.executable, *collect.split()], cwd=ROOT, env=env, capture_output=True, text=True, check=True
    )
    slow = "tests/unit/test_collection.py::test_collection_imports_torch_only_for_tests_of_torch"
    assert {line for line in done.stdout.splitlines() if "::" in line} == {slow, skipped}


def test_ids_of_skipped_tests_and_files_are_written(tmp_path: Path) -> None:
    plugin = Skips(tmp_path / "skips")
    for name, outcome in (("tests/a.py::test_b[x]@group", "skipped"), ("tests/a.py::test_c", "passed")):
        report = pytest.TestReport(name, ("", None, ""), {}, outcome, None, "setup")  # type: ignore[arg-type]
        plugin.pytest_runtest_logreport(report)
    plugin.pytest_collectreport(pytest.CollectReport("tests/d.py", "skipped", None, []))
    assert (tmp_path / "skips").read_text() == "tests/a.py::test_b[x]\ntests/d.py\n"


@pytest.mark.parametrize("name", ["tests/a.py::test_b", "tests/a.py::test_b[x@y]", "tests/a.py"])
def test_skipped_test_is_listed_without_its_group(name: str) -> None:
    assert without_group(name) == without_group(f"{name}@a-1") == name
