"""Documents name tests that exist; docs/traps.md is the index of the trainer's."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_names_of_tests_in_documents_exist() -> None:
    sources = list((ROOT / "tests").rglob("test_*.py"))
    existing = {path.stem for path in sources}
    for path in sources:
        existing.update(re.findall(r"^def (test_\w+)", path.read_text(encoding="utf-8"), re.MULTILINE))
    documents = [*(ROOT / "docs").glob("*.md"), *(ROOT / "examples").rglob("*.md")]
    named = {
        (document.name, name)
        for document in documents
        for name in re.findall(r"`(test_\w+)`", document.read_text(encoding="utf-8"))
    }
    assert len(named) > 50
    assert {one for one in named if one[1] not in existing} == set()


def test_each_behaviour_of_the_trainer_names_its_test() -> None:
    listed = (ROOT / "docs" / "traps.md").read_text(encoding="utf-8").splitlines()
    rows = [line for line in listed if line.startswith("| ") and not line.startswith("| behaviour")]
    assert rows
    assert [row for row in rows if "`test_" not in row and "not tested" not in row] == []
