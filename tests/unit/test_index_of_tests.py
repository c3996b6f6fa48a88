"""docs/traps.md, the index of the trainer's tests, names tests that exist."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_index_of_tests_names_existing_tests() -> None:
    listed = (ROOT / "docs" / "traps.md").read_text(encoding="utf-8")
    rows = [
        line
        for line in listed.splitlines()
        if line.startswith("| ") and not line.startswith(("| behaviour", "|---"))
    ]
    sources = (ROOT / "tests").rglob("test_*.py")
    existing = {
        name
        for path in sources
        for name in re.findall(r"^def (test_\w+)", path.read_text(encoding="utf-8"), re.MULTILINE)
    }
    assert rows
    for row in rows:
        named = re.findall(r"`(test_\w+)`", row)
        assert set(named) <= existing, row
        assert named or "not tested" in row, row
