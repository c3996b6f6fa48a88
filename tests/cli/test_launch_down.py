"""`launch --down` and its bad input. Nodes that really power off:
tests/lab/product/test_planned_end.py."""

from __future__ import annotations

from typing import Any

import pytest


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--down",), "--down needs -d"),
        (("-d", "--keep", "5"), "--keep needs --down, or job.on_stall"),
        (("-d", "--down", "--keep", "-1"), "-1"),
        (("-d", "--down", "--keep", "long"), "'long' is not a valid float"),
        (("--save-minutes", "16"), "save_minutes"),
        (("--save-minutes", "-1"), "save_minutes"),
    ],
)
def test_bad_input_is_refused_before_anything_is_called(
    cli: Any, words: tuple[str, ...], message: str
) -> None:
    cli.write("ok.py", "")
    done = cli("launch", *words, "ok.py")
    assert done.returncode == 2
    assert message in done.stderr
