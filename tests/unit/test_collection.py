"""What the collection of tests imports: each test process pays for it."""

from __future__ import annotations

import subprocess
import sys

import pytest
from support import tiers
from support.harness import ROOT, clean_environment

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
